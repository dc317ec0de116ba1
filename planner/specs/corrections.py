"""Corrections: the numbers of a profile that were measured, before and after, and why some of them stay."""

from __future__ import annotations

from typing import Literal

from planner.specs.base import NonNegativeFloat, Spec
from planner.specs.units import MICRO

Unit = Literal["factor", "fraction", "gib", "s"]
Verdict = Literal["corrected", "confirmed", "refused"]
"""`confirmed`: the profile's own number is as near to the measured one as that repeats. `refused`: the measured number
is not to be believed."""
By = Literal["probe", "run", "history"]
"""The measurement: a probe, a run that was observed, or the runs that a user keeps (`plan validate --add`)."""


class Correction(Spec):
    """One number that a probe or a run measured."""

    name: str
    """The thing measured: a kind of kernel, a link's tier, a part of memory, the host."""
    unit: Unit
    """The unit of the three numbers; a factor is one on the seconds that the profile predicts."""
    before: NonNegativeFloat
    """The number of the profile."""
    measured: NonNegativeFloat
    """The number that the measurement asks for."""
    after: NonNegativeFloat
    """The number that plans are made with: the measured one where the profile was corrected, else the profile's own."""
    source: str
    """The measurement."""
    verdict: Verdict = "corrected"
    reason: str = ""
    """The reason why the profile's number stays; empty where it was corrected."""
    by: By = "probe"

    @property
    def brief(self) -> str:
        """The correction by name, with the numbers before and after alone."""
        if self.verdict != "corrected":
            return f"{self.name} {self.verdict}"
        return f"{self.name} {_text(self.before, self.unit)} → {_text(self.after, self.unit)}"

    @property
    def says(self) -> str:
        """The correction in one line, without its name."""
        before, measured = _text(self.before, self.unit), _text(self.measured, self.unit)
        if self.verdict == "refused":
            return f"refused, stays at {before}, measured {measured}: {self.reason}"
        if self.verdict == "confirmed":
            return f"stays at {before}, measured {measured}: {self.reason}"
        return f"{before} → {measured} ({self.source})"


def _text(value: float, unit: Unit) -> str:
    if unit == "factor":
        return f"× {value:.3f}"
    if unit == "fraction":
        return f"{value:.1%}"
    return f"{value:.2f} GiB" if unit == "gib" else f"{value / MICRO:.0f} µs"
