"""Plans, probes, imported and observed runs beside each other: what differs, and which terms make one step longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.decide.compared import OTHERS, REST, Compared
from planner.specs.base import Spec
from planner.trainers.switches import Value

FIGURES = ("step_s", "tokens_per_s")
"""Numbers of every side that stand among the differences."""


class WaterfallTerm(Spec):
    """One term of a step, on the first side and on another."""

    term: str
    first_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        """The seconds that the other side takes more."""
        return self.other_s - self.first_s


class Comparison(Spec):
    """Several sides, the first of which the others are held against."""

    sides: tuple[Compared, ...]
    differences: dict[str, tuple[Value | None, ...]]
    """The value that each side has of a fact that not all have alike; null where a side does not have it."""
    waterfalls: tuple[tuple[WaterfallTerm, ...], ...]
    """For each side but the first, the terms whose differences add up to that of the steps."""

    def to_json(self) -> dict[str, Any]:
        """Plain data in the contract's form; `waterfall` is of the second side, `waterfalls` of all but the first."""
        rows = [[{"term": row.term, "seconds": row.seconds} for row in rows] for rows in self.waterfalls]
        return {
            "files": [side.name for side in self.sides],
            "differences": {name: list(values) for name, values in self.differences.items()},
            "waterfall": rows[0],
            "waterfalls": rows,
            "sides": [side.model_dump(mode="json") for side in self.sides],
        }


def compare(sides: Sequence[Compared]) -> Comparison:
    """Hold all sides but the first against the first."""
    return Comparison(
        sides=tuple(sides),
        differences=_differing(sides),
        waterfalls=tuple(waterfall(sides[0], other) for other in sides[1:]),
    )


def waterfall(first: Compared, other: Compared) -> tuple[WaterfallTerm, ...]:
    """The terms that both sides have, the one that differs most first; their differences add up to the steps'.

    Where one side is a probe or a log, whose clocks tell less apart, the terms are as coarse as its; what only one side
    has is `others_s`. A step that was replayed from stages alone has no terms but the whole.
    """
    levels = (
        (first.terms, other.terms),
        (first.coarse_terms, other.coarse_terms),
        (first.coarser_terms, other.coarser_terms),
    )
    same = next((pair for pair in levels if pair[0].keys() == pair[1].keys()), None)
    terms, others = same or (_shared(first, other), _shared(other, first))
    rows = [WaterfallTerm(term=name, first_s=terms[name], other_s=others[name]) for name in terms]
    return tuple(sorted(rows, key=lambda row: -abs(row.seconds)))


def _shared(side: Compared, beside: Compared) -> dict[str, float]:
    """The terms that both sides have at their coarsest, and all others as one; the whole step where there are none."""
    terms = side.coarser_terms
    shared = {name: terms[name] for name in terms if name in beside.coarser_terms and name != REST}
    return shared | {OTHERS: side.step_s - sum(shared.values())} if shared else {"step_s": side.step_s}


def _differing(sides: Sequence[Compared]) -> dict[str, tuple[Value | None, ...]]:
    """The facts that not all sides have alike, in the order in which the first side has them.

    A probe or a log says less of itself than a plan; what it leaves out is no difference.
    """
    facts = [
        side.facts | side.memory | dict(zip(FIGURES, (side.step_s, side.tokens_per_s), strict=True)) for side in sides
    ]
    names = dict.fromkeys(name for side in facts for name in side)
    probed = [of_side for of_side, side in zip(facts, sides, strict=True) if side.kind in ("probe", "observation")]
    rows = {name: tuple(side.get(name) for side in facts) for name in names if all(name in side for side in probed)}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}
