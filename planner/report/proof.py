"""The proof of a search in words: how near its best is to the bound, and for which layouts the bound holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.answer import SearchReport
from planner.report.format import percent, seconds


def says_outcome(search: SearchReport) -> str:
    """`proven, gap 0.26%`, or `bounded` and what was asked for where the gap that was reached is wider."""
    gap, asked = percent(search.gap, 2), search.asked_gap_fraction
    if search.outcome == "feasible":
        return f"stopped by the time limit, gap {gap}"
    if is_proven(search):
        return f"proven, gap {gap}"
    return f"bounded, gap {gap}" + ("" if asked is None else f" where {percent(asked, 2)} was asked for")


def is_proven(search: SearchReport) -> bool:
    """True where the search ended within the gap that it was asked for.

    Files of earlier versions call every search that ended `proven`, whatever its gap.
    """
    asked = search.asked_gap_fraction
    # the gap is a fraction of the bound, what was asked for a fraction of the step
    return search.outcome == "proven" and (asked is None or 1 - 1 / (1 + search.gap) <= asked + 1e-9)


def says_bound(search: SearchReport) -> str:
    """The step that no layout beats, among how many kinds of layouts, and what was not searched; JSON has the names."""
    among = ", ".join(_among(search))
    left_out = f"not searched, but around the best: {', '.join(search.unsearched)}" if search.unsearched else ""
    says = "; ".join(part for part in (among, left_out) if part)
    bound = f"no layout that fits is faster than {seconds(search.lower_bound_s)} in this model"
    return f"{bound} ({says})" if says else bound


def _among(search: SearchReport) -> Iterator[str]:
    """Phrases that narrow the layouts searched down."""
    searched = search.searched
    schedules = searched.schedules if searched else search.schedules
    if schedules:
        yield _either(schedules)
    if searched is None:
        return
    if any(searched.recompute_modules):
        yield f"{len(searched.recompute_modules)} set{'s' * (len(searched.recompute_modules) > 1)} of modules"
    free = [name for name, values in searched.switches.items() if len(values) > 1]
    if searched.switches:
        yield f"{len(free)} of {len(searched.switches)} switches free"
    if searched.chunks == "equal":
        yield "equal inner chunks"


def _either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
