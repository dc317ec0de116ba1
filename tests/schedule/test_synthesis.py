"""Synthesised orders fit, run, beat or match every named schedule, and never pass the bound."""

from __future__ import annotations

import random

import pytest

from planner.errors import Infeasible
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks, violation
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
        limits = [rng.uniform(1.2, 1.5 * pp) * vpp] * pp
        found = synthesize(durations, pp, num_microbatches, max_activation_bytes=limits, num_moves=4)
        check(found, durations, limits)
        for name in set(SCHEDULES) - {"forward-only", "pipedream-2bw", "dualpipe", "chimera"}:
            if violation(name, pp, vpp, num_microbatches) is None:
                timeline = replay(build_schedule(name, pp, vpp, num_microbatches), durations)
                if (timeline.peak_activation_bytes <= limits).all():
                    assert found.makespan_s <= timeline.makespan_s


def test_uneven_pipelines_beat_the_named_schedules() -> None:
    limits = [1.25 * 8] * 8
    gained = []
    for seed in range(8):
        durations = uneven(random.Random(seed), 8)
        found = synthesize(durations, 8, 24, max_activation_bytes=limits)
        check(found, durations, limits)
        assert found.named == "zb-h1"
        assert found.gap_fraction < 0.02
        gained.append(found.named_makespan_s / found.makespan_s - 1)
    assert sum(gained) / len(gained) > 0.01


def test_even_stages_meet_the_bound_with_a_named_schedule() -> None:
    ones = [1.0] * 4
    found = synthesize(Durations(ones, ones, ones), 4, 12, max_activation_bytes=[4.0] * 4)
    assert (found.named, found.schedule.name, found.gap_fraction) == ("zb-h1", "zb-h1", 0)
    assert found.makespan_s == 12 * 3 + 3


def test_little_memory_still_gives_an_order() -> None:
    ones = [1.0] * 4
    found = synthesize(Durations(ones, ones, ones), 4, 8, max_activation_bytes=[1.0] * 4)
    assert found.named is None
    assert found.makespan_s == 8 * (4 + 4 + 1)  # one micro-batch at a time: down, back up, weight gradient
    assert found.gap_fraction == 0
    with pytest.raises(Infeasible, match=r"rank 0 may hold 0\.5"):
        synthesize(Durations(ones, ones, ones), 4, 8, max_activation_bytes=[0.5] * 4)


def test_a_full_backward_stays_whole() -> None:
    durations = uneven(random.Random(9), 4)
    found = synthesize(durations, 4, 10, splits_backward=False)
    assert {action.kind for actions in found.schedule.ranks for action in actions} == {"F", "B"}
    assert found.makespan_s <= makespan_s(build_schedule("1f1b", 4, 1, 10), durations)
    assert found.named in ("1f1b", "gpipe")


def test_placement_is_kept_when_it_is_given() -> None:
    durations = uneven(random.Random(7), 8)
    looped, v_shaped = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)
    results = {placement: synthesize(durations, 4, 8, stage_to_rank=placement) for placement in (looped, v_shaped)}
    for placement, found in results.items():
        assert found.schedule.stage_to_rank == placement
    free = synthesize(durations, 4, 8)
    assert free.makespan_s <= min(found.named_makespan_s for found in results.values())


def test_same_inputs_give_the_same_order() -> None:
    durations = uneven(random.Random(3), 6)
    one, other = (synthesize(durations, 6, 12, max_activation_bytes=[6.5] * 6) for _ in range(2))
    assert one.schedule.ranks == other.schedule.ranks


def test_memory_below_1f1b_costs_little() -> None:
    """With a third less than 1F1B's first rank holds, the order found keeps to the limit and close to 1F1B."""
    ones = [1.0] * 8
    found = synthesize(Durations(ones, ones, ones), 8, 32, max_activation_bytes=[6.0] * 8)
    assert max(in_flight_chunks("1f1b", 8, 1, 32)) == 8
    assert found.makespan_s < makespan_s(build_schedule("1f1b", 8, 1, 32), Durations(ones, ones, ones))
