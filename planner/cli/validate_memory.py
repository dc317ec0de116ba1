"""The part of `plan validate` on memory: peaks inside their intervals, and the risk of runs that ran out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.validate.memory import Outcomes
    from planner.validate.score import Scored


def described(scored: Sequence[Scored]) -> dict[str, object]:
    """Coverage by kind of measurement and risks by family, as plain data."""
    from planner.validate.memory import load_memory_rows, memory_coverage, memory_outcomes

    outcomes = memory_outcomes(load_memory_rows(), scored)
    return {
        "memory_coverage": [asdict(each) for each in memory_coverage(scored)],
        "memory_outcomes": [asdict(each) for each in outcomes],
    }


def memory_lines(scored: Sequence[Scored]) -> Iterator[str]:
    """A sentence on the intervals, one on runs that ran out of memory, and one on runs that ran."""
    from planner.report.format import percent
    from planner.validate.memory import load_memory_rows, memory_coverage, memory_outcomes

    for told, *kinds in filter(None, [memory_coverage(scored)]):
        each = ", ".join(f"{kind.kind} {percent(kind.coverage, 0)} of {kind.num_rows}" for kind in kinds)
        yield f"memory: {percent(told.coverage, 0)} of {told.num_rows} published peaks in their 80% interval ({each})"
    outcomes = memory_outcomes(load_memory_rows(), scored)
    yield f"ran out of memory: {_risks([outcome for outcome in outcomes if outcome.ran_out])}"
    yield f"ran: {_risks([outcome for outcome in outcomes if not outcome.ran_out])}"


def _risks(outcomes: Sequence[Outcomes]) -> str:
    """How many of some runs are given a risk above one half, in all and by family."""
    from planner.report.format import percent

    num_rows, num_likely = (sum(getattr(o, name) for o in outcomes) for name in ("num_rows", "num_likely"))
    mean = sum(o.mean_risk * o.num_rows for o in outcomes) / num_rows
    each = ", ".join(f"{o.name} {o.num_likely} of {o.num_rows}" for o in outcomes)
    return f"{num_likely} of {num_rows:,} given a risk above 50% ({each}), {percent(mean)} in the mean"
