"""What a step would take if one rank, stage or operation were not slow: closed forms, laws, and what is not known."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.observe.case import Case
from planner.observe.ideal.passes import planned_pass_s
from planner.observe.ideal.what_if import idealised, what_ifs
from planner.observe.ideal.workers import spans
from planner.observe.measured import JobFacts, RankPasses, Source, Timer
from planner.observe.observation import Observation, Observed, WhatIf
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, makespan_s, makespans_s
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec

PP, DP, M = 4, 2, 8
FORWARD_S, BACKWARD_S = 0.1, 0.2
SOURCE = (Source(path="a.log", format="megatron"),)


def run(slow: dict[int, float], step_s: float, **more: Any) -> Case:
    """A run of two pipelines of four ranks, without a plan; `slow` has factors of ranks."""
    passes = tuple(
        RankPasses(
            rank=rank, stage=rank // DP, pipeline=rank % DP, forward_s=FORWARD_S * slow.get(rank, 1.0),
            backward_s=BACKWARD_S * slow.get(rank, 1.0), source="made",
        )
        for rank in range(PP * DP)
    )  # fmt: skip
    stated = {"parallelism": {"tp": 1, "cp": 1, "pp": PP, "micro_batch_size": 1}}
    facts = JobFacts(num_gpus=PP * DP, global_batch_size=M * DP, run=stated)
    return Case(Observation(sources=SOURCE, facts=facts, passes=passes, step_s=step_s, **more))


@cache
def plan() -> Plan:
    """Llama 3 8B on eight GPUs: four stages, of which the last has the head."""
    return evaluate(
        load_model("llama3-8b"),
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=8),
        TrainingSpec(seq_length=4096, global_batch_size=M * DP),
        Parallelism(tp=1, pp=PP, dp=DP, micro_batch_size=1, zero_stage=1),
    )


def run_of_plan(slow: dict[int, float], stages: tuple[int, ...] = (0, 1, 2, 3), factor: float = 1.0) -> Case:
    """A run of the plan whose ranks take what was planned × `factor` × `slow`; `stages` are seen."""
    candidate = Case(Observation(sources=()), plan=plan()).candidate
    assert candidate is not None
    planned = [planned_pass_s(candidate, stage, True) for stage in range(PP)]
    passes = tuple(
        RankPasses(
            rank=rank, stage=rank // DP, pipeline=rank % DP, holds_exchanges=True, source="made",
            forward_s=planned[rank // DP][0] * factor * slow.get(rank, 1.0),
            backward_s=planned[rank // DP][1] * factor * slow.get(rank, 1.0),
        )
        for rank in range(PP * DP) if rank // DP in stages
    )  # fmt: skip
    step_s = candidate.step_s * factor
    return Case(Observation(sources=SOURCE, passes=passes, step_s=step_s), plan=plan())


def won(found: tuple[WhatIf, ...]) -> dict[str, float]:
    return {one.name: one.recoverable_s for one in found}


@pytest.mark.parametrize("rank", range(PP * DP))
def test_a_straggler_costs_a_delay_per_micro_batch_that_nothing_hides(rank: int) -> None:
    even_s = (M + PP - 1) * (FORWARD_S + BACKWARD_S)
    # stage s of 1F1B waits for PP - 1 - s passes of later stages, in which that many of its delays hide
    delay_s = 0.2 * (FORWARD_S + BACKWARD_S) * (M - (PP - 1 - rank // DP))
    found = what_ifs(run({rank: 1.2}, even_s + delay_s))
    wins = won(found)
    assert wins[f"rank {rank}"] == pytest.approx(delay_s)
    assert found[0].step_s == pytest.approx(even_s)
    # both operations together are the rank's delay; each alone is what it adds of it
    assert wins["forward"] + wins["backward"] == pytest.approx(delay_s, rel=0.5)
    assert not [name for name in wins if name.startswith("rank") and name != f"rank {rank}"]


def test_the_replay_of_what_was_seen_and_of_all_even() -> None:
    replayed, _ = idealised(run({5: 1.2}, 3.78))
    assert replayed is not None
    assert replayed.step_s == pytest.approx(11 * 0.3 + 7 * 0.06)
    assert replayed.even_s == pytest.approx(11 * 0.3)
    assert replayed.measured_s == 3.78
    assert replayed.notes == (
        "gradients and optimizer are not in the replay: no file shows them",
        "the order of the passes is taken to be 1f1b: no file says it",
    )


def test_two_stragglers_in_two_pipelines_win_nothing_alone() -> None:
    wins = won(what_ifs(run({2: 1.2, 3: 1.2}, 3.78)))
    assert not [name for name in wins if name.startswith("rank")]


def test_a_replay_that_misses_is_said_to_and_nothing_below_what_it_misses_is_told() -> None:
    replayed, found = idealised(run({5: 1.2}, 4.0))
    assert replayed is not None
    assert any("7% less than was measured" in note for note in replayed.notes)
    assert list(won(found)) == ["rank 5", "backward"]  # 11% and 8% of the step; the forward alone wins 4%
    replayed, found = idealised(run({5: 1.2}, 8.0))
    assert replayed is not None
    assert "are not told" in replayed.notes[-1]
    assert found == ()


def test_the_only_rank_of_each_stage_has_no_peer() -> None:
    seen = run({}, 3.3).observation
    alone = seen.model_copy(update={"passes": tuple(one for one in seen.passes if one.pipeline == 0)})
    replayed, _ = idealised(Case(alone))
    assert replayed is not None
    assert replayed.even_s is None
    assert any("no rank has a peer" in note for note in replayed.notes)


def test_an_earlier_run_says_how_long_stages_should_be() -> None:
    earlier = run({}, 3.3).observation
    slow = run({4: 1.3, 5: 1.3}, 3.93)
    assert not [one for one in what_ifs(slow) if one.name == "stage 2"]
    (first, *_) = what_ifs(Case(slow.observation, earlier=Observed(observation=earlier)))
    assert (first.kind, first.name) == ("stage", "stage 2")
    assert first.step_s == pytest.approx(3.3)


def test_stages_with_other_layers_are_not_slow() -> None:
    case = run_of_plan({}, factor=1.3)
    candidate = case.candidate
    assert candidate is not None
    head_s, layers_s = (sum(planned_pass_s(candidate, stage, True)) for stage in (3, 1))
    assert head_s > 1.1 * layers_s  # though it takes longer
    replayed, found = idealised(case)
    assert found == ()
    assert replayed is not None
    assert replayed.step_s == pytest.approx(replayed.even_s)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_slow_stage_is_held_against_the_others_share_of_the_plan(stage: int) -> None:
    case = as_replayed(run_of_plan({rank: 1.25 for rank in range(PP * DP) if rank // DP == stage}, factor=1.1))
    first, *_ = found = what_ifs(case)
    assert (first.kind, first.name) == ("stage", f"stage {stage}")
    even = what_ifs_step(run_of_plan({}, factor=1.1))
    assert first.step_s == pytest.approx(even)
    assert [one.name for one in found if one.kind == "stage"] == [f"stage {stage}"]


def as_replayed(case: Case) -> Case:
    """The run whose step was measured as the replay has it."""
    return Case(case.observation.model_copy(update={"step_s": what_ifs_step(case)}), plan=case.plan)


def what_ifs_step(case: Case) -> float:
    replayed, _ = idealised(case)
    assert replayed is not None
    return replayed.step_s


def test_the_replay_of_planned_passes_is_the_plans_step() -> None:
    case = run_of_plan({})
    assert case.candidate is not None
    assert what_ifs_step(case) == pytest.approx(case.candidate.step_s)


def test_a_stage_that_nobody_saw_is_the_plans_times_what_the_others_take() -> None:
    replayed, _ = idealised(run_of_plan({}, stages=(0, 1, 3), factor=1.2))
    assert replayed is not None
    assert replayed.step_s == pytest.approx(what_ifs_step(run_of_plan({}, factor=1.2)))
    assert any("no file shows stage 2: the plan's seconds" in note for note in replayed.notes)


def test_a_stage_alone_is_held_against_nothing() -> None:
    assert not [one for one in what_ifs(run_of_plan({}, stages=(2,), factor=1.2)) if one.kind == "stage"]


def test_ranks_that_wait_for_each_other_inside_of_passes_are_one() -> None:
    seen = run({}, 3.3)
    passes = [
        one.model_copy(update={"holds_exchanges": True, "forward_s": FORWARD_S * (1.3 if one.rank in (4, 5) else 1.0)})
        for one in seen.observation.passes
    ]
    run_stated = {"parallelism": {"tp": 2, "cp": 1, "pp": 2, "micro_batch_size": 1}}
    staged = [
        one.model_copy(update={"stage": (one.rank or 0) // 4, "pipeline": (one.rank or 0) % 4 // 2}) for one in passes
    ]
    facts = seen.observation.facts.model_copy(update={"run": run_stated})
    update = {"passes": tuple(staged), "facts": facts, "step_s": 9 * 0.3 + 8 * 0.03}
    (first, *_) = what_ifs(Case(seen.observation.model_copy(update=update)))
    assert (first.kind, first.name) == ("rank", "ranks 4, 5, which share passes")


def test_no_passes_no_replay() -> None:
    assert idealised(Case(Observation(sources=SOURCE, step_s=3.0))) == (None, ())
    nameless = RankPasses(rank=None, stage=None, forward_s=0.1, backward_s=0.2, source="made")
    assert idealised(Case(Observation(sources=SOURCE, step_s=3.0, passes=(nameless,)))) == (None, ())


@settings(max_examples=30, deadline=None)
@given(factors=st.lists(st.floats(1.0, 1.5), min_size=PP * DP, max_size=PP * DP))
def test_nothing_gets_longer_and_nothing_beats_all_even(factors: list[float]) -> None:
    slow = dict(enumerate(factors))
    step_s = what_ifs_step(run(slow, 4.0))
    replayed, found = idealised(run(slow, step_s))
    assert replayed is not None
    for one in found:
        assert 0 < one.recoverable_s == pytest.approx(step_s - one.step_s)
        if one.kind == "operation":
            assert one.step_s >= replayed.even_s - 1e-9


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0.0, 2.0), min_size=3, max_size=3), min_size=1, max_size=4), blocks=st.booleans()
)
def test_many_replays_at_once_are_those_alone(rows: list[list[float]], blocks: bool) -> None:
    order = build_schedule("1f1b", 3, 1, 5)
    many = [Durations(row, row, row, 0.1, blocking_p2p=blocks) for row in rows]
    assert makespans_s(order, many).tolist() == [makespan_s(order, one) for one in many]


def test_numbers_are_told_with_their_neighbours() -> None:
    assert spans([7, 1, 2, 3, 5, 6]) == "1 to 3, 5 to 7"
    assert spans([4, 5]) == "4, 5"


def test_the_least_and_the_most_of_one_stage_are_two_ranks_without_names() -> None:
    facts = JobFacts(num_gpus=4, global_batch_size=16, run={"parallelism": {"tp": 1, "pp": 1, "cp": 1}})
    timers = tuple(
        Timer(name=name, min_s=least, max_s=most, num_values=4)
        for name, least, most in (("forward-compute", 0.4, 0.6), ("backward-compute", 0.8, 0.8))
    )
    seen = Observation(sources=SOURCE, facts=facts, timers=timers, step_s=1.4)
    (first, *_) = what_ifs(Case(seen))
    assert (first.kind, first.name, first.step_s) == ("rank", "the slowest rank", pytest.approx(1.2))
