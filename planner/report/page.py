"""The report of a plan as one HTML page that needs nothing else: no network, no scripts; charts are inline SVG.

It is for `plan report`, `write_report` and notebooks. It lays out the lines of `view`, as the terminal does, and adds
what a terminal has no room for: charts of memory, of seconds and of the alternatives, the pipeline's timeline, and the
inputs with their sources. The same plan makes the same bytes. Names come from files that anyone may have written, so
all text is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from pydantic import BaseModel

from planner.answer import Plan
from planner.files import write_text
from planner.report.format import large
from planner.report.html import draw
from planner.report.pictures import pictures, stage_seconds, steps
from planner.report.view import SECTIONS, view_of


def report_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else: stages, memory, seconds, timeline, alternatives, inputs."""
    return render_html(plan, pictures(plan))


def render_html(plan: Plan, drawn_of: Mapping[str, Markup]) -> str:
    """The page with the pictures of `pictures`, by the section that they belong to."""
    view = view_of(plan)
    entries = (view.best, *view.alternatives)
    charts = {
        "seconds": stage_seconds(plan.best),
        "steps": steps(entries),
    }
    model = {
        "parameters": large(plan.model.num_parameters),
        "active parameters": large(plan.model.num_active_parameters),
    }
    fields = {
        "Model": model | _flat(plan.model.spec),
        "Cluster": _flat(plan.cluster),
        "Training": _flat(plan.training),
        "Runtime": _flat(plan.runtime_spec),
    }
    body = draw("report", plan, view, SECTIONS, {**charts, **drawn_of}, fields)
    return draw("page", f"{view.job}: {view.layout}", body).encode("utf-8", "replace").decode()


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write `report_page` to a file; `-` is stdout. Raises SpecError where the file exists and `force` is not given."""
    write_text(path, report_page(plan), force)


def _flat(value: Any, name: str = "") -> dict[str, object]:
    """Nested values under dotted names, without those that are not set."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        inner = {f"{name}.{key}".lstrip("."): one for key, one in value.items()}
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        inner = {f"{name}[{index}]": one for index, one in enumerate(value)}
    else:
        return {} if value is None else {name: ", ".join(map(str, value)) if isinstance(value, list) else value}
    return {path: one for key, inside in inner.items() for path, one in _flat(inside, key).items()}
