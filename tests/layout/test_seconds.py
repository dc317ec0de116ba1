"""Seconds of a step: short replays stand for long ones only where the pipeline repeats itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from toys import Problem, legal_counts, toy_cluster, toy_model, toy_problem, toy_training

from planner.layout.candidate import Candidate, Split, activation_peaks_bytes, by_rank, stage_costs
from planner.layout.seconds import run_pipeline
from planner.physics.cost import CostTable
from planner.physics.stage_memory import stage_memory
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, makespan_s, replay
from planner.shape import Shape


def priced(problem: Problem, **sizes: Any) -> CostTable:
    sizes = {"dp": 2, "seq_length": 2048, "shard_size": 2, "micro_batch_size": 1} | sizes
    return problem.pricing.table(Shape(**sizes))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_long_steps_are_what_their_full_replay_says(schedule: str, pp: int) -> None:
    """Uneven splits too, where the busiest rank sets the pace only after many micro-batches."""
    rng, vpp = random.Random(pp), 2 if schedule.startswith("interleaved") else 1
    problem = toy_problem(toy_model(9), toy_cluster(8, network_gb_per_s=5.0))
    splits = list(legal_counts(9, pp, vpp, empty_ends=True))
    for rounds in (5, 16, 40):
        table = priced(problem, pp=pp, vpp=vpp, num_microbatches=pp * rounds)
        # the nearer to even, the longer it takes the busiest rank to set the pace
        even = sorted(splits, key=lambda counts: max(counts) - min(counts))[:12]
        for counts in {*even, *rng.sample(splits, min(6, len(splits)))}:
            candidate = Candidate(problem.pricing, table, Split(counts), schedule)
            exact_s = makespan_s(candidate.order, candidate.durations)
            quick = candidate.run(exact=False)
            assert quick.makespan_s == pytest.approx(exact_s, rel=3e-3), (counts, rounds)
            full = candidate.run()
            assert full.makespan_s == pytest.approx(exact_s, rel=1e-12)
            assert quick.busy_s == pytest.approx(full.busy_s)
            assert quick.num_microbatches == full.num_microbatches == pp * rounds
            assert candidate.step_s == pytest.approx(exact_s + sum(candidate.outside), rel=3e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_steps_overlap_where_the_optimizer_is_validated_later(schedule: str) -> None:
    """Under ZB-H2 with equal passes, ranks idle only because they begin and end in turn: steps leave nothing idle."""
    problem = toy_problem(toy_model(16))
    table = priced(problem, pp=4, num_microbatches=16)
    later = replace(problem.pricing, runtime=problem.pricing.runtime.model_copy(update={"validates_later": True}))
    apart, beside = (Candidate(pricing, table, Split((4, 4, 4, 4)), schedule) for pricing in (problem.pricing, later))
    assert beside.step_s - sum(beside.outside) == pytest.approx(beside.run().makespan_s)
    timeline = replay(apart.order, apart.durations)
    spans_s = [end_s[-1] - start_s[0] for start_s, end_s in zip(timeline.start_s, timeline.end_s, strict=True)]
    expected = max(spans_s) if schedule.startswith("zb") else timeline.makespan_s
    assert beside.run().makespan_s == pytest.approx(float(expected))
    assert (beside.step_s < apart.step_s) == (schedule == "zb-h2")
    assert beside.run().makespan_s >= max(beside.run().busy_s) * (1 - 1e-12)


def test_a_rank_that_sets_the_pace_late_is_waited_for() -> None:
    """The first rank is busier than the last by a twentieth: it takes over after more rounds than are replayed."""
    table = priced(toy_problem(toy_model(8)), pp=4, num_microbatches=48)
    halves = [0.9, 0.594, 0.594, 0.85]
    durations = Durations([0.82, 0.53, 0.53, 0.82], halves, halves, p2p_s=0.017, blocking_p2p=True)
    exact_s = makespan_s(build_schedule("1f1b", 4, 1, 48), durations)
    assert run_pipeline(table.shape, durations, "1f1b", exact=False).makespan_s == pytest.approx(exact_s, rel=1e-6)
    few, more = (makespan_s(build_schedule("1f1b", 4, 1, m), durations) for m in (12, 16))
    assert more + (more - few) / 4 * 32 < 0.98 * exact_s


def test_parts_on_one_rank_add_up() -> None:
    problem = toy_problem(toy_model(8))
    table = priced(problem, pp=2, vpp=2, num_microbatches=4)
    costs = stage_costs(table, problem.model, Split((1, 2, 3, 2)), (0, 1, 0, 1))
    first, second = by_rank(costs, (0, 1, 0, 1))
    assert first.total_s == pytest.approx(costs[0].total_s + costs[2].total_s)
    assert second.static_bytes == pytest.approx(costs[1].static_bytes + costs[3].static_bytes)
    folded = by_rank(costs, (0, 1, 1, 0))
    assert folded[0].live_bytes == pytest.approx(costs[0].live_bytes + costs[3].live_bytes)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_activations_held_are_those_of_the_order(schedule: str) -> None:
    """Stage by stage: what is kept from a forward to its backward, whatever the stages keep."""
    pp, vpp = 3, 2 if schedule == "interleaved-1f1b" else 1
    order = build_schedule(schedule, pp, vpp, 9)
    live = [1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0][: pp * vpp]
    for rank, peak in enumerate(activation_peaks_bytes(order, live)):
        held = most = 0.0
        for action in order.ranks[rank]:
            held += live[action.stage] if action.kind == "F" else -live[action.stage]
            most = max(most, held)
        assert held == 0
        assert peak == most
    if vpp == 1:
        assert activation_peaks_bytes(order, [1.0] * 3) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_memory_is_that_of_the_worst_moment(zero_stage: int) -> None:
    """While the loss runs its logits come on top of the activations; afterwards a layer's backward does."""
    problem = toy_problem(toy_model(6, vocab_size=200_000))
    table = priced(problem, pp=2, num_microbatches=8, zero_stage=zero_stage)
    costs = stage_costs(table, problem.model, Split((4, 2)), (0, 1))
    first, last = (stage_memory(problem.pricing, table, cost, 7.0) for cost in costs)
    assert first.logits_bytes == 0
    assert last.logits_bytes == round(float(table.head.logits_bytes)) > 0
    assert first.workspace_bytes > last.workspace_bytes
    assert first.activations_bytes == last.activations_bytes == 7
    assert first.optimizer_bytes == pytest.approx(12 * float(costs[0].parameters) / (2 if zero_stage else 1), abs=1)


def test_fitting_is_to_the_byte() -> None:
    problem = toy_problem(toy_model(6))
    table, split = priced(problem, pp=2, num_microbatches=8), Split((3, 3))
    memories = Candidate(problem.pricing, table, split, "1f1b").memory
    needed_gib = max(memory.total_bytes for memory in memories) / 2**30
    for gib, fits in ((needed_gib + 1e-9, True), (needed_gib - 1e-6, False)):
        other = toy_problem(toy_model(6), toy_cluster(8, memory_gib=gib), toy_training(16), memory_headroom_gib=0.0)
        assert Candidate(other.pricing, table, split, "1f1b").fits is fits


def test_one_stage_has_no_hops_in_a_cluster_of_one_tier() -> None:
    """A measured profile of one GPU has a single tier; a pipeline of one stage then has a number for no boundary."""
    whole = toy_cluster(4)
    hardware = whole.hardware.model_copy(update={"tiers": whole.hardware.tiers[-1:]})
    problem = toy_problem(toy_model(4), whole.changed(hardware=hardware))
    for pp in (1, 2):
        candidate = Candidate(
            problem.pricing, priced(problem, pp=pp, num_microbatches=4), Split((4 // pp,) * pp), "1f1b"
        )
        assert candidate.run(True).makespan_s > 0
