"""`plan report`: a plan as one HTML file."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.report.html import Drawing

_log = logging.getLogger(__name__)
BARS, FINE = 64, 160
"""Bars of a rank. A step with more than BARS is drawn with fewer micro-batches, two rounds of pp at least; a drawing
with more than FINE has no edges."""
NAMED = 6_000
"""Bars of a drawing beyond which they have no tooltips, which are most of the file."""

Output = Annotated[str, o.text(o.OUTPUT, "--output -o", "FILE", "File to write; - is stdout. [report.html]")]
Force = Annotated[bool, o.text(o.OUTPUT, "--force", None, "Replace the file.")]


def report_command(plan: o.PlanFile, output: Output = "report.html", force: Force = False) -> None:
    """Write a plan as one HTML file that needs nothing else: stages, memory, seconds, schedule, alternatives, inputs.

    \b
    Example:
      plan report plan.json -o report.html
      plan --model 8b --gpus 16 -o - | plan report - -o report.html
    """
    from planner.cli.plan_file import read_plan
    from planner.files import STDOUT, refuse_to_overwrite, write_text
    from planner.report.html import render_html

    refuse_to_overwrite(output, force)
    saved = read_plan(plan)
    write_text(output, render_html(saved, _drawing(saved)), force)
    if output != STDOUT:
        _log.info("wrote %s", output)


def _drawing(plan: Plan) -> Drawing:
    """The best layout's step, or a shorter one of the same pipeline where the whole is too long to be seen."""
    from planner.layout.replan import reprice, with_microbatches
    from planner.report.format import percent, seconds
    from planner.report.html import Drawing
    from planner.report.timeline import timeline_svg
    from planner.schedule.replay import replay

    num_microbatches, drawn = plan.parallelism.num_microbatches, _drawn_microbatches(plan)
    priced = reprice(plan, with_microbatches(plan.best, drawn))
    timeline = replay(priced.order, priced.durations)
    bars = sum(map(len, priced.order.ranks))
    svg = timeline_svg(timeline)
    name, idle = plan.parallelism.schedule, percent(timeline.bubble_fraction)
    note = f"{name}, {num_microbatches} micro-batches: {seconds(timeline.makespan_s)}, of which stages idle {idle}."
    if drawn < num_microbatches:
        note = (
            f"{name}, the first and last rounds: drawn is a step of {drawn} micro-batches, the plan's has "
            f"{num_microbatches}, and the others repeat the middle. Filling and draining take the same seconds in "
            f"both, so that the drawn step idles {idle} and the plan's {percent(plan.step.bubble_fraction)}."
        )
    note += " Blue is forward, green backward"
    note += ", yellow the weight gradients" if priced.order.splits_backward else ""
    note += "; darker is every second chunk." if priced.order.vpp > 1 else "."
    svg = svg if bars <= NAMED else re.sub(r"<title>[^<]*</title></rect>", "</rect>", svg)
    return Drawing(svg, note, fine=bars > FINE * priced.order.pp)


def _drawn_microbatches(plan: Plan) -> int:
    """Micro-batches to draw: few enough to carry their numbers, yet two rounds of pp at least.

    An order that was made to measure is drawn with all of its micro-batches.
    """
    from planner.schedule.orders import violation

    layout = plan.parallelism
    num_microbatches, pp, vpp = layout.num_microbatches, layout.pp, layout.vpp
    most = max(2, BARS // (2 * vpp * pp)) * pp
    if plan.best.actions or num_microbatches <= most or violation(layout.schedule, pp, vpp, most) is not None:
        return num_microbatches
    return most
