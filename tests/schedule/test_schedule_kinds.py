"""What the table of schedules says of them is what their action lists do."""

import doctest

import pytest
from tables import beside

from planner.schedule import replay
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks, passes_behind, violation

TABLES = beside(__file__)

PP, MICROBATCHES = 4, 16
TRAINS = sorted(name for name, kind in SCHEDULES.items() if kind.trains_one_copy and name != "none")


def chunks_held(name: str) -> list[float]:
    """Activations in flight of each of four ranks, in micro-batches."""
    vpp = max(SCHEDULES[name].min_vpp, 1)
    return [count / vpp for count in in_flight_chunks(name, PP, vpp, MICROBATCHES)]


@pytest.mark.parametrize("name", TRAINS)
def test_properties_are_those_of_the_action_lists(name: str) -> None:
    kind = SCHEDULES[name]
    schedule = build_schedule(name, PP, max(kind.min_vpp, 1), MICROBATCHES)
    assert kind.splits_backward == schedule.splits_backward
    assert kind.holds_all == (chunks_held(name) == [MICROBATCHES] * PP)
    assert kind.frugal == (max(chunks_held(name)) < max(chunks_held("1f1b")))
    assert (kind.bound == "split_backward") == kind.splits_backward


def test_schedules_with_a_role_in_the_search() -> None:
    def names(field: str) -> set[str]:
        return {name for name, kind in SCHEDULES.items() if getattr(kind, field)}

    assert names("runs_without_pipeline") == {"none", "1f1b", "gpipe"}
    assert names("is_tried_by_default") == {"1f1b", "interleaved-1f1b"}
    assert names("is_measured_against") == {"1f1b", "interleaved-1f1b", "zb-h1", "zb-v"}
    assert {
        name: kind.bound for name, kind in SCHEDULES.items() if kind.bound in ("one_f_one_b", "interleaved")
    } == TABLES["schedules_with_a_role_in_the_search"]
    assert {name for name in SCHEDULES if passes_behind(name, 4, 2) > 1} == {"interleaved-1f1b", "breadth-first"}


@pytest.mark.parametrize(("name", "vpp", "number"), TABLES["numbers_of_micro_batches_that_a_schedule_takes"])
def test_numbers_of_micro_batches_that_a_schedule_takes(name: str, vpp: int, number: int) -> None:
    assert violation(name, 4, vpp, number) is None


def test_the_example_of_a_replay_is_true() -> None:
    assert doctest.testmod(replay).failed == 0
