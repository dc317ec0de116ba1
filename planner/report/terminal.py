"""A plan for a terminal of 80 columns: what was chosen, its stages, where the time goes, what else there was.

Everything is a rich renderable, so that the console decides about colour; no colour carries meaning alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planner.answer import Change, Plan, PricedLayout
from planner.report import small
from planner.report.format import gibibytes, large, seconds
from planner.report.labels import says_unsaid
from planner.report.pieces import TextBar, bullets, columns, section
from planner.report.rows import (
    STAGE_HEADS,
    Entry,
    Figure,
    Rejection,
    Robust,
    StepShare,
    entry_of,
    runs_of_stages,
    shown_cells,
)
from planner.report.small import evidence, figures, is_small, manner, trained
from planner.report.view import View, view_of

_MAX_ROWS = 16
"""Deeper pipelines show runs of alike stages as one row."""
_PANEL_WIDTH = 76


def render(plan: Plan, own: PricedLayout | None = None) -> Group:
    """The whole report of a plan, or of one evaluated layout beside the planner's own choice for the same job."""
    view = view_of(plan, own)
    return Group(*(_small_sections(plan, view) if is_small(plan) else _sections(view)))


def summary(layout: PricedLayout) -> str:
    """One line: sizes, seconds, memory of the fullest stage, and the switch left unsaid that matters most."""
    entry = entry_of("", layout)
    fits = "" if layout.fits else ", does not fit"
    unsaid = f" · not said: {says_unsaid(layout)}" if layout.unsaid else ""
    return f"{layout.parallelism}: {entry.step}, {entry.peak.rstrip('!')} GiB{fits}{unsaid}"


def _sections(view: View) -> Iterator[RenderableType]:
    headings = view.headings
    yield _panel(view)
    if view.given_and_own:
        yield section(headings["given_and_own"], _entries(view.given_and_own))
    if view.recipe:
        yield section(headings["recipe"], _sentences(view.recipe))
    yield section(headings["stages"], _stages(view))
    yield section(headings["breakdown"], _breakdown(view.breakdown))
    if view.alternatives:
        yield section(headings["alternatives"], _entries(view.alternatives))
    if view.robust:
        yield section(headings["robust"], _robust(view.robust))
    if view.rejections:
        yield section(headings["rejections"], _rejections(view.rejections))
    if view.corrections:
        yield section(headings["corrections"], _sentences(view.corrections))
    yield section(headings["how_sure"], _sentences(view.how_sure))
    if view.assumptions:
        yield section(headings["assumptions"], bullets(view.assumptions))
    if view.warnings:
        yield section(headings["warnings"], bullets(view.warnings))


def _small_sections(plan: Plan, view: View) -> Iterator[RenderableType]:
    """The sections of a job on few GPUs, in which nothing is said of pipelines, slow ranks and months."""
    packed = [
        _packed(parts)
        for parts in (
            trained(plan),
            manner(plan.parallelism, plan.best.worst_stage, plan.runtime_spec.sharding),
            view.corrected,
        )
    ]
    yield small_panel(plan, view, packed, _figures(figures(plan)))
    if view.given_and_own:
        yield section(view.headings["given_and_own"], _entries(view.given_and_own))
    if view.recipe:
        yield section(view.headings["recipe"], _sentences(view.recipe))
    yield from small_sections(plan, view)
    if view.corrections:
        yield section(view.headings["corrections"], _sentences(view.corrections))
    yield section(view.headings["how_sure"], _sentences(evidence(plan, view.how_sure)))
    if (assumed := assumed_section(plan)) is not None:
        yield assumed
    if view.warnings:
        yield section(view.headings["warnings"], bullets(view.warnings))


def _panel(view: View) -> Panel:
    lines: list[RenderableType] = [
        Text(view.layout, style="bold green" if view.fits else "bold"),
        *map(Text, _packed(view.manner)),
        *map(Text, _packed(view.placement)),
        Text(view.batch),
    ]
    if view.batch_offer:
        lines.append(Text(view.batch_offer, style="yellow"))
    if view.misfit:
        lines.append(Text(view.misfit, style="bold red"))
    if view.fit:
        lines.append(Text(view.fit))
    if view.corrected:
        lines += map(Text, _packed(view.corrected))
    lines += ["", _figures(view.figures)]
    if view.sustained is not None:
        lines.append(Text(f"{view.sustained.name} {view.sustained.text}"))
    if view.tokens is not None:
        parts = [f"{large(view.tokens)} tokens: {view.cost[0].text}", *(figure.text for figure in view.cost[1:])]
        lines += ["", *map(Text, _packed(parts))]
    if view.goodput:
        effective, *rest = view.goodput
        lines += map(Text, _packed([f"{effective.name} {effective.text}", *(figure.text for figure in rest)]))
    return Panel(Group(*lines), title=Text(view.job, style="bold"), title_align="left")


def _packed(parts: Iterable[str]) -> list[str]:
    """Lines of the panel's width that break between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= _PANEL_WIDTH:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _figures(figures: tuple[Figure, ...]) -> Table:
    """Two rows of three figures, each a name and a value."""
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in range(3):
        grid.add_column()
        grid.add_column(justify="right", style="bold")
        grid.add_column(width=1)
    for row in (figures[:3], figures[3:]):
        cells = [cell for figure in row for cell in (figure.name, figure.text, "")]
        grid.add_row(*cells[:-1])
    return grid


def _stages(view: View) -> Table:
    mixed = view.mixes_recompute
    rows = runs_of_stages(view.stages) if len(view.stages) > _MAX_ROWS else view.stages
    table = columns("r", "l", "l", *("l" if mixed else ""), "r", "r", "r", "r", None, gap=1 if mixed else 2)
    table.add_row(*(Text(head, style="dim") for head in shown_cells(STAGE_HEADS, mixed)), "")
    for row in rows:
        over = row.filled_fraction > 1
        bar = TextBar(row.filled_fraction, 16, "░", style="red" if over else "cyan")
        table.add_row(*shown_cells(row.cells, mixed), bar)
    return table


def _breakdown(shares: Iterable[StepShare]) -> Table:
    table = columns("l", "r", "r", None)
    for share in shares:
        table.add_row(*share.cells, TextBar(share.fraction, 32))
    return table


def _entries(entries: Iterable[Entry]) -> Group:
    """Two lines an entry: its sizes and figures, then how it is run and what it trades."""
    entries = tuple(entries)
    width = max(len(entry.name) for entry in entries)
    return Group(*(line for entry in entries for line in _entry(entry, width)))


def _entry(entry: Entry, width: int) -> Iterator[RenderableType]:
    more = f"{entry.more}  " if entry.more and not entry.trade else ""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(entry.name.ljust(width), Text(entry.sizes, style="bold"), f"{entry.step}  {more}{entry.peak} GiB")
    yield table
    if entry.remark:
        yield Padding(Text(entry.remark, style="dim"), (0, 0, 0, width + 1))


def _robust(robust: Robust) -> Group:
    """A row per layout, a column per assumption; heads are folded to be as narrow as the seconds below them."""
    table = columns("l", *"r" * (len(robust.heads) - 1), gap=1 if len(robust.heads) > 7 else 2)
    table.add_row(*(Text("\n".join(head.rsplit(" ", 1)), style="dim") for head in robust.heads))
    for row in robust.rows:
        table.add_row(*row)
    choice, meanings = robust.remarks
    return Group(table, Text(choice), Text(meanings, style="dim"))


def _rejections(rejections: Iterable[Rejection]) -> Table:
    table = columns("r", "l", None)
    for rejection in rejections:
        count, reason, example = rejection.cells
        table.add_row(count, reason, Text(example, style="dim"))
    return table


def _sentences(lines: Iterable[tuple[str, str]]) -> Table:
    """A subject and a sentence on each row."""
    table = columns("l", None)
    for name, text in lines:
        table.add_row(name, text)
    return table


def small_sections(plan: Plan, view: View) -> Iterator[RenderableType]:
    """The sections below the panel, those first that decide."""
    yield section(f"Memory of the fullest GPU, of {view.capacity}", _small_memory(plan))
    lines = small.room_lines(plan.room)
    if lines:
        yield section("Room, all else as it is", _sentences(lines))
    rows = small.shown_changes(plan)
    if rows:
        yield section("What else, and what it saves or takes (plan explain has all)", _small_changes(rows))
    yield section(f"Where the {seconds(view.step_s)} of a step go", _small_step(plan))


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


def _small_memory(plan: Plan) -> Table:
    table = columns("l", "r", None)
    for item in small.memory_items(plan):
        shown = f"{gibibytes(item.num_bytes)} GiB"
        table.add_row(item.name, shown, TextBar(item.fraction, 32, style="dim" if item.name == "free" else "cyan"))
    return table


def _small_step(plan: Plan) -> Table:
    table = columns("l", "r", "r", None)
    for share in small.step_items(plan):
        table.add_row(*share.cells, TextBar(share.fraction, 32))
    return table


def _small_changes(rows: Iterable[small.ChangeRow]) -> Table:
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
