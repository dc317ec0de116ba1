"""What a search proved, in words: how near its best is to the bound, and of which layouts the bound is."""

from __future__ import annotations

from planner.answer import SearchReport
from planner.report.format import percent, seconds


def says_outcome(search: SearchReport) -> str:
    """`proven, gap 0.26%`; and what was asked for where the proof falls short of it."""
    gap, asked = percent(search.gap, 2), search.asked_gap_fraction
    if search.outcome != "proven":
        return f"stopped by the time limit, gap {gap}"
    # as the search has it: of the step, not of the bound
    if asked is not None and 1 - 1 / (1 + search.gap) > asked + 1e-9:
        return f"proven to a gap of {gap} only, where {percent(asked, 2)} was asked for"
    return f"proven, gap {gap}"


def says_bound(search: SearchReport) -> str:
    """What no layout beats, under the schedules that were searched."""
    *others, last = search.schedules or ("",)
    under = f" under {', '.join(others)}{' or ' if others else ''}{last}" if last else ""
    return f"no layout that fits is faster than {seconds(search.lower_bound_s)} in this model{under}"
