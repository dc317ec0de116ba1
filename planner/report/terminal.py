"""A plan for a terminal of 80 columns: one screen that decides, every section in full, or its stages' memory.

Everything is a rich renderable, so that the console decides about colour; no colour carries meaning alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from planner.answer import Plan, PricedLayout
from planner.record import record
from planner.report import small
from planner.report.format import (
    EVIDENCE_IN_BRIEF,
    LINE,
    gibibytes,
    percent,
    recipe_lines,
    says_scope,
    says_unsaid,
    seconds,
    unsure,
)
from planner.report.pieces import Parts, TextBar, as_group, bullets, columns, headed, listed, section
from planner.report.rows import Entry, Figure, ReportSection, Robust, Table
from planner.report.view import View, seconds_table, stage_table, view_of
from planner.specs.base import Texts, grouped

if TYPE_CHECKING:
    from planner.layout.alive import MemoryAnswer, MemoryChange, MemoryOfStage

LINES, COLUMNS = 38, 80
"""The most lines of an answer on a terminal of 80 columns and 40 lines, which has a prompt too."""
_PANEL_WIDTH = 76
FEW_ALTERNATIVES = 3
_NOT_OF_SMALL = ("alternatives", "rejected")
"""Sections of a small job that are shown where they are asked for by name: their words are those of pipelines."""
_ALIASES = {"memory": "stages"}
_COLOURS = {"lead": "bold green", "offer": "yellow", "alarm": "bold red", "soft": "", "": ""}


def render(plan: Plan, own: PricedLayout | None = None, names: Sequence[str] = ()) -> Group:
    """The whole report of a plan, or of one evaluated layout beside the planner's own choice for the same job; of its
    sections those of `names` alone, where any are named."""
    view = view_of(plan, own)
    left_out = set(_NOT_OF_SMALL) if view.is_small and not names else set()
    names = [_ALIASES.get(name, name) for name in names]
    chosen = names or [each.name for each in view.sections if each.name not in left_out]
    shown: list[RenderableType] = [draw(each) for each in view.sections if each.name in chosen]
    missing = [name for name in names if view.section(name) is None and name != "timeline"]
    if "timeline" in names:
        shown.append(_timeline(plan))
    nothing = [Text(f"\n{', '.join(missing)}: nothing to show for this plan")] if missing else []
    return Group(_panel(view, is_brief=False), *shown, *nothing)


def summary(layout: PricedLayout) -> str:
    """One line: sizes, seconds, memory of the fullest stage, and the switch left unsaid that matters most."""
    entry = Entry("", layout)
    fits = "" if layout.fits else ", does not fit"
    unsaid = f" · not said: {says_unsaid(layout)}" if layout.unsaid else ""
    return f"{layout.parallelism}: {entry.step}, {entry.peak.rstrip('!')} GiB{fits}{unsaid}"


def panel_text(plan: Plan) -> str:
    """The panel as plain text, which is `str(plan)`."""
    out = io.StringIO()
    plain = Console(file=out, width=COLUMNS, color_system=None, highlight=False, markup=False, emoji=False)
    plain.print(_panel(view_of(plan), is_brief=True))
    return out.getvalue().rstrip("\n")


def _timeline(plan: Plan) -> RenderableType:
    """The pipeline's timeline, of as many micro-batches as are drawn."""
    from planner.report.schedules import drawing, shown_step
    from planner.schedule.replay import replay

    step = shown_step(plan)
    return section("The timeline of a step", Group(*drawing(replay(step.order, step.durations), COLUMNS - 2)))


def draw(shown: ReportSection) -> Group:
    """A section with a blank line before it, and its title."""
    return section(shown.title, Group(*map(_part, shown.parts)))


def _part(part: Table | tuple[Entry, ...] | Texts) -> RenderableType:
    if isinstance(part, Table):
        return table(part)
    entries = tuple(each for each in part if isinstance(each, Entry))
    return _entries(entries) if entries else bullets(map(str, part))


def table(shown: Table) -> RenderableType:
    """A table of a report; bars are as wide as there is room."""
    is_crowded = len(shown.align) > 7
    bars = "w" if shown.bars else ""
    drawn = columns(shown.align + bars, gap=1 if is_crowded else 2)
    if shown.heads:
        heads = ["\n".join(head.rsplit(" ", 1)) if shown.has_narrow_heads else head for head in shown.heads]
        drawn.add_row(*(Text(head) for head in heads), *("" for _ in bars))
    has_track = bool(shown.heads)
    for number, row in enumerate(shown.rows):
        cells: list[RenderableType] = [*row]
        if shown.align.endswith("w") and len(row) > 2:
            cells[-1] = Text(row[-1])
        if shown.bars:
            share = shown.bars[number]
            style = "red" if share > 1 else "dim" if row[0] == "free" else "cyan"
            cells.append(TextBar(share, 16, "░", style) if has_track else TextBar(share, 32, style=style))
        drawn.add_row(*cells)
    return Group(drawn, *(Text(note, style="dim" if number else "") for number, note in enumerate(shown.notes)))


def _panel(view: View, is_brief: bool) -> Panel:
    style = {**_COLOURS, "lead": "bold green" if view.fits else "bold"}
    texts = [
        Text(text, style=style[line.role])
        for line in view.lines
        if line.is_brief or not is_brief
        for text in _packed(line.parts)
    ]
    lines: list[RenderableType] = [*texts, "", _figures(view.figures), *map(Text, _below(view))]
    return Panel(Group(*lines), title=Text(view.job, style="bold"), title_align="left")


def _below(view: View) -> list[str]:
    return [text for line in view.below for text in _packed(line.parts)]


def _packed(parts: Iterable[str], between: str = " · ") -> list[str]:
    """Lines of the panel's width that break between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + len(between) <= _PANEL_WIDTH:
            lines[-1] += f"{between}{part}"
        else:
            lines.append(part)
    return lines


def _figures(figures: tuple[Figure, ...]) -> RichTable:
    """Two rows of three figures, each a name and a value."""
    grid = RichTable.grid(padding=(0, 1), expand=True)
    for _ in range(3):
        grid.add_column()
        grid.add_column(justify="right", style="bold")
        grid.add_column(width=1)
    for row in (figures[:3], figures[3:]):
        cells = [cell for figure in row for cell in (figure.name, figure.text, "")]
        grid.add_row(*cells[:-1])
    return grid


def _entries(entries: tuple[Entry, ...]) -> Group:
    """Two lines an entry: its sizes and figures, then how it is run and what it trades."""
    width = max(len(entry.name) for entry in entries)
    return Group(*(line for entry in entries for line in _entry(entry, width)))


def _entry(entry: Entry, width: int) -> Parts:
    more = f"{entry.more}  " if entry.more and not entry.layout.trade else ""
    yield _head(entry, width, f"{entry.step}  {more}{entry.peak} GiB")
    if entry.remark:
        yield Padding(Text(entry.remark), (0, 0, 0, width + 1))


def _head(entry: Entry, width: int, figures: str) -> RichTable:
    grid = RichTable.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(entry.name.ljust(width), Text(entry.sizes, style="bold"), figures)
    return grid


@record
class _Block:
    """A part of the screen below a head: at least and at most so many lines, and what draws it in a number of lines."""

    least: int
    most: int
    draw: Callable[[int], RenderableType]
    num_heads: int = 1


def screen(plan: Plan, own: PricedLayout | None = None, after: str = "") -> Group:
    """The answer that decides, in at most LINES lines of COLUMNS columns; `after` is the command to type next."""
    view = view_of(plan, own)
    panel, sure, footnote = _panel(view, is_brief=True), list(_sure(plan, view))[:3], _footnote(plan)
    blocks = list(_blocks(plan, view))
    fixed = _num_lines(panel) + len(sure) + len(footnote) + (1 if after else 0)
    spare = LINES - fixed - sum(block.num_heads + block.least for block in blocks)
    num_blanks = min(len(blocks), max(spare, 0))
    spare -= num_blanks
    parts: list[RenderableType] = [panel, _one_line(sure)]
    for number, block in enumerate(blocks):
        more = min(max(spare, -block.least), block.most - block.least)
        spare -= more
        parts += [*([""] if number < num_blanks else []), block.draw(block.least + more)]
    return Group(*parts, *(Text(line) for line in footnote), *([_cut(after)] if after else []))


def _num_lines(shown: RenderableType) -> int:
    out = io.StringIO()
    Console(file=out, width=COLUMNS).print(shown)
    return out.getvalue().count("\n")


def _blocks(plan: Plan, view: View) -> Iterator[_Block]:
    """Seconds, alternatives, memory and recipe: what stands below the panel, in the order of the full report."""
    shares = view.breakdown
    if view.is_small:
        memory = view.section("stages")
        assert memory is not None, "a GPU has memory"
        items = memory.parts[0]
        assert isinstance(items, Table)
        rows = max(len(shares), len(items.rows))
        yield _Block(rows, rows, lambda _: _beside(view, items))
        if lines := small.room_lines(plan.room):
            yield _Block(len(lines), len(lines), lambda _: Group(_title("Room, all else as it is"), _one_line(lines)))
        if changes := small.shown_changes(plan):
            what = "What else, and what it saves or takes"
            yield _Block(min(3, len(changes)), len(changes), lambda n: Group(_title(what), _changes(changes[:n])))
    else:
        go = f"Where the {seconds(view.step_s)} of a step go"
        few, many = min(3, len(shares)), min(4, len(shares))
        yield _Block(few, many, lambda n: Group(_title(go), Padding(table(seconds_table(shares[:n])), (0, 0, 0, 1))))
    if view.own is not None and (given := view.section("given")):
        (pair,) = given.parts
        entries = [] if isinstance(pair, Table) else [each for each in pair if isinstance(each, Entry)]
        yield _Block(4, 4, lambda _: Group(_title(given.title), *_few(entries, None)))
    elif view.alternatives and not view.is_small:
        entries = list(view.alternatives[:FEW_ALTERNATIVES])
        stands = "step, and beside the best's if an assumption fails"
        title = f"Alternatives: {stands}" if view.robust else "Alternatives, and what each trades"
        yield _Block(
            2 * len(entries), 2 * len(entries), lambda n: Group(_title(title), *_few(entries[: n // 2], view.robust))
        )
    if not view.is_small:
        whole = stage_table(view)
        yield _Block(min(3, len(whole.rows)), len(whole.rows), lambda n: _stages(view, whole, n))
    if recipe := recipe_lines(plan.best, {}, is_brief=True):
        on, *more = recipe
        num_lines = len(wrap(on[1], LINE))
        yield _Block(
            num_lines, num_lines + len(more), lambda n: _one_line(recipe[: n - num_lines + 1], wrapped=1), num_heads=0
        )


def _title(text: str) -> Text:
    return _cut(text, "bold")


def _one_line(pairs: Iterable[tuple[str, str]], wrapped: int = 0) -> Padding:
    """Subjects and sentences, a line each whatever is in them but for the first `wrapped` ones."""
    drawn = columns("lw")
    for number, (name, text) in enumerate(pairs):
        drawn.add_row(name, text if number < wrapped else _cut(text))
    return Padding(drawn, (0, 0, 0, 1))


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _beside(view: View, memory: Table) -> RichTable:
    """Seconds and bytes of a small job beside each other."""
    grid = RichTable.grid(padding=(0, 2))
    texts = seconds_table(view.breakdown), memory
    titles = f"Where the {seconds(view.step_s)} of a step go", f"Memory, of {view.capacity}"
    grid.add_row(
        *(
            Group(_title(title), Padding(table(Table(t.rows, t.align)), (0, 0, 0, 1)))
            for title, t in zip(titles, texts, strict=True)
        )
    )
    return grid


def _changes(rows: Sequence[small.ChangeRow]) -> Padding:
    drawn = columns("lrrw")
    for row in rows:
        drawn.add_row(*row.cells[:3], _cut(row.remark, "dim"))
    return Padding(drawn, (0, 0, 0, 1))


def _few(entries: Sequence[Entry], robust: Robust | None) -> Parts:
    """Two lines an entry, neither of them broken: its figures, then what it trades."""
    width = max(len(entry.name) for entry in entries)
    for rank, entry in enumerate(entries, start=1):
        stands = robust.beside_best(rank) if robust is not None and rank < len(robust.steps_s) else ()
        if stands:
            figures = f"{entry.step}  {100 * stands[-1][0]:+.1f} to {stands[0][0]:+.1%}"
        else:
            figures = "  ".join(part for part in (entry.step, entry.more, f"{entry.peak} GiB") if part)
        has_room = width + len(entry.sizes) + len(figures) < COLUMNS - 3
        yield Padding(_head(entry, width, figures if has_room else entry.step), (0, 0, 0, 1))
        worst = f"worst: {stands[0][1]}" if stands else ""
        known = [part for part in (entry.layout.trade, worst, entry.unsure, entry.manner) if part]
        yield _cut(" " * (width + 2) + _packed(known, "; ")[0] if known else "", "dim")


def _stages(view: View, whole: Table, num_rows: int) -> RenderableType:
    """The first runs of stages, and how many there are beside these."""
    left = len(whole.rows) - num_rows
    heads, few = (*whole.heads[:-1], f"GiB of {gibibytes(view.capacity_bytes)}"), num_rows - (left > 0)
    shown = Padding(table(replace(whole, heads=heads, rows=whole.rows[:few], bars=whole.bars[:few])), (0, 0, 0, 1))
    return Group(shown, Text(f" … and {left + 1} more: --show memory")) if left > 0 else shown


def _sure(plan: Plan, view: View) -> Iterator[tuple[str, str]]:
    """The evidence, and what could make another layout the better one, in a line each."""
    yield "evidence", EVIDENCE_IN_BRIEF[plan.evidence]
    yield from unsure(plan)
    if plan.undecided and not view.is_small:
        count, total = len(plan.undecided), len(plan.alternatives)
        yield "interval", f"holds {count} of {total} alternatives too: plan probe can tell them apart"
    if view.robust is not None:
        yield "assumptions", f"{view.robust.in_brief} (--show robust)"


def _footnote(plan: Plan) -> list[str]:
    """The conditions of the proof in two lines."""
    if plan.search is None:
        return []
    return wrap(f"{says_scope(plan.search, is_brief=True)}; more: --show proof", COLUMNS - 1)


_MOST_GROUPS = 16
_MOST_STAGES = 16
_SHORT = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "workspace": "work", "reserved": "resvd"}


@as_group
def render_memory(answer: MemoryAnswer, stage: MemoryOfStage) -> Iterator[RenderableType]:
    """The stages' peaks, the largest tensors of `stage`, and what would make room there."""
    capacity = gibibytes(stage.capacity_bytes)
    yield Text(f"{answer.model}  {answer.layout}")
    yield section(
        f"Memory at the peak of each stage, GiB of the GPU's {capacity}", listed("memory_peaks", _alike(answer.stages))
    )
    when = seconds(stage.peak_s)
    flying = len({(tensor.microbatch, tensor.from_s) for tensor in stage.tensors if tensor.item == "activations"})
    one, more = ("micro-batch", "micro-batches") if len(stage.chunks) == 1 else ("chunk", "chunks of micro-batches")
    passes = one if flying == 1 else more
    yield section(
        f"Stage {stage.stage}, {when} into the step: {len(stage.tensors):,} tensors, {flying} {passes} in flight",
        _largest(answer, stage),
    )
    if answer.changes:
        yield section(
            f"What would make room on stage {stage.stage}, the allocator's reserve aside",
            listed("room_on_stage", answer.changes, stage=stage, longer=partial(_longer, answer)),
        )
    notes = dict.fromkeys(f"{tensor.name}: {tensor.note}" for tensor in stage.tensors if tensor.note)
    if notes:
        yield section("Rows that are no tensor of their own", bullets(notes))


def _alike(stages: Sequence[MemoryOfStage]) -> Iterator[tuple[MemoryOfStage, MemoryOfStage]]:
    """First and last of runs of stages with the same figures, where there are many stages; else each by itself."""
    runs: list[list[MemoryOfStage]] = []
    for stage in stages:
        if len(stages) > _MOST_STAGES and runs and runs[-1][0].memory == stage.memory:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ((run[0], run[-1]) for run in runs)


def _largest(answer: MemoryAnswer, stage: MemoryOfStage) -> RichTable:
    """The tensors alive at the peak, those of one name and shape together, and the quickest change that drops each."""
    groups = grouped(((one.item, one.part, one.name, one.shape, one.dtype), one) for one in stage.tensors)
    sized = sorted(((sum(one.bytes for one in group), group) for group in groups.values()), key=lambda row: -row[0])
    table = headed(("GiB", "item", "tensor", "number", "gone with", "step"), "rlwrwr")
    for num_bytes, (first, *others) in sized[:_MOST_GROUPS]:
        dropping = [change for change in answer.changes if {*first.remade_by} & {*change.modules}]
        change = min(dropping, key=lambda one: one.step_s, default=None)
        words = ("", "") if change is None else (change.change, _longer(answer, change))
        item, name = _SHORT.get(first.item, first.item), f"{first.name}{first.sizes}"
        table.add_row(gibibytes(num_bytes), item, name, f"{1 + len(others):,}", *words)
    if rest := sized[_MOST_GROUPS:]:
        number = sum(len(group) for _, group in rest)
        table.add_row(gibibytes(sum(size for size, _ in rest)), "", "others", f"{number:,}", "", "")
    return table


def _longer(answer: MemoryAnswer, change: MemoryChange) -> str:
    ratio = change.step_s / answer.step_s - 1
    return f"{'+' if ratio >= 0 else '−'}{percent(abs(ratio))}"
