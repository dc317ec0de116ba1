"""The report of a plan as one HTML page: `plan report`, `write_report` and notebooks."""

from __future__ import annotations

from pathlib import Path

from planner.answer import Plan
from planner.files import write_text
from planner.report.html.document import Drawing, render_html
from planner.report.timeline.charts import draw_plan


def report_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else: stages, memory, seconds, schedule, alternatives, inputs."""
    return render_html(plan, _drawing(plan))


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write `report_page` to a file; `-` is stdout. Raises SpecError where the file exists and `force` is not given."""
    write_text(path, report_page(plan), force)


def _drawing(plan: Plan) -> Drawing:
    """The best layout's step."""
    drawn = draw_plan(plan)
    return Drawing(drawn.svg("the schedule: when each rank runs which micro-batch"), drawn.caption)
