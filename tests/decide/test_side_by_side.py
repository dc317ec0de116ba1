"""Searches side by side give what they give one after another, also where a process of theirs is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

import planner.decide.side_by_side as module
from planner.decide.side_by_side import side_by_side
from planner.errors import SpecError


@pytest.fixture(autouse=True)
def worth_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_processors", lambda: 2)


def place(number: int) -> tuple[int, bool]:
    """The number, and whether another process gives it; 1 kills its process."""
    is_child = multiprocessing.parent_process() is not None
    if is_child and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number, is_child


def refused(number: int) -> int:
    raise SpecError(f"{number}: refused", "give another")


def test_short_searches_stay_in_this_process() -> None:
    assert list(side_by_side(place, (0, 1, 2), 0.1)) == [(0, False), (1, False), (2, False)]


def test_what_a_killed_process_leaves_is_searched_here() -> None:
    results = list(side_by_side(place, (0, 1, 2), 10.0))
    assert [number for number, _ in results] == [0, 1, 2]
    assert results[1:] == [(1, False), (2, False)]


def test_an_error_is_raised_and_no_process_is_left() -> None:
    with pytest.raises(SpecError, match="0: refused"):
        list(side_by_side(refused, (0, 1), 10.0))
    assert no_worker_is_left()


def no_worker_is_left() -> bool:
    return not [child for child in multiprocessing.active_children() if "SpawnProcess" in child.name]
