"""The report of a plan as one HTML page: `plan report`, `write_report` and notebooks."""

from __future__ import annotations

from pathlib import Path

from planner.answer import Plan
from planner.files import write_text
from planner.layout.memory_curve import memory_curves
from planner.layout.replan import reprice
from planner.report.charts_timeline import draw_timeline
from planner.report.html.charts_curve import draw_curves
from planner.report.html.document import Drawing, render_html
from planner.schedule.replay import replay


def report_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else: stages, memory, seconds, timeline, alternatives, inputs."""
    candidate = reprice(plan, plan.best)
    timeline = replay(candidate.order, candidate.durations)
    breakdown, step_s = plan.step.breakdown, plan.step.step_s
    picture = draw_timeline(timeline, breakdown.bubble_s / step_s)
    curves = memory_curves(candidate, timeline)
    return render_html(
        plan,
        Drawing(picture.svg("The pipeline's actions over time, a row per rank"), picture.caption),
        Drawing(draw_curves(curves, plan.cluster.hardware.memory_bytes), "Over one step, reserved memory included."),
    )


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write `report_page` to a file; `-` is stdout. Raises SpecError where the file exists and `force` is not given."""
    write_text(path, report_page(plan), force)
