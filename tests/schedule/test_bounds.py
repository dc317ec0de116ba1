"""No replay beats the bounds, and 1F1B with nearly even stages meets them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.schedule.bounds import any_order_bounds_s, in_flight_bounds_s
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks
from planner.schedule.replay import Durations, makespan_s

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
        free_s = any_order_bounds_s(durations, schedule.stage_to_rank, num_microbatches, splits_backward=splits)
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
    assert any_order_bounds_s(durations, [0, 1], 3).tolist() == [3 * 3 + 0, 3 * 4 + 1 + 2 + 2 * 0.5]
    # One activation at a time on rank 0: three trips of 3 + 4 and two transfers.
    assert in_flight_bounds_s(durations, [0, 1], 3, [1, 1])[0] == 3 * (7 + 1)
    # Two at a time: before the first backward and after the last forward the trip below, 4 + 1, less one forward or b.
    assert in_flight_bounds_s(durations, [0, 1], 3, [2, 1])[0] == 9 + (5 - 1) + (5 - 2)
    split = any_order_bounds_s(durations, [0, 1], 3, splits_backward=True)
    assert split.tolist() == [9, 1.5 + 12]  # rank 1 may end with a weight gradient
