"""Bubbles of even stages in closed form, and what unequal stages, transfers and stragglers add."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import SpecError
from planner.schedule.orders import SCHEDULES, Action, Schedule, build_schedule
from planner.schedule.replay import IDLE_CAUSES, Durations, Timeline, makespan_s, one_f_one_b_waves, replay

RandomShape = Callable[[str, random.Random], tuple[int, int, int]]

EVEN_KINDS = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.5, 1.0), (2.0, 2.0, 1.0)]
"""Seconds of F, I and W per rank."""


def even(name: str, pp: int, vpp: int, num_microbatches: int, kinds: tuple[float, float, float]) -> Timeline:
    """Replay with a stage's seconds given per rank and shared by its chunks."""
    schedule = build_schedule(name, pp, vpp, num_microbatches)
    forward_s, input_grad_s, weight_grad_s = ([seconds / vpp] * (pp * vpp) for seconds in kinds)
    return replay(schedule, Durations(forward_s, input_grad_s, weight_grad_s))


def bubble_s(timeline: Timeline) -> float:
    return timeline.makespan_s - float(timeline.busy_s[0])


@pytest.mark.parametrize("kinds", EVEN_KINDS)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (4, 4), (4, 12), (8, 24)])
def test_bubbles_of_flushed_schedules(kinds: tuple[float, float, float], pp: int, num_microbatches: int) -> None:
    f, i, w = kinds
    full = (pp - 1) * (f + i + w)
    assert bubble_s(even("gpipe", pp, 1, num_microbatches, kinds)) == pytest.approx(full)
    assert bubble_s(even("1f1b", pp, 1, num_microbatches, kinds)) == pytest.approx(full)
    for vpp in (2, 4):
        assert bubble_s(even("interleaved-1f1b", pp, vpp, num_microbatches, kinds)) == pytest.approx(full / vpp)
        assert bubble_s(even("breadth-first", pp, vpp, num_microbatches, kinds)) == pytest.approx(full / vpp)


@pytest.mark.parametrize("kinds", EVEN_KINDS)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (4, 12), (8, 24)])
def test_bubbles_of_zero_bubble_schedules(kinds: tuple[float, float, float], pp: int, num_microbatches: int) -> None:
    f, i, w = kinds
    assert bubble_s(even("zb-h1", pp, 1, num_microbatches, kinds)) == pytest.approx((pp - 1) * (f + i - w))
    # The papers count from each rank's own start: without a flush the skew of the ranks is no bubble.
    skewed = even("zb-h2", pp, 1, num_microbatches, kinds)
    assert skewed.span_s.max() - skewed.busy_s[0] == pytest.approx((pp - 1) * (f + i - 2 * w))


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (4, 12), (8, 24)])
def test_zb_v_has_no_bubble_but_the_skew_when_all_parts_take_equally_long(pp: int, num_microbatches: int) -> None:
    timeline = even("zb-v", pp, 2, num_microbatches, (1.0, 1.0, 1.0))
    assert timeline.span_s.max() == pytest.approx(timeline.busy_s[0])
    assert bubble_s(timeline) == pytest.approx((pp - 1) / 2)  # until the last rank has something to do


@pytest.mark.parametrize("pp", [4, 5, 7, 8, 16])
def test_v_half_and_v_min_stall_only_at_the_ends(pp: int) -> None:
    """In slots of one chunk's F, I or W; 1F1B takes 6·(pp − 1) of them."""
    half = even("v-half", pp, 2, 4 * pp, (2.0, 2.0, 2.0))
    assert bubble_s(half) == pytest.approx(3 * pp - (5 if pp % 2 == 0 else 4))
    least = even("v-min", pp, 2, 4 * pp, (2.0, 2.0, 2.0))
    assert bubble_s(least) == pytest.approx(4 * pp - 5)


@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.0, 0.5)])
@pytest.mark.parametrize("pp", [4, 8])
def test_bubble_of_dualpipe(pp: int, f: float, i: float, w: float) -> None:
    """(pp/2 − 1)·(f&b + b − 3w) with a pair that is one piece but hides nothing: f&b = f + b."""
    stages = [f] * pp, [i] * pp, [w] * pp
    pairs_s = (f + i + w) + (i + w) - 3 * w
    schedule = build_schedule("dualpipe", pp, 1, 3 * pp)
    assert bubble_s(replay(schedule, Durations(*stages, pair_overlap_fraction=1e-9))) == pytest.approx(
        (pp // 2 - 1) * pairs_s, rel=1e-6
    )
    # One after the other, as torch runs them, the backward's result leaves earlier.
    assert bubble_s(replay(schedule, Durations(*stages))) == pytest.approx((pp // 2 - 1) * (f + i - w))
    folded = build_schedule("dualpipe-v", pp // 2, 2, 3 * pp // 2)
    stages = [f] * pp, [i] * pp, [w] * pp
    assert bubble_s(replay(folded, Durations(*stages))) == pytest.approx((pp // 2 - 1) * (f + i - w))


def test_overlapped_pairs_save_their_shorter_half() -> None:
    schedule = build_schedule("dualpipe-v", 2, 2, 8)
    ones = [1.0] * 4
    alone, together = (replay(schedule, Durations(ones, ones, ones, pair_overlap_fraction=x)) for x in (0.0, 1.0))
    num_pairs = np.array([len(pairs) for pairs in schedule.overlapped])
    assert num_pairs.min() > 0
    assert (alone.busy_s - together.busy_s).tolist() == num_pairs.tolist()
    forward = schedule.overlapped[0][0]
    assert together.start_s[0][forward] == together.start_s[0][forward + 1]
    assert together.end_s[0][forward] == together.end_s[0][forward + 1]


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubble_of_chimera(pp: int) -> None:
    """(pp/2 − 1)·(f + b) when both are equally long; 2·(pp − 2)·f in one unit with b = 2f (Li and Hoefler, Table 2)."""
    for units in (1, 2, 3):
        timeline = even("chimera", pp, 1, units * pp, (1.0, 0.5, 0.5))
        assert bubble_s(timeline) == pytest.approx((pp // 2 - 1) * 2)
    assert bubble_s(even("chimera", pp, 1, pp, (1.0, 1.0, 1.0))) == pytest.approx(2 * (pp - 2))


def test_a_step_of_2bw_costs_its_slowest_stage() -> None:
    once, twice = (build_schedule("pipedream-2bw", 4, 1, num) for num in (16, 32))
    durations = Durations([1, 1, 1.5, 1], [1] * 4, [1] * 4)
    assert makespan_s(twice, durations) - makespan_s(once, durations) == pytest.approx(16 * 3.5)


def naive_ends(schedule: Schedule, durations: Durations) -> dict[Action, float]:
    """The definition, iterated until nothing changes."""
    n = schedule.num_model_stages
    seconds = {
        "F": durations.forward_s, "I": durations.input_grad_s, "W": durations.weight_grad_s,
        "B": np.add(durations.input_grad_s, durations.weight_grad_s),
    }  # fmt: skip
    gradient = {action[1:]: action for actions in schedule.ranks for action in actions if action.kind in "BI"}

    def consumed(action: Action) -> tuple[Action | None, float]:
        stage = action.stage
        if action.kind == "F" and stage % n:
            other = Action("F", stage - 1, action.microbatch)
        elif action.kind in "BI" and stage % n != n - 1:
            other = gradient[stage + 1, action.microbatch]
        else:
            return None, 0.0
        near = schedule.stage_to_rank[other.stage] == schedule.stage_to_rank[stage]
        assert isinstance(durations.p2p_s, float)
        return other, 0.0 if near else durations.p2p_s

    sends = {other: hop for actions in schedule.ranks for other, hop in map(consumed, actions) if other}
    ends: dict[Action, float] = {action: 0.0 for actions in schedule.ranks for action in actions}
    changed = True
    while changed:
        changed = False
        for actions in schedule.ranks:
            for before, action in zip((None, *actions), actions, strict=False):
                source, hop = consumed(action)
                exchange = max(hop, sends.get(before, 0.0) if before else 0.0) if durations.blocking_p2p else 0.0
                free = (ends[before] if before else 0.0) + exchange
                start = max(free, ends[source] + hop if source else 0.0)
                end = start + seconds[action.kind][action.stage % n]
                changed |= end != ends[action]
                ends[action] = end
    return ends


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"forward-only"}))
@pytest.mark.parametrize("blocking", [False, True])
def test_replay_equals_the_definition(random_shape: RandomShape, name: str, blocking: bool) -> None:
    rng = random.Random(name)
    for _ in range(4):
        schedule = build_schedule(name, *random_shape(name, rng))
        stages = [[rng.uniform(0.5, 1.5) for _ in range(schedule.num_model_stages)] for _ in range(3)]
        durations = Durations(*stages, p2p_s=rng.choice([0.0, 0.125]), blocking_p2p=blocking)
        timeline, ends = replay(schedule, durations), naive_ends(schedule, durations)
        for actions, end_s in zip(schedule.ranks, timeline.end_s, strict=True):
            assert [ends[action] for action in actions] == pytest.approx(end_s.tolist())
        assert makespan_s(schedule, durations) == timeline.makespan_s


def test_waves_are_the_replay_of_plain_1f1b() -> None:
    """To the last bit: with fewer and with more micro-batches than ranks, and with transfers of both kinds."""
    rng = random.Random(0)
    for _ in range(60):
        pp, num_microbatches = rng.randint(2, 9), rng.randint(1, 20)
        stages = ([rng.random() for _ in range(pp)] for _ in range(3))
        hops = [rng.choice([0.0, rng.random()]) for _ in range(pp - 1)]
        durations = Durations(*stages, p2p_s=hops, blocking_p2p=rng.random() < 0.5)
        timeline = replay(build_schedule("1f1b", pp, 1, num_microbatches), durations)
        waves = one_f_one_b_waves(durations, num_microbatches)
        assert one_f_one_b_waves(durations, num_microbatches, waits=False).end_s.max() == timeline.makespan_s
        assert waves.start_s.tolist() == [start[0] for start in timeline.start_s]
        assert waves.end_s.tolist() == [end[-1] for end in timeline.end_s]
        assert waves.busy_s.tolist() == timeline.busy_s.tolist()
        np.testing.assert_allclose(waves.transfer_s, timeline.transfer_s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_busy_and_idle_time_add_up_on_every_rank(random_shape: RandomShape, name: str) -> None:
    rng = random.Random(name)
    for _ in range(5):
        schedule = build_schedule(name, *random_shape(name, rng))
        stages = [[rng.uniform(0.5, 1.5) for _ in range(schedule.num_model_stages)] for _ in range(3)]
        durations = Durations(
            *stages, p2p_s=rng.choice([0.0, 0.3]), blocking_p2p=rng.random() < 0.5,
            pair_overlap_fraction=rng.choice([0.0, 0.5]),
        )  # fmt: skip
        timeline = replay(schedule, durations)
        assert set(timeline.idle_s) == set(IDLE_CAUSES)
        assert all((idle_s >= -1e-9).all() for idle_s in timeline.idle_s.values())
        total_s = sum(timeline.idle_s.values(), start=timeline.busy_s)
        assert total_s.tolist() == pytest.approx([timeline.makespan_s] * schedule.pp)


def test_causes_of_idle_time() -> None:
    schedule = build_schedule("1f1b", 4, 1, 8)
    ones = [1.0] * 4
    balanced = replay(schedule, Durations(ones, ones, ones))
    assert balanced.idle_s["fill"].tolist() == [0, 1, 2, 3]
    assert balanced.idle_s["drain"].tolist() == [0, 2, 4, 6]
    assert balanced.idle_s["gradient"].tolist() == [9, 6, 3, 0]
    assert balanced.idle_s["imbalance"].max() == balanced.idle_s["transfer"].max() == 0
    slow = replay(schedule, Durations(ones, ones, ones, slow_ranks={3: 1.5}))
    assert slow.idle_s["gradient"].tolist() == pytest.approx([9, 6, 3, 0])
    assert slow.idle_s["imbalance"][0] == pytest.approx(8 * 1.5)  # the last rank needs 1.5 s more per micro-batch
    assert slow.idle_s["imbalance"][3] == 0
    linked = replay(schedule, Durations(ones, ones, ones, p2p_s=0.25))
    assert (linked.idle_s["transfer"] > 0).all()
    assert linked.idle_s["fill"].tolist() == [0, 1.25, 2.5, 3.75]
    patient = replay(build_schedule("gpipe", 4, 1, 8), Durations(ones, ones, ones, p2p_s=0.25))
    assert patient.idle_s["transfer"].tolist() == [0.25, 0.25, 0.25, 0]  # hidden but once, before the first backward


def test_a_straggler_and_a_slow_link_cost_what_they_hold_up() -> None:
    schedule = build_schedule("1f1b", 4, 1, 8)
    ones = [1.0] * 4
    base = Durations(ones, ones, ones, p2p_s=0.1)
    slow = replace(base, slow_ranks={3: 1.2})
    assert makespan_s(schedule, slow) == pytest.approx(8 * 3.6 + 3 * (3 + 2 * 0.1))  # the last rank never waits
    assert makespan_s(schedule, replace(base, slow_links={(2, 1): 5.0})) >= makespan_s(schedule, base) + 2 * 0.4 - 1e-9
    assert makespan_s(schedule, replace(base, slow_links={(0, 3): 5.0})) == makespan_s(schedule, base)  # no such link


def test_transfers_per_boundary_and_none_within_a_rank() -> None:
    ones = [1.0] * 4
    v_shaped = build_schedule("zb-v", 2, 2, 4)  # stages 1 and 2 share rank 1
    free = makespan_s(v_shaped, Durations(ones, ones, ones))
    assert makespan_s(v_shaped, Durations(ones, ones, ones, p2p_s=[0.0, 9.0, 0.0])) == free
    assert makespan_s(v_shaped, Durations(ones, ones, ones, p2p_s=[0.5, 0.0, 0.0])) > free


def test_blocking_transfers_take_the_rank_twice_per_microbatch() -> None:
    """In the steady state of 1F1B a send and the receive behind it go on at once: f + b + 2c per micro-batch."""
    ones = [1.0] * 3
    blocking = Durations(ones, ones, ones, p2p_s=0.25, blocking_p2p=True)
    short, long = (build_schedule("1f1b", 3, 1, num) for num in (10, 30))
    assert makespan_s(long, blocking) - makespan_s(short, blocking) == pytest.approx(20 * (3 + 2 * 0.25))
    hidden = replace(blocking, blocking_p2p=False)
    assert makespan_s(long, hidden) - makespan_s(short, hidden) < 20 * (3 + 2 * 0.25)


def test_microbatches_of_unequal_length() -> None:
    schedule = build_schedule("1f1b", 2, 1, 3)
    ones = [1.0] * 2
    durations = Durations(ones, ones, ones, microbatch_sizes=[1, 2, 1], activation_bytes=[10, 10])
    timeline = replay(schedule, durations)
    assert timeline.busy_s.tolist() == [12, 12]
    assert timeline.peak_activation_bytes.tolist() == [30, 20]
    with pytest.raises(SpecError, match="microbatch_sizes has 2 entries"):
        replay(schedule, replace(durations, microbatch_sizes=[1, 2]))


def test_activation_bytes_over_time() -> None:
    ones = [1.0] * 4
    timeline = replay(build_schedule("1f1b", 4, 1, 8), Durations(ones, ones, ones, activation_bytes=[1, 2, 3, 4]))
    assert timeline.peak_activation_bytes.tolist() == [4, 6, 6, 4]
    assert timeline.peak_in_flight_chunks.tolist() == [4, 3, 2, 1]
    for times, held in timeline.activation_curves:
        assert (np.diff(times) >= 0).all()
        assert held[-1] == 0
        assert len(held) == 16
    split = replay(build_schedule("zb-h2", 4, 1, 12), Durations(ones, ones, ones))
    assert split.peak_in_flight_microbatches.tolist() == [7.0] * 4


def test_durations_must_fit_the_stages() -> None:
    schedule = build_schedule("1f1b", 2, 1, 2)
    with pytest.raises(SpecError, match="forward_s has 3 entries, the schedule needs 2"):
        makespan_s(schedule, Durations([1, 1, 1], [1, 1], [1, 1]))
    with pytest.raises(SpecError, match=r"weight_grad_s holds -1"):
        makespan_s(schedule, Durations([1, 1], [1, 1], [1, -1]))
