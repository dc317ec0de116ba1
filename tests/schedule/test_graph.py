"""Lists that no pipeline could run are refused, with the action that is wrong."""

from __future__ import annotations

import pytest

from planner.errors import SpecError
from planner.schedule.actions import Action, Schedule
from planner.schedule.graph import DeadlockError
from planner.schedule.replay import Durations, makespan_s


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
