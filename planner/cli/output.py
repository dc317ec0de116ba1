"""Answers on stdout, as JSON or as a report, and progress on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Timer
from typing import TYPE_CHECKING, Any

from planner.files import STDOUT, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan

_log = logging.getLogger(__name__)
MIN_WIDTH, MAX_WIDTH = 80, 100
"""Narrower terminals wrap lines rather than lose their ends; wider lines are harder to read."""


def answer(plan: Plan, as_json: bool, output: str | None, force: bool) -> None:
    """Save the plan where `output` says, then print it as a report or as JSON."""
    if save(plan, output, force):
        return
    if as_json:
        sys.stdout.write(dumps(plan.to_json()))
    else:
        from planner.report.terminal import render

        show(render(plan))


def save(plan: Plan, output: str | None, force: bool) -> bool:
    """Write the plan file that other commands read; true where stdout has thereby got its answer."""
    if output is None:
        return False
    plan.save(output, force=force)
    if output != STDOUT:
        _log.info("wrote %s", output)
    return output == STDOUT


def show_and_save(
    data: Any, rendered: RenderableType, as_json: bool, output: str | None, force: bool, indent: int | None = 2
) -> None:
    """Print an answer as a report or as JSON, and then save its data: a file that cannot be written loses nothing."""
    if output != STDOUT:
        if as_json:
            sys.stdout.write(dumps(data, indent))
        else:
            show(rendered)
    if output is not None:
        write_text(output, dumps(data, indent), force)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr for what takes more than a second, on terminals only."""
    if not sys.stderr.isatty() or not _log.isEnabledFor(logging.INFO):
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    timer = Timer(1.0, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on terminals only; what it yields is called after each of `total` parts, or of unknown many."""
    if not sys.stderr.isatty() or not _log.isEnabledFor(logging.INFO):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda: bars.advance(bar)


def dumps(data: Any, indent: int | None = 2) -> str:
    """One JSON value and a newline."""
    return json.dumps(data, indent=indent, allow_nan=False) + "\n"


def show(*renderables: RenderableType) -> None:
    """Renderables on stdout: colour on a terminal only, and no blanks at the ends of lines."""
    from rich.console import Console

    from planner.report.pieces import Plain

    # text in [brackets] or between :colons: is text, also where a file that somebody wrote holds it
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    console = plain()
    if console.no_color:  # nor bold or dim
        console = plain(color_system=None)
    console.width = width()
    with console.capture() as capture:
        for renderable in renderables:
            console.print(Plain(renderable))
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def width() -> int:
    """The columns that answers take."""
    from rich.console import Console

    return min(max(Console().width, MIN_WIDTH), MAX_WIDTH)
