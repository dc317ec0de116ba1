"""`plan trace`: a plan's step as Chrome trace events, which Perfetto opens."""

from __future__ import annotations

import logging
from typing import Annotated

from planner.cli import options as o

_log = logging.getLogger(__name__)
_STEP, _OUTPUT = "Step", "Output"

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
    """Write one step of a plan as a trace: passes, exchanges, waits, memory of every stage, arrows between stages.

    \b
    Example:
      plan trace plan.json -o trace.json
      plan trace plan.json -m 32 -o - | gzip > trace.json.gz
    """
    from planner.cli.output import waiting
    from planner.errors import SpecError
    from planner.files import STDOUT, refuse_to_overwrite, write_text
    from planner.layout.replan import num_actions, with_microbatches
    from planner.plan_file import read_plan, with_alternative
    from planner.report.timeline.trace import MAX_ACTIONS, trace_text

    refuse_to_overwrite(output, force)
    chosen = with_alternative(read_plan(plan), alternative)
    layout = with_microbatches(chosen.best, micro_batches)
    actions, sizes = num_actions(layout), layout.parallelism
    if actions > MAX_ACTIONS:
        few = MAX_ACTIONS * sizes.num_microbatches // actions
        raise SpecError(
            f"{plan}: a step has {actions:,} actions, too many for a trace",
            f"trace a shorter step with --micro-batches {max(few // sizes.pp, 1) * sizes.pp}",
        )
    with waiting("tracing"):
        text = trace_text(chosen, layout)
    write_text(output, text, force)
    if output != STDOUT:
        _log.info("wrote %s: open it at ui.perfetto.dev", output)
