"""The lines about months of training: what they say, and that both reports say it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pages import DRAWN, Page, printed

from planner.answer import Goodput, Plan, RunCost, Sustained
from planner.report.page import render_html
from planner.report.terminal import render
from planner.report.view import view_of

MakePlan = Callable[..., Plan]
GOODPUT = Goodput(
    effective_fraction=0.942,
    interval=(0.91, 0.963),
    checkpoint_s=4.0,
    checkpoint_interval_s=720.0,
    evaluation_fraction=0.006,
    failures_per_day=5.12,
    restart_s=372.0,
    sources={"failures_per_day": "419 interruptions of Llama 3", "restart_s": "a table of ByteRobust"},
)
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


@pytest.mark.parametrize(
    ("failures_per_day", "said"),
    [(0.0, "no interruptions"), (0.05, "an interruption every 20 days"), (93.4, "93 interruptions a day")],
)
def test_how_often_it_is_interrupted(plan: Plan, failures_per_day: float, said: str) -> None:
    rare = plan.model_copy(update={"goodput": GOODPUT.model_copy(update={"failures_per_day": failures_per_day})})
    assert said in printed(render(rare), 400)


@pytest.mark.parametrize(
    ("count", "said"), [(None, "min"), (0, "without spare nodes"), (1, "1 spare node"), (4, "nodes")]
)
def test_spare_nodes_are_named(plan: Plan, count: int | None, said: str) -> None:
    kept = plan.model_copy(update={"goodput": GOODPUT.model_copy(update={"num_spare_nodes": count})})
    (restart,) = (figure for figure in view_of(kept).goodput if figure.name == "restart")
    assert restart.text.endswith(said)


def test_sources_stand_beside_the_months(plan: Plan) -> None:
    months = view_of(plan).section("months")
    said = dict(months.parts[0].rows)
    assert said["source: sustained"] == "1.12 × the benchmark: fourteen runs"
    assert said["source: failures"] == "419 interruptions of Llama 3"


def test_the_page_says_the_same(plan: Plan) -> None:
    page = Page(render_html(plan, DRAWN)).text
    for figure in (view_of(plan).sustained, *view_of(plan).cost, *view_of(plan).goodput):
        assert f"{figure.name} {figure.text.removeprefix(f'{figure.name} ')}" in page


def test_a_plan_from_before_has_none_of_these_lines(make_plan: MakePlan) -> None:
    text = printed(render(make_plan()))
    assert "sustained" not in text
    assert "effective" not in text
    assert "228.7" in text or "229 days" in text
