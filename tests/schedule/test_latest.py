"""Results are kept until they have too many actions together; the last one always is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from planner.schedule import actions
from planner.schedule.actions import keeps_latest
from planner.schedule.orders import build_schedule


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
