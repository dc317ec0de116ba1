"""A small job's plan for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planner.answer import Change, Plan
from planner.report.format import gibibytes, seconds
from planner.report.pieces import Bar, bullets, columns, section
from planner.report.small import view as small
from planner.report.view import View


def small_sections(plan: Plan, view: View) -> Iterator[RenderableType]:
    """The sections below the panel, those first that decide."""
    yield section(f"Memory of the fullest GPU, of {view.capacity}", _memory(plan))
    lines = small.room_lines(plan.room)
    if lines:
        yield section("Room, all else as it is", _sentences(lines))
    rows = small.shown_changes(plan)
    if rows:
        yield section("What else, and what it saves or takes (plan explain has all)", _changes(rows))
    yield section(f"Where the {seconds(view.step_s)} of a step go", _step(plan))


def small_panel(plan: Plan, view: View, packed: list[list[str]], figures: Table) -> Panel:
    """The panel: what is trained, does it fit, how fast, how long."""
    what, manner, corrected = packed
    lines: list[RenderableType] = [
        *(Text(line) for line in what),
        Text(small.fit(plan), style="bold green" if view.fits else "bold red"),
        *map(Text, manner),
        Text(view.batch),
        *([Text(view.batch_offer, style="yellow")] if view.batch_offer else []),
        *map(Text, corrected),
        "",
        figures,
        Text(small.how_long(plan)),
    ]
    return Panel(Group(*lines), title=Text(view.job, style="bold"), title_align="left")


def _memory(plan: Plan) -> Table:
    table = columns("l", "r", None)
    for item in small.memory_items(plan):
        shown = f"{gibibytes(item.num_bytes)} GiB"
        table.add_row(item.name, shown, Bar(item.fraction, 32, style="dim" if item.name == "free" else "cyan"))
    return table


def _step(plan: Plan) -> Table:
    table = columns("l", "r", "r", None)
    for share in small.step_items(plan):
        table.add_row(*share.cells, Bar(share.fraction, 32))
    return table


def _changes(rows: Iterable[small.ChangeRow]) -> Table:
    table = columns("l", "r", "r", None)
    for row in rows:
        table.add_row(*row.cells[:3], Text(row.remark, style="dim"))
    return table


def changes_section(found: tuple[Change, ...], capacity_bytes: int, step_s: float, fits: bool) -> RenderableType:
    """All changes with the options that make them, as `plan explain` shows them."""
    table = columns(None, "r", "r", None)
    for row in small.rows_of(found, capacity_bytes, step_s):
        says = "; ".join(filter(None, (row.options, row.remark)))
        table.add_row(row.change, row.gib, row.seconds, says)
    goal = "seconds gained, then GiB saved a second" if fits else "what makes it fit, then GiB saved"
    return section(f"What to change first: one change at a time, by {goal}", table)


def room_section(lines: tuple[tuple[str, str], ...]) -> RenderableType:
    """The largest batch, sequence and model."""
    return section("Room, all else as it is", _sentences(lines))


def assumed_section(plan: Plan) -> RenderableType | None:
    """One line of what was assumed, if anything was."""
    text = small.assumed(plan)
    return section("Assumed", bullets([text])) if text else None


def _sentences(lines: Iterable[tuple[str, str]]) -> Table:
    table = columns("l", None)
    for name, text in lines:
        table.add_row(name, text)
    return table
