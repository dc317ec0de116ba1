"""`plan trace`: a plan's step as Chrome trace events, which Perfetto opens."""

from __future__ import annotations

import json as json_module
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import options as o

if TYPE_CHECKING:
    from planner.report.trace import Slice
    from planner.schedule.timeline import Timeline
    from planner.search.replan import Repriced

_log = logging.getLogger(__name__)
_STEP, _OUTPUT = "Step", "Output"
MAX_ACTIONS = 200_000
"""Of one step: a trace of more takes Perfetto minutes to open."""

PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN.json", help="A plan saved with -o; - is stdin.", show_default=False)
]
Alternative = Annotated[int | None, o.number(_STEP, "--alternative", "Trace the plan's N-th alternative.")]
MicroBatches = Annotated[
    int | None, o.number(_STEP, "--micro-batches -m", "Trace a step of fewer micro-batches. [the plan's]")
]
Output = Annotated[str, o.text(_OUTPUT, "--output -o", "FILE", "File to write; - is stdout. [trace.json]")]
Force = Annotated[bool, o.text(_OUTPUT, "--force", None, "Replace the file.")]


def trace_command(
    plan: PlanFile,
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
    from planner.cli.plan_file import read_plan, with_alternative
    from planner.errors import SpecError
    from planner.files import STDOUT, write_text
    from planner.report.trace import trace_events
    from planner.schedule.replay import replay
    from planner.search.replan import reprice, with_microbatches

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


def _exchanges(priced: Repriced, timeline: Timeline) -> list[Slice]:
    """Gradients of each chunk reduced behind its last backward, then the optimizer, then the parameters gathered."""
    from planner.report.trace import Slice
    from planner.search.pipeline import cost_by_rank

    slices = []
    thread = "data-parallel exchange"
    for rank, cost in enumerate(cost_by_rank(priced.costs, priced.order.stage_to_rank)):
        last = {action.stage: place for place, action in enumerate(priced.order.ranks[rank]) if action.kind != "F"}
        spans = sorted((float(timeline.end_s[rank][i]), float(timeline.start_s[rank][i])) for i in last.values())
        fraction = priced.pricing.runtime.gradient_overlap_fraction
        exchanged = [
            ("reduce gradients", end - fraction * (end - begin), float(cost.reduce_s) / len(spans))
            for end, begin in spans
        ]
        exchanged += [
            ("optimizer", timeline.makespan_s, float(cost.optimizer_s)),
            ("gather parameters", timeline.makespan_s, float(cost.gather_s)),
        ]
        start = 0.0
        for name, ready, seconds in exchanged:
            start = max(start, ready)
            if seconds > 0:
                slices.append(Slice(rank, thread, name, start, start + seconds))
            start += seconds
    return slices
