"""Rows say what stages and layouts hold, in the words of their columns."""

from __future__ import annotations

from collections.abc import Callable

from planner.answer import Plan
from planner.report.rows import entry_of, runs_of_stages
from planner.report.view import view_of

MakePlan = Callable[..., Plan]


def test_a_run_of_alike_stages_is_as_slow_and_as_full_as_its_worst(make_plan: MakePlan) -> None:
    rows = view_of(make_plan(pp=63, num_microbatches=64)).stages
    runs = runs_of_stages(rows)
    assert [run.cells[0] for run in runs] == ["0", "1–61", "62"]
    assert sum(len(run.stages) for run in runs) == 63
    assert runs[1].peak_bytes == max(row.peak_bytes for row in rows[1:62])
    ends = [row.cells[-1] for row in sorted(rows[1:62], key=lambda row: -row.peak_bytes)]
    assert runs[1].cells[-1] == (ends[0] if ends[0] == ends[-1] else f"{ends[0]}–{ends[-1]}")


def test_a_layout_beside_another_says_only_what_differs(make_plan: MakePlan) -> None:
    plan = make_plan()
    alone, other = entry_of("best", plan.best), entry_of("1.", plan.alternatives[0], plan.best)
    assert (alone.more, alone.manner) == ("", "1f1b, ZeRO-1, no recompute, sequence parallel")
    assert (other.more, other.manner, other.peak) == ("+2.3%", "", "76.2")
    assert other.remark == other.trade
    assert entry_of("given", make_plan(total_gib=92.0, fits=False).best).peak == "92.0!"
