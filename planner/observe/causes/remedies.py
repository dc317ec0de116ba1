"""Remedies against causes, priced for this job."""

from __future__ import annotations

from planner.observe.case import Case
from planner.observe.observation import Cause, Remedy


def remedy_for(case: Case, cause: Cause) -> Remedy | None:
    """The remedy with the step that it would give, by the price of this job times what the run takes of it."""
    return None
