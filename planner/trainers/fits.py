"""The days on which the numbers that ship with the planner were fitted to measurements."""

from __future__ import annotations

import datetime
from functools import cache

from planner.specs.base import Spec
from planner.specs.problems import checked
from planner.specs.reading import load_yaml
from planner.trainers.shipped import FITS


class Fit(Spec):
    """One fit: its day, the numbers that it changed, and the command and page that have it."""

    date: datetime.date
    numbers: str
    source: str


class Fits(Spec):
    """All fits that the shipped numbers come from."""

    fingerprint: str
    """Digest of the fitted values as they ship."""
    fits: tuple[Fit, ...]
    """The newest last."""


@cache
def shipped_fits() -> Fits:
    """The fits behind the profiles and trainers of this version."""
    return checked(Fits, load_yaml(FITS), FITS.name)
