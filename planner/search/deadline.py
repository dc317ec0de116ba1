"""The time that a search has."""

from __future__ import annotations

import time
from collections.abc import Callable

from planner.errors import SolverError

PATIENCE_S = 300.0
"""Seconds that a search may take, whatever its limit, until it has a layout."""


class Deadline:
    """A moment by which a search ends, counted from when this object is made.

    A search that is `patient` goes on beyond it until it has a layout, for `PATIENCE_S` at most. `clock` returns
    seconds; tests pass one that counts how often it is called.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] | None = None, patient: bool = True) -> None:
        self.limit_s = limit_s
        self.patient = patient
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

    def left_for(self, has_layout: bool) -> float:
        """Seconds left for a search that has a layout or not."""
        more_s = PATIENCE_S - self.limit_s if self.patient and not has_layout else 0.0
        return self.left_s + max(more_s, 0.0)

    def gives_up(self, has_layout: bool) -> bool:
        """True if time is up for a search that has a layout or not.

        Raises SolverError if it has none.
        """
        if self.left_for(has_layout) > 0:
            return False
        if not has_layout:
            raise SolverError(
                f"time is up after {self.limit_s:g} s: no layout was found yet",
                "raise --time-limit, or pin axes to shrink the search",
            )
        return True
