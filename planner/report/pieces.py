"""The pieces of a terminal report: sections, tables without lines, bars, bullets. Each is a rich renderable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from planner.errors import printable
from planner.report.format import bar


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


def columns(*justify: str | None, gap: int = 2) -> Table:
    """A table without lines: a column per word of `justify`, l or r, that may wrap where it is None."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=False)
    for where in justify:
        table.add_column(justify="right" if where == "r" else "left", no_wrap=where is not None)
    return table


def headed(heads: Iterable[str], *justify: str | None, style: str = "", gap: int = 2) -> Table:
    """`columns` with a head over each."""
    table = columns(*justify, gap=gap)
    table.show_header = True
    for column, head in zip(table.columns, heads, strict=True):
        column.header = Text(head, style=style)
    return table


class TextBar:
    """A bar as wide as its column lets it be, within limits."""

    def __init__(self, fraction: float, widest: int, track: str = " ", style: str = "cyan") -> None:
        self.fraction, self.widest, self.track, self.style = fraction, widest, track, style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(3, self.widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(bar(self.fraction, min(self.widest, options.max_width), self.track), style=self.style)


def bullets(lines: Iterable[str]) -> Table:
    """One bullet a line, wrapped beside it."""
    table = columns("l", None)
    for line in lines:
        table.add_row("·", line)
    return table
