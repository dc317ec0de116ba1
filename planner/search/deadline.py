"""The time that a search has."""

from __future__ import annotations

import time
from collections.abc import Callable

from planner.errors import SolverError


class Deadline:
    """A moment by which a search ends, counted from when this object is made.

    `clock` returns seconds; tests pass one that counts how often it is called.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] | None = None) -> None:
        self.limit_s = limit_s
        self._clock = clock or time.monotonic
        self._end_s = self._clock() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left; negative when time is up."""
        return self._end_s - self._clock()

    @property
    def passed(self) -> bool:
        """True if time is up."""
        return self.left_s <= 0

    def check(self, doing: str) -> None:
        """Raise SolverError if time is up before any layout was found."""
        if self.passed:
            raise SolverError(
                f"time is up after {self.limit_s:g} s, {doing}: no layout was found yet",
                "raise --time-limit, or pin axes to shrink the search",
            )
