"""Groups of gloo's exchanges, told by threads and by who can send to whom."""

from __future__ import annotations

import numpy as np
import pytest

from planner.observe.traces.gloo import with_groups
from planner.observe.traces.groups import Group
from planner.observe.traces.trace import Call, Events

NAMES = ("gloo:all_reduce", "gloo:send", "gloo:recv", "aten::mm")
WORLD = Group("0", "default_pg", (0, 1, 2, 3), 4)
DATA = Group("1", "DATA_PARALLEL_GROUP", (0, 1), 2)
PIPELINE = Group("3", "PIPELINE_MODEL_PARALLEL_GROUP", (0, 2), 2)
# threads in the order in which they were seen, not in the order in which they were made
LANES = ((9, 40), (9, 31), (9, 9), (9, 41), (9, 30))


def made(*rows: tuple[str, int]) -> Events:
    """Events of (name, lane), one behind the other."""
    number = np.arange(len(rows), dtype=np.int64)
    name = np.array([NAMES.index(name) for name, _ in rows], np.int64)
    lane = np.array([lane for _, lane in rows], np.int64)
    none = np.full(len(rows), -1, np.int64)
    return Events(number * 10, number * 10 + 5, lane, name, none, none)


def told(rows: list[tuple[str, int]], groups: list[Group], lanes: object = LANES, rank: int = 0) -> list[Call | None]:
    events, calls = with_groups(made(*rows), NAMES, lanes, {g.name: g for g in groups}, rank)  # type: ignore[arg-type]
    return [calls[number] if number >= 0 else None for number in events.call.tolist()]


REDUCES = [("gloo:all_reduce", lane) for lane in (0, 1, 3, 4)]


def test_threads_are_of_groups_in_the_order_in_which_they_were_made() -> None:
    calls = told([*REDUCES, ("aten::mm", 2)], [WORLD, DATA, PIPELINE])
    assert [call and call.group for call in calls] == ["1", "0", "1", "0", None]
    assert calls[0] == Call("all_reduce", "1", 0, "")


def test_a_pipeline_of_two_stages_says_whom_a_rank_sends_to() -> None:
    rows = [("gloo:send", 2), ("gloo:recv", 2)]
    assert [call and (call.group, call.peers) for call in told(rows, [WORLD, PIPELINE])] == [
        ("3", (0, 2)),
        ("3", (2, 0)),
    ]
    assert [call and call.peers for call in told(rows, [WORLD, PIPELINE], rank=2)] == [(2, 0), (0, 2)]


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (REDUCES[:3], [WORLD, DATA]),
        (REDUCES, [WORLD, DATA, Group("5", "TENSOR_MODEL_PARALLEL_GROUP", (0, 3), 2)]),
        ([("gloo:send", 2)], [WORLD, DATA, Group("3", "PIPELINE_MODEL_PARALLEL_GROUP", (0, 1, 2, 3), 4)]),
        (REDUCES, []),
    ],
    ids=["a thread too few", "a group too many", "four stages", "no groups"],
)
def test_what_does_not_fit_has_no_group(rows: list[tuple[str, int]], groups: list[Group]) -> None:
    assert told(rows, groups) == [None] * len(rows)


def test_threads_without_numbers_or_of_two_processes_have_no_group() -> None:
    assert told(REDUCES, [WORLD, DATA], [(9, "a"), (9, "b"), (9, "c"), (9, "d"), (9, "e")]) == [None] * 4
    assert told(REDUCES, [WORLD, DATA], [(8, 40), *LANES[1:]]) == [None] * 4
