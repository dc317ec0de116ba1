"""From a probe's seconds to how slow each rank is."""

from __future__ import annotations

from typing import Any

import pytest
from priced_plans import priced_plan
from probes import probe_result, probe_run

from planner.answer import Plan
from planner.errors import SpecError
from planner.probe.evidence import slowness
from planner.probe.result import ProbeResult
from planner.probe.run_price import in_eager_torch
from planner.search.rebalance import rebalance

SLOW = (1.0, 1.0, 1.3, 1.0, 0.9, 1.0, 1.0, 1.1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return priced_plan(num_gpus=32, hardware="h200", tp=2, pp=8, dp=2)


def rank_factors(plan: Plan, result: ProbeResult) -> tuple[float, ...]:
    return tuple(rank.factor for rank in slowness(plan, result))


def measured(plan: Plan, factors: tuple[float, ...] = SLOW, **changes: Any) -> Any:
    """The seconds of each stage in eager torch times its factor, exchanges included."""
    alone = changes.get("mode", "stages") == "stages"
    stages = in_eager_torch(plan, alone=alone).stages

    def seconds(stage: int) -> tuple[float, float]:
        planned, factor = stages[stage], factors[stage]
        forward_s = factor * (planned.forward_s + planned.forward_comm_s)
        backward_s = factor * (planned.backward_s + planned.backward_comm_s)
        if alone:  # its exchanges were not run
            return forward_s - planned.forward_comm_s, backward_s - planned.backward_comm_s
        return forward_s, backward_s

    return probe_result(plan, seconds, **changes)


@pytest.mark.parametrize("mode", ["stages", "ranks"])
def test_each_rank_is_as_slow_as_it_was(plan: Plan, mode: str) -> None:
    assert rank_factors(plan, measured(plan, mode=mode)) == pytest.approx(SLOW)


def test_what_the_plan_knows_already_is_not_forgotten(plan: Plan) -> None:
    twice = plan.best.model_copy(update={"rank_factors": tuple(1.5 for _ in SLOW)})
    known = plan.model_copy(update={"best": twice})
    assert rank_factors(known, measured(known)) == pytest.approx([1.5 * factor for factor in SLOW])


def test_stages_that_stand_for_others_stand_for_those_that_hold_the_same(plan: Plan) -> None:
    found = rank_factors(plan, measured(plan, stages=(0, 2, 5, 7)))
    assert found == pytest.approx((1.0, 1.3, 1.3, 1.3, 1.0, 1.0, 1.0, 1.1))


def test_a_gpu_that_did_not_run_is_like_the_median(plan: Plan) -> None:
    run = probe_run(plan)
    small = run.model_copy(update={"ranks": run.ranks[:3]})  # of eight stages the first, the fourth and the last
    result = measured(plan, stages=(0, 1, 2), run=run, mode="ranks").model_copy(update={"run": small})
    found = rank_factors(plan, result.model_copy(update={"comparisons": ()}))
    assert len(found) == 8
    assert set(found[1:4]) | set(found[5:7]) == {sorted((found[0], found[4], found[7]))[1]}


def test_the_slowest_replica_of_a_stage_counts(plan: Plan) -> None:
    result = measured(plan, tuple(1.0 for _ in SLOW))
    first = result.ranks[0]
    slow = [chunk.model_copy(update={"forward_s": 2 * chunk.forward_s}) for chunk in first.chunks]
    result = result.model_copy(update={"ranks": (*result.ranks, first.model_copy(update={"chunks": tuple(slow)}))})
    found = rank_factors(plan, result)
    assert found[0] > 1.2
    assert found[1:] == pytest.approx([1.0] * 7)


def test_a_probe_of_other_inputs_or_other_layers_is_refused(plan: Plan) -> None:
    result = measured(plan)
    with pytest.raises(SpecError, match="is of a plan with other inputs"):
        rank_factors(plan, result.model_copy(update={"inputs_sha256": "0"}))
    other = rebalance(plan, SLOW).plan
    with pytest.raises(SpecError, match="stage 0 was predicted"):
        rank_factors(other, result)


def test_a_run_in_small_says_nothing_about_slowness(plan: Plan) -> None:
    result = measured(plan, run=probe_run(plan, device="cpu", dtype="float64"))
    with pytest.raises(SpecError, match="ran on a CPU"):
        rank_factors(plan, result)
