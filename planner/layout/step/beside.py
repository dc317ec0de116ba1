"""Work of every rank beside its pipeline and behind it: gradients reduced, exchanges that show, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.layout.candidate import Candidate
from planner.layout.outside_pipeline import reduce_overlap_fraction, sharded_each_time
from planner.schedule.timeline import Timeline


class Span(NamedTuple):
    """Something that a rank does, from when to when."""

    name: str
    start_s: float
    end_s: float


def beside_pipeline(priced: Candidate, timeline: Timeline, rank: int) -> Iterator[Span]:
    """The spans of a rank, to the end of the plan's step.

    "exposed exchanges" is as long as the plan says; gathers behind the next step's forward are not drawn otherwise.
    """
    cost, outside = priced.rank_costs[rank], priced.outside
    exchanged_s = timeline.makespan_s + outside.exposed_dp_s
    updated_s = exchanged_s + outside.optimizer_s
    reductions = _reductions(priced, timeline, rank, float(cost.reduce_s), exchanged_s)
    spans = [
        *reductions,
        Span("exposed exchanges", max([timeline.makespan_s, *(one.end_s for one in reductions)]), exchanged_s),
        Span("optimizer", exchanged_s, exchanged_s + float(cost.optimizer_s)),
        Span("gradient norm and host", updated_s, updated_s + outside.tail_s),
    ]
    yield from (span for span in spans if span.start_s < span.end_s)


def _reductions(priced: Candidate, timeline: Timeline, rank: int, reduce_s: float, exchanged_s: float) -> list[Span]:
    """Gradients of each chunk reduced behind its last backward, or behind all of them where ZeRO has them so.

    One after the other, as soon as they may be, and early enough for all to be done by `exchanged_s`.
    """
    shape = priced.table.shape
    each_time = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    fraction = float(reduce_overlap_fraction(priced.pricing.runtime, shape))
    passes = zip(priced.order.ranks[rank], timeline.start_s[rank], timeline.end_s[rank], strict=True)
    last = {
        (action.stage, action.microbatch if each_time else 0): (float(end), float(start))
        for action, start, end in passes
        if action.kind != "F"
    }
    ready = [end - fraction * (end - start) for end, start in sorted(last.values())]
    length_s = reduce_s / len({stage for stage, _ in last})
    starts, free_s = [], 0.0
    for index, at_s in enumerate(ready):
        latest_s = exchanged_s - (len(ready) - index) * length_s
        starts.append(min(max(free_s, at_s), latest_s))
        free_s = starts[-1] + length_s
    return [Span("reduce gradients", start, start + length_s) for start in starts]
