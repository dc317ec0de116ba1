"""A plan's lines are worked out once: the terminal and the HTML report both show every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pages import DRAWN, Page, printed

from planner.answer import Offer, Plan, RecipeGain, RecipeRefusal, RiskOffer
from planner.report.format import SURE, fits_with, gibibytes
from planner.report.page import render_html
from planner.report.rows import Entry, Table
from planner.report.terminal import render
from planner.report.view import SECTIONS, View, view_of

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


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pp": 1, "num_microbatches": 4},
        {"total_gib": 95.0, "fits": False},
        {"stage_recompute": {"none": 5, "full": 3}},
        {"searched": False},
    ],
)
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


@pytest.mark.parametrize(
    ("risk", "says"),
    [(None, ""), (0.0, "over 99%"), (0.004, "over 99%"), (0.0999, "90%"), (0.6, "40%"), (1.0, "under 1%")],
)
def test_a_probability_of_one_is_never_said(risk: float | None, says: str) -> None:
    assert fits_with(risk) == says


def test_there_is_one_bubble_and_it_is_that_of_the_rank_that_decides_the_step(make_plan: MakePlan) -> None:
    """The mean idle time of all stages is another quantity, which no report shows."""
    plan = uncalibrated(make_plan())
    for text in (terminal(plan), Page(render_html(plan, DRAWN)).text):
        assert "pipeline bubble 10.0%" in text, "where the interval would be"
        assert "pipeline bubble 2.21 s 10.0%" in text
        assert "9.9%" not in text


def test_figures_hold_the_numbers_that_they_show(make_plan: MakePlan) -> None:
    view = view_of(make_plan())
    figures = {figure.name: (figure.values, figure.unit) for figure in (*view.figures, *view.cost)}
    assert figures["step"] == ((22.08,), "s")
    assert figures["80% interval"] == ((0.95 * 22.08, 1.06 * 22.08), "s")
    assert figures["price"] == ((35_970_000,), "USD")
    assert sum(share.fraction for share in view.breakdown) == pytest.approx(1)
