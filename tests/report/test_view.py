"""A plan's lines are worked out once: the terminal and the HTML report both show every one of them.

Rows say what stages and layouts hold, in the words of their columns.
The table of layouts under assumptions: its choice is the minimax, and both reports show it.
Reports name the switch left unsaid that matters most, on the terminal, as HTML, and in a line of --runs.
A report claims what the search proved: of the schedules searched, and to the gap that it reached.
The lines about months of training: what they say, and that both reports say it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pages import DRAWN, Page, printed
from tables import beside

from planner.answer import (
    AS_PLANNED,
    Goodput,
    Offer,
    Plan,
    RecipeGain,
    RecipeRefusal,
    RiskOffer,
    RobustStep,
    RunCost,
    SearchReport,
    Sustained,
)
from planner.cli import main
from planner.layout.evaluate import evaluate
from planner.report import small
from planner.report.format import OWN_TRAINER, SURE, fits_with, gibibytes, says_bound, says_outcome, says_unsaid, unsure
from planner.report.page import render_html, report_page
from planner.report.rows import Entry, Robust, Table, robust_of, runs_of_stages
from planner.report.terminal import render, summary
from planner.report.view import SECTIONS, View, view_of
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec

TABLES = beside(__file__)

MakePlan = Callable[..., Plan]


def terminal(plan: Plan) -> str:
    """The terminal's report on one so wide that no line is broken."""
    return " ".join(printed(render(plan), 400).split())


def lines(view: View) -> Iterator[str]:
    """Every text of the view, a cell of a table at a time."""
    yield view.job
    yield from (part for line in (*view.lines, *view.below) for part in line.parts if line in view.lines)
    for figure in (*view.figures, *view.cost, *view.goodput, *filter(None, [view.sustained])):
        yield from (figure.text, figure.name if figure in view.figures else "")
    for section in view.sections:
        yield section.title
        for part in section.parts:
            if isinstance(part, Table):
                yield from (cell for row in part.rows for cell in row)
                yield from part.notes
            else:
                yield from (text for each in part for text in _texts(each))


def _texts(each: Entry | str) -> tuple[str, ...]:
    if isinstance(each, str):
        return (each,)
    return each.name, each.sizes, each.step, each.peak, each.how, each.fit.replace(SURE, "")


def test_sections_stand_in_one_order(make_plan: MakePlan) -> None:
    names = [section.name for section in view_of(risky(make_plan())).sections]
    assert names == [name for name in SECTIONS if name in names]
    assert {"sure", "seconds", "alternatives", "stages", "rejected", "proof", "warnings"} <= set(names)


def risky(plan: Plan) -> Plan:
    """The plan with a risk of memory and what more would buy, a warning, and a proof that says what it left out."""
    memory = plan.stages[0].memory
    wide = memory.model_copy(update={"total_bytes_interval": (0.9 * memory.total_bytes, 1.1 * memory.total_bytes)})
    stages = (plan.stages[0].model_copy(update={"memory": wide}), *plan.stages[1:])
    search = plan.search and plan.search.model_copy(update={"unsearched": ("offloading",), "outcome": "bounded"})
    said = {"stages": stages, "warnings": ("the exporter rounds something",), "oom_probability": 0.072}
    offer = RiskOffer(oom_risk=0.3, oom_probability=0.264, step_s=0.95 * plan.step.step_s)
    others = tuple(other.model_copy(update={"oom_probability": 0.002}) for other in plan.alternatives)
    best = plan.best.model_copy(update=said)
    return plan.model_copy(update={"best": best, "alternatives": others, "search": search, "risk_offer": offer})


def with_recipe(plan: Plan) -> Plan:
    """The plan with a recipe, beside an alternative that overlaps no exchanges."""
    recipe = {"ep_overlap": "delayed", "cuda_graph": "none", "p2p_overlap": True}
    gain = RecipeGain(switch="ep_overlap", value="delayed", without_step_s=27.6, replanned=False)
    offer = Offer(
        switch="bf16_gradients", value=True, step_s=20.0, replanned=False, changes="numerics", allow=("bf16_gradients",)
    )
    refusal = RecipeRefusal(switch="shared_expert_overlap", value=True, rule="ep_overlap does not go with it")
    said = {"recipe": recipe, "recipe_gains": (gain,), "offers": (offer,), "recipe_refused": (refusal,)}
    others = tuple(o.model_copy(update={"recipe": {**recipe, "ep_overlap": False}}) for o in plan.alternatives)
    return plan.model_copy(update={"best": plan.best.model_copy(update=said), "alternatives": others})


def uncalibrated(plan: Plan) -> Plan:
    step = plan.step.model_copy(update={"step_s_interval": None})
    return plan.model_copy(update={"best": plan.best.model_copy(update={"step": step})})


@pytest.mark.parametrize("sizes", TABLES["both_reports_show_every_line"])
@pytest.mark.parametrize("change", [lambda plan: plan, risky, uncalibrated, with_recipe])
def test_both_reports_show_every_line(
    make_plan: MakePlan, sizes: dict[str, Any], change: Callable[[Plan], Plan]
) -> None:
    plan = change(make_plan(**sizes))
    reports = {"terminal": terminal(plan), "html": Page(render_html(plan, DRAWN)).text}
    shown = list(lines(view_of(plan)))
    assert len(shown) > 30
    missing = [(name, line) for name, text in reports.items() for line in shown if line not in text]
    assert not missing


def test_both_reports_say_with_what_probability_it_fits_and_what_more_risk_would_buy(make_plan: MakePlan) -> None:
    plan = risky(make_plan())
    interval = [gibibytes(end) for end in plan.best.worst_stage.memory.total_bytes_interval or ()]
    says = (
        f"fits with 93%: the fullest rank needs {'–'.join(interval)} GiB (80% interval) of 79.1; --oom-risk 0.3: 5.0%"
    )
    for report in (terminal(plan), Page(render_html(plan, DRAWN)).text):
        assert f"{says} faster, fits with 74%" in report
    others = tuple(other.model_copy(update={"oom_probability": 0.052}) for other in plan.alternatives)
    assert "fits with 95%" in terminal(plan.model_copy(update={"alternatives": others}))
    assert "fits with over 99%" not in terminal(plan), "what is sure calls for no remark"
    assert "fits with" not in terminal(make_plan()), "where nothing is known"


@pytest.mark.parametrize(("risk", "says"), TABLES["a_probability_of_one_is_never_said"])
def test_a_probability_of_one_is_never_said(risk: float | None, says: str) -> None:
    assert fits_with(risk) == says


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
    alone, other = Entry("best", plan.best), Entry("1.", plan.alternatives[0], plan.best)
    assert (alone.more, alone.manner) == ("", "1f1b, ZeRO-1, no recompute, sequence parallel")
    assert (other.more, other.manner, other.peak) == ("+2.3%", "", "76.2")
    offloaded = plan.best.model_copy(update={"parallelism": plan.parallelism.model_copy(update={"host_bytes": 2**31})})
    assert Entry("2.", offloaded, plan.best).manner == "2.0 GiB of host memory a GPU"
    assert small.manner(offloaded.parallelism, plan.stages[0])[-1] == "2.0 GiB of host memory a GPU"
    assert Entry("given", make_plan(total_gib=92.0, fits=False).best).peak == "92.0!"


NAMES = (
    AS_PLANNED, "no overlap: no collective hides", "slow rank: a tenth", "uneven experts: the fullest gets more",
    "half the network: 25 GB/s", "default switches: its own",
)  # fmt: skip


def compared(plan: Plan, *rows: tuple[float, ...]) -> Plan:
    """The plan with a table of steps, a row for each layout."""
    steps = tuple(
        RobustStep(layout=f"layout {rank}", assumption=name, step_s=step_s)
        for rank, row in enumerate(rows)
        for name, step_s in zip(NAMES, row, strict=False)
    )
    return plan.model_copy(update={"best": plan.best.model_copy(update={"robust": steps})})


def terminal_of_robust_table(plan: Plan) -> list[str]:
    return printed(render(plan)).splitlines()


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_minimax_by_brute_force(seed: int) -> None:
    steps_s = np.exp(np.random.default_rng(seed).normal(0.0, 0.1, (4, 5)))
    table = Robust(NAMES[:5], tuple(map(tuple, steps_s.tolist())))
    worst = [
        max(steps_s[layout][case] / min(steps_s[other][case] for other in range(4)) - 1 for case in range(5))
        for layout in range(4)
    ]
    assert table.losses == pytest.approx(worst)
    assert table.least == min(range(4), key=lambda layout: worst[layout])


def test_the_fastest_is_kept_where_another_loses_as_little() -> None:
    assert Robust(NAMES[:2], ((1.0, 2.0), (1.0, 2.0))).least == 0


@pytest.mark.parametrize(("rows", "says"), TABLES["the_remark_names_the_layout_that_loses_least"])
def test_the_remark_names_the_layout_that_loses_least(
    make_plan: MakePlan, rows: tuple[tuple[float, ...], ...], says: str
) -> None:
    table = robust_of(compared(make_plan(), *rows).best)
    assert says in table.remarks[0]


def test_a_wide_table_keeps_within_80_columns(make_plan: MakePlan) -> None:
    plan = compared(make_plan(), *[(1234.5,) * len(NAMES)] * 3)
    table = robust_of(plan.best)
    lines = terminal_of_robust_table(plan)
    assert max(map(len, lines)) <= 80
    for row in table.rows:
        assert any(" ".join(row) in " ".join(line.split()) for line in lines), "nothing is cut"


@pytest.mark.parametrize("rows", [(), ((1.0,), (1.1,))])
def test_nothing_is_shown_where_nothing_moves(make_plan: MakePlan, rows: tuple[tuple[float, ...], ...]) -> None:
    plan = compared(make_plan(), *rows)
    assert robust_of(plan.best) is None
    assert "turns out otherwise" not in " ".join(terminal_of_robust_table(plan))
    assert "turns out otherwise" not in render_html(plan, DRAWN)


def test_a_table_that_someone_edited_is_left_out(make_plan: MakePlan) -> None:
    plan = compared(make_plan(), (1.0, 2.0), (1.0, 2.0))
    for steps in (plan.best.robust[1:], plan.best.robust[:-1]):
        assert robust_of(plan.best.model_copy(update={"robust": steps})) is None


JOB = ["--model", "8b", "--gpus", "8", "--seq-length", "16384", "--fsdp", "full_shard", "--runtime", "torch-fsdp"]


def test_every_report_says_it() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=16384, global_batch_size=32)
    layout = Parallelism(fsdp="full_shard")
    plan = evaluate("8b", cluster, training, layout, runtime="torch-fsdp", says_switches=False)
    most = plan.best.unsaid[0]
    slower = most.other_step_s / plan.step.step_s - 1
    words = f"attention_kernel; flash1 would be {100 * slower:.0f}% slower"
    assert says_unsaid(plan.best).startswith(words)
    (sure,) = (section for section in view_of(plan).sections if section.name == "sure")
    assert ("not said", says_unsaid(plan.best)) in sure.parts[0].rows
    assert summary(plan.best).endswith(f"not said: {says_unsaid(plan.best)}")
    assert words in report_page(plan)
    said = evaluate("8b", cluster, training, layout, runtime="torch-fsdp", says_switches=True)
    assert says_unsaid(said.best) == ""
    assert "not said" not in summary(said.best)
    own = said.runtime_spec.model_copy(update={"name": "mine", "trainer": "torch-fsdp"})
    plan = evaluate("8b", cluster, training, layout, runtime=own, says_switches=True)
    assert unsure(plan)[0] == ("trainer", OWN_TRAINER)
    assert unsure(said)[:1] != unsure(plan)[:1]
    (low, high), (lower, higher) = said.step.step_s_interval, plan.step.step_s_interval
    assert lower < low < high < higher
    (low, high), (lower, higher) = (one.best.worst_stage.memory.total_bytes_interval for one in (said, plan))
    assert lower < low < high < higher


@pytest.mark.parametrize(("options", "is_said"), TABLES["options_that_say_a_switch_say_all"])
def test_options_that_say_a_switch_say_all(options: list[str], is_said: bool, capsys: Any) -> None:
    assert main(["evaluate", *JOB, *options, "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["best"]["unsaid"] == []) is is_said


def report(**changes: Any) -> SearchReport:
    fields = {"num_shapes": 4, "num_fitting": 2, "num_ilps": 1, "outcome": "proven", "lower_bound_s": 20.0, "gap": 0.0}
    return SearchReport.model_validate(fields | changes)


@pytest.mark.parametrize(("changes", "says"), TABLES["a_proof_that_falls_short_says_so"])
def test_a_proof_that_falls_short_says_so(changes: dict[str, Any], says: str) -> None:
    assert says_outcome(report(**changes)) == says


@pytest.mark.parametrize(("schedules", "among"), TABLES["the_bound_is_of_the_schedules_searched"])
def test_the_bound_is_of_the_schedules_searched(schedules: tuple[str, ...], among: str) -> None:
    assert says_bound(report(schedules=schedules)).endswith(f"20.00 s{among}")


GOODPUT = Goodput(
    effective_fraction=0.942, interval=(0.91, 0.963), checkpoint_s=4.0, checkpoint_interval_s=720.0,
    evaluation_fraction=0.006, failures_per_day=5.12, restart_s=372.0,
    sources={"failures_per_day": "419 interruptions of Llama 3", "restart_s": "a table of ByteRobust"},
)  # fmt: skip
COST = RunCost(
    tokens=15e12, days=265.0, days_interval=(232.0, 312.0), gpu_hours=13e6, usd=41.7e6, usd_interval=(36.5e6, 49e6)
)


@pytest.fixture(name="plan")
def _plan(make_plan: MakePlan) -> Plan:
    plan = make_plan()
    sustained = Sustained(step_s=24.73, step_s_interval=(22.08, 27.7), source="1.12 × the benchmark: fourteen runs")
    best = plan.best.model_copy(update={"sustained": sustained})
    return plan.model_copy(update={"best": best, "run_cost": COST, "goodput": GOODPUT})


def test_steps_days_dollars_and_goodput_have_their_intervals(plan: Plan) -> None:
    text = " ".join(printed(render(plan)).replace("│", " ").split())
    for part in ("24.73 s (22.08–27.70 s)", "265 days (232–312)", "$41.7M (36.5M–49M)", "94.2% (91.0–96.3)", "6.2 min"):
        assert part in text
    assert max(map(len, printed(render(plan)).splitlines())) <= 80


@pytest.mark.parametrize(("failures_per_day", "said"), TABLES["how_often_it_is_interrupted"])
def test_how_often_it_is_interrupted(plan: Plan, failures_per_day: float, said: str) -> None:
    rare = plan.model_copy(update={"goodput": GOODPUT.model_copy(update={"failures_per_day": failures_per_day})})
    assert said in printed(render(rare), 400)


def test_sources_stand_beside_the_months(plan: Plan) -> None:
    months = view_of(plan).section("months")
    said = dict(months.parts[0].rows)
    assert said["source: sustained"] == "1.12 × the benchmark: fourteen runs"
    assert said["source: failures"] == "419 interruptions of Llama 3"
