"""The report of a plan as one HTML page: `plan report`, `write_report` and notebooks."""

from __future__ import annotations

from pathlib import Path

from planner.answer import Plan
from planner.files import write_text
from planner.layout.memory_curve import memory_curves
from planner.report.format import seconds
from planner.report.html.charts_of_plans import COLUMNS, draw_curves
from planner.report.html.document import Drawing, Drawings, render_html
from planner.report.timeline.charts import draw_timeline, shown_step
from planner.schedule.replay import replay

CURVE = f"with reserved memory; shaded is what comes and goes within a {COLUMNS}th of it."


def report_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else: stages, memory, seconds, timeline, alternatives, inputs."""
    candidate = shown_step(plan)
    timeline = replay(candidate.order, candidate.durations)
    bubble_fraction = plan.step.breakdown.bubble_s / plan.step.step_s
    num_microbatches = plan.parallelism.num_microbatches
    drawn = draw_timeline(timeline, bubble_fraction, num_microbatches)
    shown = dict.fromkeys((plan.best.worst_stage.stage, 0, plan.parallelism.pp - 1))
    curve = draw_curves(memory_curves(candidate, timeline, shown), plan.cluster.hardware.memory_bytes)
    says = f"{drawn.caption} The plan's whole step, with what comes beside the pipeline: {seconds(plan.step.step_s)}."
    schedule = Drawing(drawn.svg("The timeline: when each rank runs which micro-batch"), says)
    count = candidate.num_microbatches
    over = "one step" if count == num_microbatches else f"a step of {count} of the {num_microbatches} micro-batches"
    return render_html(plan, Drawings(schedule, Drawing(curve, f"Over {over}, {CURVE}")))


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write `report_page` to a file; `-` is stdout. Raises SpecError where the file exists and `force` is not given."""
    write_text(path, report_page(plan), force)
