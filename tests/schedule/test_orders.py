"""What each schedule needs, what it lists, and how much it keeps in flight.

Our orders beside those of Primus' own scheduler, whose makespans and peaks were recorded.
"""

import random
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
from tables import beside

from planner.errors import SpecError
from planner.schedule import graph
from planner.schedule.graph import compile_schedule
from planner.schedule.orders import (
    SCHEDULES,
    Action,
    build_schedule,
    chunks_in_flight,
    in_flight_chunks,
    in_flight_microbatches,
    interleaved_one_f_one_b,
    passes_behind,
    placement,
    violation,
)
from planner.schedule.replay import Durations, _costs, _sweep, makespan_s, replay

TABLES = beside(__file__)

RandomShape = Callable[[str, random.Random], tuple[int, int, int]]


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), TABLES["what_passes_behind_the_first_chunk_to_end"])
def test_what_passes_behind_the_first_chunk_to_end(name: str, pp: int, vpp: int, m: int) -> None:
    """Rank 0 of a replay: its last chunk ends that many backwards before the step, and starts that many forwards in."""
    n = pp * vpp
    schedule = build_schedule(name, pp, vpp, m)
    timeline = replay(schedule, Durations((1.0,) * n, (1.0,) * n, (1.0,) * n))
    of_last_chunk = [i for i, action in enumerate(schedule.ranks[0]) if action.stage == n - pp]
    forward = 1.0 + min(timeline.start_s[0][i] for i in of_last_chunk)
    backward = 2.0 + timeline.makespan_s - max(timeline.end_s[0][i] for i in of_last_chunk)
    passes = passes_behind(name, pp, vpp)
    if name == "breadth-first":  # whose chunks end all micro-batches after each other
        assert forward >= vpp * passes
        assert backward >= 2.0 * vpp * passes
    else:
        assert (forward, backward) == (vpp * passes, 2.0 * vpp * passes)


def test_spelling_is_torchs() -> None:
    assert str(Action("F", 3, 0)) == "3F0"
    assert Action.parse(" 12W7 ") == Action("W", 12, 7)
    with pytest.raises(SpecError, match="3G0"):
        Action.parse("3G0")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_passes_every_stage_once_and_nothing_deadlocks(random_shape: RandomShape, name: str) -> None:
    rng = random.Random(name)
    for _ in range(25):
        pp, vpp, num_microbatches = random_shape(name, rng)
        schedule = build_schedule(name, pp, vpp, num_microbatches)
        compiled = compile_schedule(schedule)  # raises when an action is missing, repeated, misplaced or never ready
        per_pass = 1 if schedule.forward_only else 2
        if not schedule.splits_backward:
            assert len(compiled.kind) == per_pass * pp * vpp * num_microbatches
        assert (schedule.pp, schedule.vpp, schedule.num_microbatches) == (pp, vpp, num_microbatches)
        assert (np.maximum(compiled.source, compiled.previous) < np.arange(1, compiled.num_actions + 1)).all()


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 5)])
def test_ranks_in_turn_are_ordered_without_a_walk(monkeypatch: pytest.MonkeyPatch, name: str, vpp: int) -> None:
    """The order by a formula is topological, and gives the seconds to the last bit that the order of a walk gives."""
    schedule, n = build_schedule(name, 6, vpp, 18), 6 * vpp
    durations = Durations([0.1 + 0.7 * j for j in range(n)], [0.3] * n, [0.9 - 0.01 * j for j in range(n)], 0.02)
    compiled = []
    for other, stand_in in (
        ("_topological_order", None),
        ("_order_in_turn", lambda kind, *_: np.arange(len(kind))[::-1]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(graph, other, stand_in)
            compiled.append(graph.compile_schedule.__wrapped__(schedule))  # type: ignore[attr-defined]
    assert compiled[0].kind.tolist() != compiled[1].kind.tolist()
    ends = [max(_sweep(each, _costs(schedule, each, durations))) for each in compiled]
    assert ends[0] == ends[1] > 18 * 0.1


@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_forms_of_in_flight_count_what_the_lists_do(random_shape: RandomShape, name: str) -> None:
    rng = random.Random(name)
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    for _ in range(10):
        pp, vpp, num_microbatches = random_shape(name, rng)
        counted = []
        for actions in build_schedule(name, pp, vpp, num_microbatches).ranks:
            held = [sum(change[action.kind] for action in actions[: end + 1]) for end in range(len(actions))]
            counted.append(1 if name == "forward-only" else max(held))
        assert in_flight_chunks(name, pp, vpp, num_microbatches) == counted


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.max_vpp > 1])
def test_of_what_the_first_rank_holds_the_first_chunk_is_counted(random_shape: RandomShape, name: str) -> None:
    rng = random.Random(name)
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    for _ in range(10):
        pp, vpp, num_microbatches = random_shape(name, rng)
        actions = list(build_schedule(name, pp, vpp, num_microbatches).ranks[0])
        held = [sum(change[action.kind] for action in actions[: end + 1]) for end in range(len(actions))]
        fullest = actions[: held.index(max(held)) + 1]
        stages = [stage for stage, rank in enumerate(placement(name, pp, vpp)) if rank == 0]
        by_chunk = [sum(change[action.kind] for action in fullest if action.stage == stage) for stage in stages]
        assert list(chunks_in_flight(name, pp, vpp, num_microbatches)[0]) == by_chunk


def test_in_flight_by_hand() -> None:
    assert in_flight_chunks("1f1b", 4, 1, 8) == [4, 3, 2, 1]
    assert in_flight_chunks("1f1b", 4, 1, 2) == [2, 2, 2, 1]
    assert in_flight_chunks("gpipe", 4, 1, 8) == [8] * 4
    assert in_flight_chunks("interleaved-1f1b", 4, 2, 8) == [11, 9, 7, 5]  # 2·(4 − r − 1) + 4 + 1
    # 0 to 3 of both chunks, then 4, 5 and 6 of the first
    assert chunks_in_flight("interleaved-1f1b", 4, 2, 8)[0] == (7, 4)
    assert in_flight_microbatches("interleaved-1f1b", 4, 2, 8) == [5.5, 4.5, 3.5, 2.5]
    assert in_flight_chunks("breadth-first", 4, 2, 8) == [16] * 4
    assert in_flight_chunks("zb-h1", 4, 1, 12) == [4] * 4
    assert in_flight_chunks("zb-h2", 4, 1, 12) == [7] * 4  # 2·pp − 1
    assert in_flight_microbatches("zb-v", 4, 2, 12) == [4.0] * 4
    assert in_flight_microbatches("dualpipe", 8, 1, 24) == [9.0] * 8  # pp + 1
    assert in_flight_chunks("dualpipe-v", 4, 2, 12) == [9] * 4  # 2·pp + 1 chunks
    assert in_flight_microbatches("chimera", 4, 1, 8) == [3, 4, 4, 3]  # pp/2 + 1 … pp


@pytest.mark.parametrize("pp", [2, 4, 5, 6, 8, 12])
def test_v_half_and_v_min_keep_a_half_and_a_third(pp: int) -> None:
    assert max(in_flight_chunks("v-half", pp, 2, 6 * pp)) == (pp + 2 if pp % 2 == 0 else pp + 1)
    assert max(in_flight_chunks("v-min", pp, 2, 6 * pp)) <= 2 * -(-pp // 3) + 2


def test_interleaving_is_megatrons() -> None:
    """Rank 0 of pp 2, vpp 2: warm-up of (2 − 0 − 1)·2 + (2 − 1)·2 chunks, then each forward before its backward."""
    schedule = interleaved_one_f_one_b(2, 2, 4)
    spelled = " ".join(str(action) for action in schedule.ranks[0])
    assert spelled == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert schedule.stage_to_rank == (0, 1, 0, 1)


def test_microbatch_groups_may_be_larger_than_pp() -> None:
    schedule = build_schedule("interleaved-1f1b", 2, 2, 7, 4)
    forwards = " ".join(str(action) for action in schedule.ranks[1] if action.kind == "F")
    assert forwards == "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 1F4 1F5 1F6 3F4 3F5 3F6"
    with pytest.raises(SpecError, match="group size 2"):
        build_schedule("interleaved-1f1b", 3, 2, 6, 2)
    with pytest.raises(SpecError, match="group size 3"):
        build_schedule("interleaved-1f1b", 2, 2, 7, 3)  # would leave a last group of one


def test_two_weight_versions_are_marked_stale() -> None:
    schedule = build_schedule("pipedream-2bw", 4, 1, 8)
    assert (schedule.asynchronous, schedule.num_weight_copies, schedule.staleness_steps) == (True, 2, 1)
    assert build_schedule("dualpipe", 4, 1, 8).num_weight_copies == 2


@pytest.mark.parametrize(("name", "pp", "vpp", "num_microbatches", "words"), TABLES["requirements_name_their_numbers"])
def test_requirements_name_their_numbers(name: str, pp: int, vpp: int, num_microbatches: int, words: str) -> None:
    error = violation(name, pp, vpp, num_microbatches)
    assert words in error.message
    with pytest.raises(SpecError):
        build_schedule(name, pp, vpp, num_microbatches)


def test_unknown_name_suggests_the_nearest() -> None:
    error = violation("interleaved", 4, 2, 8)
    assert "interleaved-1f1b" in error.hint


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.trains_one_copy])
@pytest.mark.parametrize("more", [0, 1])
def test_long_steps_hold_no_more_than_their_whole_list_says(name: str, more: int) -> None:
    """Long steps are counted over a few rounds: against every action of the whole one."""
    kind, pp, num_microbatches = SCHEDULES[name], 4, 4 * 24 + more
    vpp = max(kind.min_vpp, min(kind.max_vpp, 2))
    if violation(name, pp, vpp, num_microbatches):
        pytest.skip("no such step")
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    for rank, held in enumerate(in_flight_chunks(name, pp, vpp, num_microbatches)):
        actions = build_schedule(name, pp, vpp, num_microbatches).ranks[rank]
        assert held == max(accumulate(change[action.kind] for action in actions))


# AMD-AGI/Primus at fd1eeab, primus/core/pipeline_parallel/scheduler, run by SchedulerSimulationRunner on a CPU:
# pp, micro-batches, milliseconds where F, I and W take 1000 each, and 1000, 1200 and 800, and micro-batches held
GREEDY = {"v-half": 0.05, "v-min": 0.03}
"""Orders that fill their gaps in another way than ours, and how far the makespans are apart at most."""
CASES = [(name, *row) for name, rows in TABLES["recorded"].items() for row in rows]


@pytest.mark.parametrize(("name", "pp", "m", "even_ms", "uneven_ms", "held"), CASES)
def test_orders_take_and_hold_what_primus_does(
    name: str, pp: int, m: int, even_ms: int, uneven_ms: int, held: float
) -> None:
    vpp = 1 if name in ("1f1b", "zb-h1") else 2
    order = build_schedule(name, pp, vpp, m)
    assert max(in_flight_microbatches(name, pp, vpp, m)) == held
    for kinds, expected in (((1000, 1000, 1000), even_ms), ((1000, 1200, 800), uneven_ms)):
        durations = Durations(*([seconds / vpp] * (pp * vpp) for seconds in kinds))
        assert makespan_s(order, durations) == pytest.approx(expected, rel=GREEDY.get(name, 1e-9))
