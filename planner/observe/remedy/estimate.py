"""The step that a run would have after a change, by the price of its layout before and after it."""

from __future__ import annotations

from collections.abc import Iterable

from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.observe.case import Case

LEAST_GAIN = 1e-3
"""Least share of a step that a remedy has to win."""


def expected_step_s(case: Case, now: Candidate, changed: Candidate) -> float:
    """Seconds of the step after a change: measured − (price now − price changed) · min(1, measured / price now).

    Whatever else makes a run slower than its price stays as it is, so that no more is won than the price says; a run
    that is faster than its price wins in proportion. Never below the lower end of the changed price's interval, in the
    same proportion. Without a measured step, the changed price.
    """
    measured_s = case.observation.step_s
    if measured_s is None:
        return changed.step_s
    share = min(1.0, measured_s / now.step_s)
    interval = price_layout(changed, exact=False).step.step_s_interval
    least_s = interval[0] if interval else changed.step_s
    return max(measured_s - (now.step_s - changed.step_s) * share, least_s * share)


def best_of(now: Candidate, others: Iterable[Candidate]) -> Candidate | None:
    """The fastest of some changes; None where none wins `LEAST_GAIN` of the step."""
    best = min(others, key=lambda other: other.step_s, default=now)
    return None if best.step_s > now.step_s * (1 - LEAST_GAIN) else best
