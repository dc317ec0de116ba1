"""The report of a plan as one HTML page: `plan report`, `write_report` and notebooks."""

from __future__ import annotations

import re
from pathlib import Path

from planner.answer import Plan
from planner.files import write_text
from planner.layout.replan import reprice, with_microbatches
from planner.report.format import percent, seconds
from planner.report.html.document import Drawing, render_html
from planner.report.timeline import timeline_svg
from planner.schedule.orders import violation
from planner.schedule.replay import replay

BARS, FINE = 64, 160
"""Bars of a rank. A step with more than BARS is drawn with fewer micro-batches, two rounds of pp at least; a drawing
with more than FINE has no edges."""
NAMED = 6_000
"""Bars of a drawing beyond which they have no tooltips, which are most of the file."""


def report_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else: stages, memory, seconds, schedule, alternatives, inputs."""
    return render_html(plan, _drawing(plan))


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write `report_page` to a file; `-` is stdout. Raises SpecError where the file exists and `force` is not given."""
    write_text(path, report_page(plan), force)


def _drawing(plan: Plan) -> Drawing:
    """The best layout's step, or a shorter one of the same pipeline where the whole is too long to be seen."""
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

    All of them where the schedule allows no smaller number, or was made for just this one.
    """
    layout = plan.parallelism
    num_microbatches, pp, vpp = layout.num_microbatches, layout.pp, layout.vpp
    most = max(2, BARS // (2 * vpp * pp)) * pp
    if plan.best.actions or num_microbatches <= most or violation(layout.schedule, pp, vpp, most) is not None:
        return num_microbatches
    return most
