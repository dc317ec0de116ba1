"""The pieces of a terminal report: sections, tables without lines, bars, bullets. Each is a rich renderable."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, group
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from planner.errors import printable
from planner.report.format import ANSWERS, WORDS, bar, percent
from planner.specs.expressions import value_of
from planner.specs.reading import shipped_table


class Plain:
    """A renderable whose text cannot steer the terminal, whatever file it is from; its colours stay."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else printable(text), style, control)


def section(title: str, body: RenderableType) -> Group:
    """A blank line, a title, and what it is the title of."""
    return Group("", Text(title, style="bold"), Padding(body, (0, 0, 0, 1)))


Parts = Iterator[RenderableType]
"""The parts of an answer, one below the other."""
as_group = group()
"""Makes one renderable of all that a function yields."""
Rows = Iterable[Iterable[RenderableType]]


def columns(align: str, rows: Rows = (), gap: int = 2, bold: Container[int] = ()) -> Table:
    """A table without lines: a column per letter of `align`, l, r, n (left too) or w (left, and wraps); the rows with
    the numbers `bold` stand out."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=False)
    for side in align:
        overflow: OverflowMethod = "fold" if side == "w" else "ellipsis"
        table.add_column(justify="right" if side == "r" else "left", no_wrap=side != "w", overflow=overflow)
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number in bold else None)
    return table


def headed(heads: Iterable[str], align: str, rows: Rows = (), gap: int = 2, bold: Container[int] = ()) -> Table:
    """`columns` with a head over each."""
    table = columns(align, rows, gap, bold)
    table.show_header = True
    for column, head in zip(table.columns, heads, strict=True):
        column.header = Text(head)
    return table


@dataclass(frozen=True, slots=True)
class TextBar:
    """A bar as wide as its column lets it be, within limits."""

    fraction: float
    widest: int
    track: str = " "
    style: str = "cyan"

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(3, self.widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(bar(self.fraction, min(self.widest, options.max_width), self.track), style=self.style)


def shares(rows: Iterable[tuple[str, str, float]], whole: tuple[str, str] | None = None) -> Table:
    """Names with their sizes and their shares of a whole, which a bar shows too, and the whole below them."""
    drawn = columns("lrrw", ((name, size, percent(share), TextBar(share, 24)) for name, size, share in rows))
    if whole:
        drawn.add_row(*whole, "", "")
    return drawn


def bullets(lines: Iterable[str]) -> Table:
    """One bullet a line, wrapped beside it."""
    return columns("lw", (("·", line) for line in lines))


def listed(item: str, rows: Iterable[object], /, gap: int = 2, bold: Container[int] = (), **names: Any) -> Table:
    """A table of `answers.yaml` with a row for each thing, which its cells call `it`.

    A column is `head side: cell`: the side as `columns` has it, and an expression.
    """
    known = WORDS | {"text": Text} | names
    pairs = [pair for column in shipped_table(ANSWERS)[item] for pair in column.items()]
    heads, cells = zip(*pairs, strict=True)
    titles, sides = zip(*(head.rpartition(" ")[::2] for head in heads), strict=True)
    texts = ([value_of(cell, {**known, "it": one}) for cell in cells] for one in rows)
    return (
        headed(titles, "".join(sides), texts, gap, bold) if any(titles) else columns("".join(sides), texts, gap, bold)
    )
