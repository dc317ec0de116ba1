"""Values that the switches of runs usually have where nobody says them: the `likely:` entries of a trainer's file.

Entries whose first switch is the same exclude each other; the trainer's own value has what their shares leave. A share
counts published sources and not runs, since a source has habits: (sources with the value + ½) / (sources + 1). The half
stands for what the next source does, which nobody knows.
"""

from __future__ import annotations

from typing import Any

from planner.errors import SpecError
from planner.specs.base import Fraction, Spec
from planner.specs.problems import check_names, checked
from planner.trainers.switches import SWITCHES, Value, changes


class Likely(Spec):
    """Values that switches have together in a share of all runs."""

    switches: dict[str, Value]
    value: Fraction
    """The share of runs."""
    source: str
    architectures: tuple[str, ...] = ()
    """The silicon of these runs; empty for all."""

    @property
    def switch(self) -> str:
        """The switch that the entry is about: the first one."""
        return next(iter(self.switches))


def read_likely(where: str, given: Any) -> tuple[Likely, ...]:
    """The `likely:` entries of a trainer's file. Raises SpecError naming the entry and what is wrong with it."""
    if not isinstance(given, list):
        raise SpecError(f"{where}: likely: {given!r:.60} is no list", "write a list of {switches, value, source}")
    return tuple(_entry(f"{where}: likely: {number}", entry) for number, entry in enumerate(given, start=1))


def _entry(where: str, given: Any) -> Likely:
    entry = checked(Likely, given, where)
    check_names(where, "switches", entry.switches, SWITCHES)
    _, unknown = changes(entry.switches)
    if unknown or not entry.switches:
        raise SpecError(f"{where}: switches: {unknown[0] if unknown else 'none'}: unknown", "name a switch's value")
    return entry
