"""An observed run beside a plan, in the terms that its timers or traces tell apart."""

from __future__ import annotations

import pytest
from pages import printed
from priced_plans import priced_plan

from planner.answer import Plan
from planner.decide.compare import Compared, compare, of_observation, of_plan
from planner.observe.observation import Observation, SourceFile
from planner.report.decisions import render_comparison


@pytest.fixture(scope="module")
def plan() -> Plan:
    return priced_plan(num_gpus=16, tp=4, pp=2, dp=2)


def observed(step_s: float, **breakdown: float) -> Compared:
    source = SourceFile(path="a.log", format="megatron")
    return of_observation(
        Observation(sources=(source,), step_s=step_s, tokens_per_s=1e5, breakdown=breakdown), "observed.json"
    )


TIMERS = {"forward_backward_s": 3.0, "gradients_s": 0.2, "parameters_s": 0.1, "optimizer_s": 0.3}
TRACES = {"compute_s": 2.5, "tp_comm_s": 0.4, "pp_comm_and_waits_s": 0.3, "exposed_dp_s": 0.1, "optimizer_s": 0.3}


@pytest.mark.parametrize(
    ("breakdown", "terms"),
    [
        (TIMERS, {"pipeline_s", "exposed_dp_s", "optimizer_s", "overhead_s"}),
        (TRACES, {"passes_s", "waits_s", "exposed_dp_s", "optimizer_s", "overhead_s"}),
        ({"forward_backward_s": 3.0}, {"pipeline_s", "others_s"}),
        ({"unattributed_s": 4.0}, {"step_s"}),
        ({}, {"step_s"}),
    ],
)
def test_terms_are_those_of_both_and_add_up(plan: Plan, breakdown: dict[str, float], terms: set[str]) -> None:
    comparison = compare([of_plan(plan, "plan.json"), observed(4.0, **breakdown)])
    (rows,) = comparison.waterfalls
    assert {row.term for row in rows} == terms
    assert sum(row.seconds for row in rows) == pytest.approx(4.0 - plan.step.step_s)
    assert sum(row.other_s for row in rows) == pytest.approx(4.0)
    if breakdown is TIMERS:
        by_name = {row.term: row for row in rows}
        assert by_name["exposed_dp_s"].other_s == pytest.approx(0.3)
        step = plan.step.breakdown
        assert by_name["exposed_dp_s"].first_s == pytest.approx(step.exposed_dp_s)
        assert by_name["pipeline_s"].first_s == pytest.approx(
            step.compute_s + step.tp_comm_s + step.pp_comm_s + step.bubble_s
        )
    assert "Where the seconds go" in printed(render_comparison(comparison))


def test_two_runs_are_held_against_each_other_as_finely_as_both_are_known() -> None:
    (rows,) = compare([observed(4.0, **TIMERS), observed(5.0, **TIMERS)]).waterfalls
    assert {row.term for row in rows} == {*TIMERS, "unattributed_s"}
    (rows,) = compare([observed(4.0, **TIMERS), observed(5.0, **TRACES)]).waterfalls
    assert {row.term for row in rows} == {"pipeline_s", "exposed_dp_s", "optimizer_s", "overhead_s"}
    assert sum(row.seconds for row in rows) == pytest.approx(1.0)
