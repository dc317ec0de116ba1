"""The report says what the plan holds, within 80 columns, with and without colour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pages import printed

from planner.answer import Plan
from planner.report.format import bar, digits, large, percent, seconds
from planner.report.terminal import LINES, panel_text, render, screen, summary

MakePlan = Callable[..., Plan]
WIDEST: dict[str, Any] = {
    "tp": 16, "cp": 16, "pp": 64, "vpp": 4, "dp": 1024, "ep": 64, "etp": 2, "micro_batch_size": 16,
    "num_microbatches": 1024, "schedule": "interleaved-1f1b", "zero_stage": 3, "shard_size": 64,
    "recompute": "selective", "recompute_modules": ("core_attn", "layernorm", "moe_act"), "num_gpus_spare": 12,
}  # fmt: skip


def text(plan: Plan, width: int = 80, **console: Any) -> str:
    return printed(render(plan), width, **console)


def test_the_numbers_people_quote_are_there(make_plan: MakePlan) -> None:
    shown = text(make_plan())
    for expected in (
        "llama-3.1-405b on 2,048 × h100-sxm-80gb", "TP 8 × PP 16 × DP 16 · micro-batch 1 × 128", "22.08 s",
        "20.98–23.40 s", "759,838", "371.0", "412", "41.7%", "229 days", "11.24M GPU-hours", "$35.97M", "19,108 MWh",
        "proven", "gap 0.04%", "calibrated", "1,516 legal shapes", "312 can fit",
    ):  # fmt: skip
        assert expected in shown


def test_stages_that_hold_the_same_share_a_row(make_plan: MakePlan) -> None:
    rows = [line.split() for line in text(make_plan()).splitlines() if line.rstrip().endswith("░")]
    assert [row[0] for row in rows] == ["0", "1–7", "8", "9–14", "15"]
    assert rows[0][1:8] == ["7", "(0–6)", "embed", "16", "51.0", "103.0", "71.3"]
    assert rows[-1][1:8] == ["8", "(118–125)", "head", "1", "51.0", "103.0", "63.8"]


def test_recompute_has_a_column_only_where_stages_mix(make_plan: MakePlan) -> None:
    shown = text(make_plan(stage_recompute={"full": 8})).split("Stages")[1]
    assert " recompute " not in shown.split("Rejected")[0]
    assert "3 full" in text(make_plan(stage_recompute={"none": 5, "full": 3}))


def test_breakdown_lists_every_item_that_takes_time(make_plan: MakePlan) -> None:
    shown = text(make_plan()).split("Where the")[1].split("Alternatives")[0]
    assert [line.split()[0] for line in shown.splitlines()[1:] if line.strip()] == [
        "compute", "pipeline", "tensor-parallel", "pipeline", "host", "data-parallel", "optimizer",
    ]  # fmt: skip


def test_rejections_come_most_frequent_first_with_an_example(make_plan: MakePlan) -> None:
    shown = text(make_plan())
    assert shown.index("1,204  out of memory") < shown.index("312  heads not divisible")
    assert "8 key-value heads cannot be split" in shown


def test_a_layout_that_does_not_fit_says_by_how_much(make_plan: MakePlan) -> None:
    plan = make_plan(total_gib=92.0, fits=False, searched=False)
    assert "Does not fit: stage 0 needs 92.0 GiB, 12.9 more than the GPU's 79.1" in text(plan)
    assert "92.0!" in text(plan)
    assert "does not fit" in summary(plan.best)


def screen_of(plan: Plan, **more: Any) -> list[str]:
    return printed(screen(plan, after="next  plan show plan.json", **more)).splitlines()


def stopped(plan: Plan) -> Plan:
    search = plan.search.model_copy(update={"outcome": "feasible", "gap": 0.23})
    return plan.model_copy(update={"search": search, "command": "plan --model 405b --gpus 2048 --time-limit 20"})


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pp": 1, "num_microbatches": 4},
        {"pp": 63, "num_microbatches": 64},
        {"total_gib": 92.0, "fits": False},
        WIDEST,
    ],
)
@pytest.mark.parametrize("change", [lambda plan: plan, stopped])
def test_the_answer_fits_one_screen(make_plan: MakePlan, sizes: dict[str, Any], change: Callable[[Plan], Plan]) -> None:
    plan = change(make_plan(**sizes))
    lines = screen_of(plan)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 80
    assert len(screen_of(plan, own=plan.alternatives[0])) <= LINES
    assert lines[-1] == "next  plan show plan.json"


def test_a_search_that_stopped_early_says_so_in_the_panel_with_what_goes_on(make_plan: MakePlan) -> None:
    panel = panel_text(stopped(make_plan()))
    assert "gap 23.00%" in panel
    assert "--time-limit 80" in panel
    assert "--time-limit" not in panel_text(make_plan())


def test_str_of_a_plan_is_its_panel(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert str(plan) == panel_text(plan)
    assert len(str(plan).splitlines()) < 16
    assert "22.08 s" in repr(plan)
    assert len(repr(plan)) < 160


def test_sections_are_shown_by_name_and_those_without_anything_are_named(make_plan: MakePlan) -> None:
    shown = printed(render(make_plan(), names=("rejected", "corrections")))
    assert "1,204" in shown
    assert "Where the" not in shown
    assert "corrections: nothing to show" in shown


@pytest.mark.parametrize("sizes", [{}, {"pp": 1, "num_microbatches": 4}, {"total_gib": 7301.0, "fits": False}, WIDEST])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(
    make_plan: MakePlan, sizes: dict[str, Any], mixed: bool, width: int
) -> None:
    shown = text(make_plan(**sizes, stage_recompute={"none": 5, "full": 3} if mixed else None), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown


def test_colour_on_a_terminal_only(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in text(make_plan())
    assert "\x1b[3" in text(make_plan(), force_terminal=True, color_system="standard")
    assert "\x1b[3" not in text(make_plan(), force_terminal=True, color_system="standard", no_color=True)


def test_quantities() -> None:
    assert [seconds(s) for s in (22.081, 1.5, 0.812, 4.5e-5, 0)] == ["22.08 s", "1.500 s", "812 ms", "45.00 µs", "0 s"]
    assert seconds(0.11, 22.0) == "0.11 s"
    assert [digits(n) for n in (1234.5, 412.3, 41.7, 0.8123)] == ["1,234", "412", "41.70", "0.812"]
    assert [large(n) for n in (2048, 405_853_388_800, 15e12)] == ["2,048", "405.9B", "15T"]
    assert (percent(0.4167), percent(0.0004, 2)) == ("41.7%", "0.04%")
    assert (bar(0.5, 4, "░"), bar(2.0, 4), bar(1e-9, 4), bar(0, 4)) == ("██░░", "████", "█   ", "    ")
