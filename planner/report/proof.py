"""The proof of a search in words: how near its best is to the bound, and for which layouts the bound holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.answer import Searched, SearchReport
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
    """The step that no layout beats, among which layouts, and what was not searched."""
    schedules = search.searched.schedules if search.searched else search.schedules
    under = f" under {_either(schedules)}" if schedules else ""
    among = "".join(f", {part}" for part in _among(search.searched)) if search.searched else ""
    left_out = f"; not searched: {', '.join(search.unsearched)}" if search.unsearched else ""
    return f"no layout that fits is faster than {seconds(search.lower_bound_s)} in this model{under}{among}{left_out}"


MAX_SETS_NAMED = 3
"""Sets of modules that the sentence lists; more are counted, and JSON has them all."""


def _among(searched: Searched) -> Iterator[str]:
    """Phrases that narrow the layouts searched down, beside their schedules."""
    sets = [" + ".join(modules) for modules in searched.recompute_modules if modules]
    if len(sets) > MAX_SETS_NAMED:
        yield f"selective recompute meaning one of {len(sets)} sets of modules"
    elif sets:
        yield f"selective recompute meaning {_either(sets)}"
    yield from _recipes(searched)
    if searched.chunks == "equal":
        yield "equal inner chunks"


def _recipes(searched: Searched) -> Iterator[str]:
    """The switches that were searched, with their values; those of one value are counted."""
    tried = [f"{name} {_either(values)}" for name, values in searched.switches.items() if len(values) > 1]
    num_fixed = len(searched.switches) - len(tried)
    others = f"{num_fixed} {'other ' if tried else ''}switch{'es' if num_fixed > 1 else ''} at one value"
    others += " each" if num_fixed > 1 else ""
    if searched.switches:
        yield f"with {', '.join([*tried, *([others] if num_fixed else [])])}"


def _either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
