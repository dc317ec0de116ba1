"""`plan trace`: a plan's step as Chrome trace events, which Perfetto opens."""

from __future__ import annotations

import json as json_module
import logging
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o

if TYPE_CHECKING:
    from planner.layout.candidate import Candidate
    from planner.report.timeline.trace import TraceSlice
    from planner.schedule.timeline import Timeline

_log = logging.getLogger(__name__)
_STEP, _OUTPUT = "Step", "Output"
MAX_ACTIONS = 200_000
"""Actions of one step; Perfetto takes minutes to open a trace of more."""

Alternative = Annotated[int | None, o.number(_STEP, "--alternative", "Trace the plan's N-th alternative.")]
MicroBatches = Annotated[
    int | None, o.number(_STEP, "--micro-batches -m", "Trace a step of fewer micro-batches. [the plan's]")
]
Output = Annotated[str, o.text(_OUTPUT, "--output -o", "FILE", "File to write; - is stdout. [trace.json]")]
Force = Annotated[bool, o.text(_OUTPUT, "--force", None, "Replace the file.")]


def trace_command(
    plan: o.PlanFile,
    alternative: Alternative = None,
    micro_batches: MicroBatches = None,
    output: Output = "trace.json",
    force: Force = False,
) -> None:
    """Write one step of a plan as a trace: compute, waits, transfers, data-parallel exchange and memory of every stage.

    \b
    Example:
      plan trace plan.json -o trace.json
      plan trace plan.json -m 32 -o - | gzip > trace.json.gz
    """
    from planner.errors import SpecError
    from planner.files import STDOUT, write_text
    from planner.layout.replan import reprice, with_microbatches
    from planner.plan_file import read_plan, with_alternative
    from planner.report.timeline.trace import trace_events
    from planner.schedule.replay import replay

    chosen = with_alternative(read_plan(plan), alternative)
    priced = reprice(chosen, with_microbatches(chosen.best, micro_batches))
    actions = sum(map(len, priced.order.ranks))
    if actions > MAX_ACTIONS:
        few = MAX_ACTIONS * priced.order.num_microbatches // actions
        raise SpecError(
            f"{plan}: a step has {actions:,} actions, too many for a trace",
            f"trace a shorter step with --micro-batches {max(few // priced.order.pp, 1) * priced.order.pp}",
        )
    timeline = replay(priced.order, priced.durations)
    events = trace_events(timeline, _exchanges(priced, timeline), [f"stage {rank}" for rank in range(priced.order.pp)])
    write_text(output, json_module.dumps(events), force)
    if output != STDOUT:
        _log.info("wrote %s: open it at ui.perfetto.dev", output)


def _exchanges(priced: Candidate, timeline: Timeline) -> list[TraceSlice]:
    """Work of every rank beside the pipeline and after it, to the end of the plan's step.

    "exposed exchanges" is as long as the plan says; gathers behind the next step's forward are not drawn otherwise.
    """
    from planner.report.timeline.trace import TraceSlice

    slices = []
    exchanged_s = timeline.makespan_s + priced.outside.exposed_dp_s
    updated_s = exchanged_s + priced.outside.optimizer_s
    for rank, cost in enumerate(priced.rank_costs):
        reductions = _reductions(priced, timeline, rank, float(cost.reduce_s), exchanged_s)
        spans = [("reduce gradients", start, end) for start, end in reductions]
        spans += [
            ("exposed exchanges", max([timeline.makespan_s, *(end for _, end in reductions)]), exchanged_s),
            ("optimizer", exchanged_s, exchanged_s + float(cost.optimizer_s)),
            ("gradient norm and host", updated_s, updated_s + priced.outside.tail_s),
        ]
        slices += [TraceSlice(rank, "data-parallel exchange", *span) for span in spans if span[1] < span[2]]
    return slices


def _reductions(
    priced: Candidate, timeline: Timeline, rank: int, reduce_s: float, exchanged_s: float
) -> list[tuple[float, float]]:
    """Gradients of each chunk reduced behind its last backward, or behind all of them where ZeRO has them so.

    One after the other, as soon as they may be, and early enough for all to be done by `exchanged_s`.
    """
    from planner.layout.outside_pipeline import reduce_overlap_fraction, sharded_each_time

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
    return [(start, start + length_s) for start in starts]
