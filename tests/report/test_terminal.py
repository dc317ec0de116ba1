"""The report says what the plan holds, within 80 columns, with and without colour.

The first screen of a small job answers who has one card, in 80 columns and without words of pipelines.
The waterfall in the terminal: 80 columns, every term under its name, text from files made printable.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pages import printed
from tables import beside

from planner.answer import Plan
from planner.observe.accounts import STEP_TERMS, WALL_TERMS
from planner.observe.observation import Observation, Observed, Prediction, SourceFile, Term
from planner.report import small
from planner.report.format import bar, digits, gibibytes, large, percent, seconds
from planner.report.observe import SignedBar, gap_section
from planner.report.terminal import LINES, panel_text, render, screen, summary
from planner.report.view import view_of
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import AdapterSpec, OperationsSpec, SearchLimits, TrainingSpec

TABLES = beside(__file__)

MakePlan = Callable[..., Plan]
WIDEST: dict[str, Any] = TABLES["widest"]


def text(plan: Plan, width: int = 80, **console: Any) -> str:
    return printed(render(plan), width, **console)


def test_the_numbers_people_quote_are_there(make_plan: MakePlan) -> None:
    made = make_plan()
    shown = text(made)
    for expected in (
        "llama-3.1-405b on 2,048 × h100-sxm-80gb", "TP 8 × PP 16 × DP 16 · micro-batch 1 × 128", "22.08 s",
        "20.98–23.40 s", "759,838", "371.0", "412", "41.7%", "229 days", "11.24M GPU-hours", "$35.97M", "19,108 MWh",
        "proven", "gap 0.04%", "calibrated", "1,516 legal shapes", "312 can fit",
    ):  # fmt: skip
        assert expected in shown
    beaten = made.search and made.search.model_copy(update={"num_shapes": 0, "num_fitting": 0})
    assert "no legal shape may beat the first one found, " in text(made.model_copy(update={"search": beaten}))


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


@pytest.mark.parametrize("sizes", TABLES["the_answer_fits_one_screen"])
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


@cache
def tuned(num_gpus: int = 1, bits: int | None = 4, tokens: float | None = None) -> Plan:
    adapters = None if bits is None else AdapterSpec.model_validate({"base_bits": bits})
    training = TrainingSpec(
        seq_length=2048, global_batch_size=16, adapters=adapters, tokens=tokens,
        operations=OperationsSpec(usd_per_gpu_hour=0.5),
    )  # fmt: skip
    cluster = ClusterSpec(hardware=load_hardware("l40s"), num_gpus=num_gpus)
    return plan("llama-3.2-1b", cluster, training, limits=SearchLimits(top=2), runtime="hf")


def shown(made: Plan) -> str:
    return printed(render(made))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_no_word_of_pipelines_ranks_or_months(num_gpus: int) -> None:
    text = shown(tuned(num_gpus)).replace("--zero-stage", "")
    for word in ("TP 1", "PP 1", "pipeline", "bubble", "slowest rank", "slow rank", "months", "sustained", "stage"):
        assert word not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_items_of_memory_add_up_to_the_gpu() -> None:
    for bits in (4, 16, None):
        made = tuned(bits=bits)
        items = small.memory_items(made)
        assert sum(items.values()) == made.cluster.hardware.memory_bytes
        names = [name for name in items if name.startswith("base weights")]
        assert names == ([] if bits is None else ["base weights"])
    base = {bits: tuned(bits=bits).best.worst_stage.memory.frozen_weights_bytes for bits in (4, 16)}
    assert 0 < base[4] < base[16] == pytest.approx(2 * tuned().model.num_parameters, rel=1e-6)


def test_the_items_of_a_step_add_up_to_it() -> None:
    made = tuned(8, 16)
    items = {item.name: item.value_s for item in small.step_items(made)}
    assert sum(items.values()) == pytest.approx(made.step.step_s, rel=0.005)
    assert items["backward"] > items["forward"]


def test_only_what_was_not_said_is_assumed() -> None:
    made = tuned()
    assert small.assumed(made).count("--") == 5
    said = made.model_copy(update={"command": "plan --model 1b --qlora -s 2048 --lora-rank=16 --runtime hf"})
    assert small.assumed(said) == "16 a step (--global-batch-size), on all-linear (--lora-targets)"


def test_a_run_of_an_hour_costs_its_steps() -> None:
    hour = tuned().step.tokens_per_s * 3600
    made = tuned(tokens=hour)
    assert made.run_cost.days * 24 == pytest.approx(1.0)
    assert made.run_cost.usd == pytest.approx(0.5)
    assert "60 min" in small.how_long(made) or "1.0 h" in small.how_long(made)
    assert "$0.50 at $0.5 a GPU-hour" in small.how_long(made)


def test_each_kind_of_change_is_shown_once_and_a_misfit_says_by_how_much() -> None:
    made = tuned(bits=16)
    rows = small.shown_changes(made)
    known = {change.change: change for change in made.changes}
    kinds = [(known[row.change].kind, known[row.change].fits) for row in rows]
    assert len(kinds) == len(set(kinds)) > 3
    misfit = next(change for change in made.changes if not change.fits and change.kind == "micro-batch")
    row = next(row for row in rows if row.change == misfit.change)
    lacking = gibibytes(misfit.total_bytes - made.cluster.hardware.memory_bytes)
    assert row.remark in (f"lacks {lacking} GiB", "fits too narrowly")
    assert view_of(made).changes == small.rows_of(made.changes, made.cluster.hardware.memory_bytes, made.step.step_s)


def test_a_plan_that_was_saved_shows_the_same_screen() -> None:
    made = tuned()
    again = Plan.from_json(made.to_json())
    assert shown(again) == shown(made)
    data = made.to_json()
    assert data["training"]["adapters"]["base_bits"] == 4
    assert data["model"]["num_trained_parameters"] == 11_272_192
    assert data["room"]["micro_batch_size"] > 0


SOURCE = SourceFile(path="a.log", format="megatron")


def observed(waterfall: list[Term], beside: list[Term], predicted_s: float = 6.1) -> Observed:
    prediction = Prediction(
        source="plan.json", model="m", hardware="h", num_gpus=8, layout="", step_s=predicted_s, step_s_interval=None,
        tokens_per_s=1.0, mfu=0.4, peak_memory_bytes=0, breakdown={},
    )  # fmt: skip
    step_s = predicted_s + sum(term.seconds for term in waterfall)
    return Observed(
        observation=Observation(sources=(SOURCE,), step_s=step_s), prediction=prediction,
        waterfall=tuple(waterfall), beside=tuple(beside),
    )  # fmt: skip


def text_of(answer: Observed) -> str:
    return printed(gap_section(answer), markup=False)


def term(name: str, seconds: float, evidence: str = "1.0 s here, 2.0 s there") -> Term:
    return Term(term=name, seconds=seconds, evidence=evidence, recoverable_s=max(0.0, seconds))


def test_all_terms_fit_in_eighty_columns() -> None:
    text = text_of(
        observed([term(name, 1234.5) for name in STEP_TERMS], [term(name, -1234.5) for name in WALL_TERMS], 5000.0)
    )
    assert max(map(len, text.splitlines())) <= 80
    for label in (*STEP_TERMS.values(), *WALL_TERMS.values()):
        assert f"{label} " in re.sub(r"\s+", " ", text)


def test_steps_and_terms_are_read_from_top_to_bottom() -> None:
    text = text_of(observed([term("pipeline_waits", 1.0), term("host_gaps", -0.25)], [term("checkpoints", 0.5)]))
    rows = [line.strip() for line in text.splitlines() if ("│" in line and "·" not in line) or "step " in line]
    words = [re.split(r"\s{2,}", row)[:2] for row in rows]
    assert words == [
        ["predicted step", "6.10 s"], ["pipeline bubble and transfers", "+1.00 s"],
        ["GPU waits for the host", "-0.25 s"],
        ["measured step", "6.85 s"], ["checkpoints", "+0.50 s"], ["wall time per step", "7.35 s"],
    ]  # fmt: skip


def test_terms_that_would_read_as_nothing_are_one_row() -> None:
    text = text_of(observed([term("pipeline_waits", 1.0), term("copies", 0.003), term("waits", 0.003)], []))
    assert "2 smaller ones" in text
    assert "copies" not in text


def test_text_from_files_is_made_printable() -> None:
    text = text_of(observed([term("compute_other", 1.0, "the largest is \x1b[31mevil\x1b]0;title\x07")], []))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil" in text


def test_without_a_gap_there_is_no_section() -> None:
    assert gap_section(observed([], [])) is None
    assert gap_section(Observed(observation=Observation(sources=(SOURCE,)))) is None


@pytest.mark.parametrize(("fraction", "text"), TABLES["what_is_won_stands_left_of_what_is_lost"])
def test_what_is_won_stands_left_of_what_is_lost(fraction: float, text: str) -> None:
    assert printed(SignedBar(fraction), 17).rstrip() == text.rstrip()
