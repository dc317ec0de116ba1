"""Synthesised orders fit, run, beat or match every named schedule, and never pass the bound."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from planner.errors import Infeasible, SpecError
from planner.schedule import actions
from planner.schedule.actions import Action, Schedule, keeps_latest
from planner.schedule.bounds import in_flight_bounds_s
from planner.schedule.compare import RankSeconds, compare, find_order
from planner.schedule.graph import DeadlockError
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks, placement, violation
from planner.schedule.replay import Durations, makespan_s, replay
from planner.schedule.synthesis import Synthesis, synthesize


def uneven(rng: random.Random, num_stages: int, p2p_s: float = 0.0, blocking_p2p: bool = False) -> Durations:
    """Stages within 15 % of each other, input gradients a little longer than forwards, weight gradients shorter."""
    forward_s = [rng.uniform(0.85, 1.15) for _ in range(num_stages)]
    input_grad_s = [seconds * rng.uniform(1.0, 1.1) for seconds in forward_s]
    weight_grad_s = [seconds * rng.uniform(0.8, 0.95) for seconds in forward_s]
    saved_bytes = [rng.uniform(0.9, 1.1) for _ in range(num_stages)]
    return Durations(forward_s, input_grad_s, weight_grad_s, p2p_s, blocking_p2p, activation_bytes=saved_bytes)


def check(found: Synthesis, durations: Durations, limits: list[float]) -> None:
    timeline = replay(found.schedule, durations)
    assert timeline.makespan_s == found.makespan_s
    assert (timeline.peak_activation_bytes <= [limit * (1 + 1e-9) for limit in limits]).all()
    assert found.lower_bound_s <= found.makespan_s <= found.named_makespan_s


@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_orders_fit_and_are_never_worse_than_the_best_named_one(vpp: int) -> None:
    rng = random.Random(vpp)
    for _ in range(12):
        pp, num_microbatches = rng.randint(2, 5), rng.randint(1, 12)
        durations = uneven(rng, pp * vpp, rng.choice([0.0, 0.05]), blocking_p2p=rng.random() < 0.3)
        limits, looped = [rng.uniform(1.2, 1.5 * pp) * vpp] * pp, tuple(range(pp)) * vpp
        found = synthesize(durations, looped, num_microbatches, limits)
        check(found, durations, limits)
        for name in set(SCHEDULES) - {"forward-only", "pipedream-2bw", "dualpipe", "chimera"}:
            if violation(name, pp, vpp, num_microbatches) is None and placement(name, pp, vpp) == looped:
                timeline = replay(build_schedule(name, pp, vpp, num_microbatches), durations)
                if (timeline.peak_activation_bytes <= limits).all():
                    assert found.makespan_s <= timeline.makespan_s


def test_uneven_pipelines_beat_the_named_schedules() -> None:
    limits = [1.25 * 8] * 8
    gained = []
    for seed in range(8):
        durations = uneven(random.Random(seed), 8)
        found = synthesize(durations, range(8), 24, limits)
        check(found, durations, limits)
        assert found.named == "zb-h1"
        assert found.gap_fraction < 0.02
        gained.append(found.named_makespan_s / found.makespan_s - 1)
    assert sum(gained) / len(gained) > 0.01


def test_even_stages_meet_the_bound_with_a_named_schedule() -> None:
    ones = [1.0] * 4
    found = synthesize(Durations(ones, ones, ones), range(4), 12, [4.0] * 4)
    assert (found.named, found.schedule.name, found.gap_fraction) == ("zb-h1", "zb-h1", 0)
    assert found.makespan_s == 12 * 3 + 3


def test_little_memory_still_gives_an_order() -> None:
    ones = [1.0] * 4
    found = synthesize(Durations(ones, ones, ones), range(4), 8, [1.0] * 4)
    assert found.named is None
    assert found.makespan_s == 8 * (4 + 4 + 1)  # one micro-batch at a time: down, back up, weight gradient
    assert found.gap_fraction == 0
    with pytest.raises(Infeasible, match=r"rank 0 may hold 0\.5"):
        synthesize(Durations(ones, ones, ones), range(4), 8, [0.5] * 4)


def test_placement_is_kept_when_it_is_given() -> None:
    durations = uneven(random.Random(7), 8)
    for ranks in ((0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)):
        assert synthesize(durations, ranks, 8).schedule.stage_to_rank == ranks


def test_same_inputs_give_the_same_order() -> None:
    durations = uneven(random.Random(3), 6)
    one, other = (synthesize(durations, range(6), 12, [6.5] * 6) for _ in range(2))
    assert one.schedule.ranks == other.schedule.ranks


def test_memory_below_1f1b_costs_little() -> None:
    """With a third less than 1F1B's first rank holds, the order found keeps to the limit and close to 1F1B."""
    ones = [1.0] * 8
    found = synthesize(Durations(ones, ones, ones), range(8), 32, [6.0] * 8)
    assert max(in_flight_chunks("1f1b", 8, 1, 32)) == 8
    assert found.makespan_s < makespan_s(build_schedule("1f1b", 8, 1, 32), Durations(ones, ones, ones))


def lists(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)


def test_lists_that_cannot_run_are_refused() -> None:
    ones = Durations([1, 1], [1, 1], [1, 1])

    def run(*rows: str) -> float:
        return makespan_s(Schedule("own", lists(*rows), (0, 1), 2), ones)

    assert run("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1") == 9
    with pytest.raises(DeadlockError, match="rank 0 at 0B0, rank 1 at 1F1"):
        run("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(SpecError, match="missing or stands twice, first micro-batch 1"):
        run("0F0 0F1 0B0", "1F0 1F1 1B0 1B1")
    with pytest.raises(SpecError, match="missing or stands twice"):
        run("0F0 0F1 0B0 0B1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(SpecError, match="stage 1, micro-batch 0 runs backward before it may"):
        run("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1")
    with pytest.raises(SpecError, match="2F0"):
        run("0F0 0F1 0B0 0B1 2F0", "1F0 1F1 1B0 1B1")
    with pytest.raises(SpecError, match="1F0 stands in the list"):
        run("0F0 0F1 1F0 0B0 0B1", "1F1 1B0 1B1")


@dataclass(frozen=True)
class Listed:
    num_actions: int


def test_the_latest_results_are_kept_as_long_as_they_are_small_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MOST_ACTIONS", 10)
    made: list[int] = []

    @keeps_latest
    def listed(number: int) -> Listed:
        made.append(number)
        return Listed(number)

    for number in (4, 5, 4):
        listed(number)
    assert made == [4, 5]
    listed(3)  # 12 actions: those of the 5 go, which was asked for the longest ago
    listed(4)
    listed(5)
    assert made == [4, 5, 3, 5]
    assert listed(20) is listed(20)
    listed(3)
    assert made == [4, 5, 3, 5, 20, 3]


def test_the_same_schedule_is_the_same_object() -> None:
    assert build_schedule("1f1b", 4, 1, 8) is build_schedule("1f1b", 4, 1, 8)


def test_chunks_share_their_ranks_seconds() -> None:
    ranks = RankSeconds((1.0, 2.0), (2.0, 4.0), (0.5, 1.0))
    looped = ranks.durations((0, 1, 0, 1))
    assert looped.forward_s == [0.5, 1.0, 0.5, 1.0]
    assert ranks.durations((0, 1, 1, 0)).input_grad_s == [1.0, 2.0, 2.0, 1.0]
    assert ranks.durations((0, 1, 1, 0), num_directions=2).weight_grad_s == [0.5, 1.0]


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"none", "forward-only"}))
def test_every_schedule_does_the_same_work(name: str) -> None:
    ones = (1.0,) * 4
    row = next(row for row in compare(RankSeconds(ones, ones, ones), 8) if row.name == name)
    assert row.timeline.busy_s.tolist() == pytest.approx([8 * 3] * 4)
    assert 0 <= row.bubble_fraction < 0.4


def test_chunks_are_as_many_as_asked_where_the_schedule_can() -> None:
    ones = (1.0,) * 4
    chunks = {row.name: row.vpp for row in compare(RankSeconds(ones, ones, ones), 8, vpp=3)}
    assert (chunks["1f1b"], chunks["interleaved-1f1b"], chunks["zb-v"], chunks["zb-h1"]) == (1, 3, 2, 3)


def test_one_rank_needs_no_pipeline() -> None:
    rows = {row.name: row for row in compare(RankSeconds((1.0,), (1.0,), (1.0,)), 8)}
    assert rows["none"].step_s == 24
    assert "interleaved-1f1b" not in rows


def test_an_order_may_use_either_placement() -> None:
    uneven = RankSeconds((1.0, 1.2, 0.9, 1.1), (1.0, 1.2, 0.9, 1.1), (0.9, 1.0, 0.8, 1.0))
    found = find_order(uneven, 8, vpp=2, in_flight_microbatches=4.0)
    for name in ("interleaved-1f1b", "zb-v", "zb-h1"):
        timeline = uneven.replayed(build_schedule(name, 4, 2, 8))
        if timeline.peak_in_flight_microbatches.max() <= 4:
            assert found.makespan_s <= timeline.makespan_s


RandomShape = Callable[[str, random.Random], tuple[int, int, int]]


def random_durations(rng: random.Random, num_stages: int, spread: float, p2p_s: float, blocking: bool) -> Durations:
    def seconds() -> list[float]:
        return [rng.uniform(1 - spread, 1 + spread) for _ in range(num_stages)]

    return Durations(seconds(), seconds(), seconds(), p2p_s=p2p_s, blocking_p2p=blocking)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipe", "chimera", "forward-only"}))
def test_no_replay_of_any_schedule_goes_below_the_bounds(random_shape: RandomShape, name: str) -> None:
    rng = random.Random(name)
    for _ in range(60):
        pp, vpp, num_microbatches = random_shape(name, rng)
        schedule = build_schedule(name, pp, vpp, num_microbatches)
        durations = replace(
            random_durations(rng, pp * vpp, rng.choice([0.1, 0.5, 0.95]), rng.choice([0, 0.3]), rng.random() < 0.3),
            pair_overlap_fraction=rng.choice([0.0, 0.5, 1.0]),
            microbatch_sizes=rng.choice([None, [rng.uniform(0.5, 1.5) for _ in range(num_microbatches)]]),
            slow_ranks=rng.choice([{}, {0: 1.5}]),
        )
        splits = any(action.kind == "I" for actions in schedule.ranks for action in actions)
        in_flight = in_flight_chunks(name, pp, vpp, num_microbatches)
        bounds_s = in_flight_bounds_s(
            durations, schedule.stage_to_rank, num_microbatches, in_flight, splits_backward=splits
        )
        free_s = in_flight_bounds_s(durations, schedule.stage_to_rank, num_microbatches, splits_backward=splits)
        assert free_s.max() <= bounds_s.max() + 1e-9
        assert bounds_s.max() <= makespan_s(schedule, durations) + 1e-9


def test_bound_of_1f1b_is_its_replay_within_fifteen_percent_of_even() -> None:
    rng = random.Random(21)
    for _ in range(300):
        pp, num_microbatches = rng.randint(1, 8), rng.randint(1, 20)
        durations = random_durations(rng, pp, 0.15, 0.0, False)
        bound_s = in_flight_bounds_s(
            durations, range(pp), num_microbatches, in_flight_chunks("1f1b", pp, 1, num_microbatches)
        )
        replayed_s = makespan_s(build_schedule("1f1b", pp, 1, num_microbatches), durations)
        assert bound_s.max() == pytest.approx(replayed_s)


def test_bound_by_hand() -> None:
    durations = Durations([1, 2], [1, 1], [1, 1], p2p_s=0.5)
    assert in_flight_bounds_s(durations, [0, 1], 3).tolist() == [3 * 3 + 0, 3 * 4 + 1 + 2 + 2 * 0.5]
    # One activation at a time on rank 0: three trips of 3 + 4 and two transfers.
    assert in_flight_bounds_s(durations, [0, 1], 3, [1, 1])[0] == 3 * (7 + 1)
    # Two at a time: before the first backward and after the last forward the trip below, 4 + 1, less one forward or b.
    assert in_flight_bounds_s(durations, [0, 1], 3, [2, 1])[0] == 9 + (5 - 1) + (5 - 2)
    split = in_flight_bounds_s(durations, [0, 1], 3, splits_backward=True)
    assert split.tolist() == [9, 1.5 + 12]  # rank 1 may end with a weight gradient
