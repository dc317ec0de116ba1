"""The sections of a small job's page: how much room there is, and what to change first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.report.html.pieces import Html, section, table
from planner.report.small.changes import ChangeRow
from planner.report.view import View

HEADS = ("change", "GiB", "step", "what it changes beside", "options")


def small_sections(view: View, link: Callable[[ChangeRow], object] = lambda row: row.options) -> Iterator[Html]:
    """Nothing for a job that is not small; `link` draws the options of a change, where a page applies them."""
    if view.room:
        yield section(view.headings["room"], table(("", ""), view.room, "ll"))
    if view.changes:
        rows = [(*row.cells, link(row)) for row in view.changes]
        yield section(view.headings["changes"], table(HEADS, rows, "lrrll"))
