"""A rank's report: median seconds of its virtual stages."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from planner.probe.rank.clock import ActionTimes
from planner.probe.repeats import spread_fraction
from planner.probe.result import ChunkSeconds


def chunk_seconds(actions: Iterable[ActionTimes]) -> tuple[ChunkSeconds, ...]:
    """Median seconds of each virtual stage's actions, which come in the order in which they ran."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for timed in actions:
        seconds.setdefault((timed.action.stage, timed.action.kind), []).append(timed.end_s - timed.start_s)
    medians = {key: median(values) for key, values in seconds.items()}
    report = []
    for stage in sorted({stage for stage, _ in medians}):
        by_kind = [medians.get((stage, kind)) for kind in "FBIW"]
        forward_s, backward_s, input_grad_s, weight_grad_s = by_kind
        if backward_s is None:
            backward_s = (input_grad_s or 0.0) + (weight_grad_s or 0.0)
        spreads = [spread_fraction(seconds.get((stage, kind), ())) for kind in "FBIW"]
        report.append(
            ChunkSeconds(
                stage=stage,
                forward_s=forward_s or 0.0,
                backward_s=backward_s,
                input_grad_s=input_grad_s,
                weight_grad_s=weight_grad_s,
                spread_fraction=max((spread for spread in spreads if spread is not None), default=None),
            )
        )
    return tuple(report)
