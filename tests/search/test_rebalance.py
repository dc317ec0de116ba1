"""Layers move off slow ranks: as far as the best of all splits, never to a slower one, never out of memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from priced_plans import priced_plan
from tables import beside
from toys import NO_LIMIT_S, legal_splits, toy_cluster, toy_model, toy_problem

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.candidate import Candidate, Split
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.schedule.replay import makespan_s
from planner.search.ilp.node import node_of
from planner.search.ilp.program import solve
from planner.search.rebalance import Rebalanced, rebalance, recompute_of
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec

TABLES = beside(__file__)


def make_plan(runtime: str = "megatron", seq_length: int = 4096, **layout: Any) -> Plan:
    return priced_plan(seq_length=seq_length, hardware="h200", runtime=runtime, **{"pp": 8} | layout)


def layers(found: Rebalanced) -> list[int]:
    return [stage.num_layers for stage in found.after.stages]


def factors_of(plan: Plan, **slow: float) -> list[float]:
    return [slow.get(f"stage{stage}", 1.0) for stage in range(plan.parallelism.pp)]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("seed", range(12))
def test_no_split_of_a_small_model_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    problem = toy_problem(toy_model(rng.randint(5, 8)), toy_cluster(4), pp=(4,), tp=(1,), micro_batch_size=(1,))
    saved = evaluate(problem.model, problem.cluster, problem.training, Parallelism(pp=4))
    factors = [rng.uniform(0.8, 1.6) for _ in range(4)]
    found, case = rebalance(saved, factors), reprice(saved, saved.best)
    choice = recompute_of(case.split, saved)
    splits = legal_splits(problem.model, case.table.shape, choice, problem.runtime.head_only_stage)
    best_s = min(
        Candidate(case.pricing, case.table, split, "1f1b", rank_factors=tuple(factors)).step_s
        for split in splits
        if Candidate(case.pricing, case.table, split, "1f1b").fits
    )
    assert found.after.step.step_s == pytest.approx(best_s, rel=4e-3)  # within the gap of a search
    solution = solve(node_of(case.pricing, case.table, choice, "1f1b", rank_factors=factors), NO_LIMIT_S)
    assert solution.bound_s <= best_s * (1 + 1e-6)


@pytest.mark.parametrize(("schedule", "vpp"), [("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("gpipe", 1)])
def test_the_programs_bound_holds_for_slow_ranks_under_any_schedule(schedule: str, vpp: int) -> None:
    saved = make_plan("torch-eager", pp=4, vpp=vpp, schedule=schedule, dp=2)
    case, factors = reprice(saved, saved.best), [1.0, 1.5, 0.7, 1.2]
    solution = solve(
        node_of(case.pricing, case.table, recompute_of(case.split, saved), schedule, rank_factors=factors), NO_LIMIT_S
    )
    slow = replace(case, schedule=schedule, rank_factors=tuple(factors))
    for counts in ((8, 8, 8, 8), (9, 5, 11, 7)):
        if vpp == 1:
            split = Split(counts)
            assert solution.bound_s <= slow.with_split(split).step_s * (1 + 1e-6)
    assert solution.bound_s <= slow.step_s * (1 + 1e-6)


def test_equal_ranks_keep_the_time_of_the_plan() -> None:
    saved = make_plan()
    found = rebalance(saved, [1.0] * 8)
    assert found.before.step.step_s == pytest.approx(saved.step.step_s, rel=1e-12)
    assert found.after.step.step_s <= found.before.step.step_s


@pytest.mark.parametrize("layout", TABLES["layers_move_under_any_schedule_and_recomputation"])
def test_layers_move_under_any_schedule_and_recomputation(layout: dict[str, Any]) -> None:
    saved = make_plan("torch-eager", **layout)
    found = rebalance(saved, [1.0, 1.6, 1.0, 1.0])
    assert found.gain_fraction > 0.05
    assert layers(found)[1] < saved.stages[1].num_layers
    free_to_recompute_less = {name: getattr(saved.parallelism, name) for name in ("recompute", "recompute_num_layers")}
    assert found.plan.parallelism.model_copy(update=free_to_recompute_less) == saved.parallelism
    assert found.after.fits


def test_the_new_plan_is_priced_again_to_the_same_seconds_after_a_round_trip() -> None:
    saved = make_plan(dp=1)
    found = rebalance(saved, factors_of(saved, stage3=1.5))
    again = Plan.from_json(found.plan.to_json())
    priced = reprice(again, again.best)
    parts = again.step.breakdown
    pipeline_s = again.step.step_s - parts.exposed_dp_s - parts.optimizer_s - float(priced.table.tail_s)
    assert makespan_s(priced.order, priced.durations) == pytest.approx(pipeline_s, rel=1e-9)
    twice = rebalance(again, again.best.rank_factors)
    assert twice.before.step.step_s == pytest.approx(again.step.step_s, rel=1e-9)
    assert twice.gain_fraction < 1e-3


def test_an_order_made_to_measure_is_kept() -> None:
    cluster, training = (
        ClusterSpec(hardware=load_hardware("h200"), num_gpus=4),
        TrainingSpec(seq_length=4096, global_batch_size=16),
    )
    limits = SearchLimits(pp=(4,), micro_batch_size=(1,), schedule=("auto",), top=1, recompute=("none",))
    saved = plan(load_model("8b"), cluster, training, limits=limits, runtime="torch-eager")
    assert saved.best.actions
    found = rebalance(saved, [1.0, 1.6, 1.0, 1.0])
    assert found.gain_fraction > 0
    assert found.after.actions == saved.best.actions
    assert found.after.parallelism == saved.parallelism


def test_memory_keeps_layers_where_they_are() -> None:
    full = make_plan(pp=4, dp=2)
    needed_gib = max(stage.memory.total_bytes for stage in full.stages[1:]) / 2**30
    hardware = full.cluster.hardware.model_copy(update={"memory_gib": needed_gib + 0.01})
    tight = full.model_copy(update={"cluster": ClusterSpec(hardware=hardware, num_gpus=8)})
    found = rebalance(tight, [1.0, 1.0, 1.0, 3.0])
    assert all(stage.memory.total_bytes <= hardware.memory_bytes for stage in found.after.stages[1:])


def test_without_time_nothing_is_worse_than_before() -> None:
    saved = make_plan()
    found = rebalance(saved, factors_of(saved, stage3=1.5), time_limit_s=1e-9)
    assert found.after.step.step_s <= found.before.step.step_s


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")], [1e9] * 8])
def test_factors_must_be_one_a_rank(factors: list[float]) -> None:
    with pytest.raises(SpecError, match="not 8 factors"):
        rebalance(make_plan(), factors)
