"""Answers on stdout, as JSON or as a report, and progress on stderr."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os.path import realpath
from threading import Timer
from typing import TYPE_CHECKING, Any

from planner.distribution import install_line
from planner.errors import PlannerError, SpecError
from planner.files import refuse_to_overwrite, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan, PricedLayout
    from planner.cli.options import Answering, Saving
    from planner.search.layouts import Standing

_log = logging.getLogger(__name__)
MIN_WIDTH, MAX_WIDTH = 80, 100
"""Narrower terminals wrap lines rather than lose their ends; wider lines are harder to read."""


def answer(plan: Plan, form: Answering, own: PricedLayout | None = None) -> None:
    """Save the plan where `form` says, then print it as one screen, in full, or as JSON."""
    names = form.names
    if save(plan, form):
        return
    if form.json:
        return tell(plan.to_json())
    from planner.report.terminal import render, screen

    show(
        render(plan, own, names) if form.full or names else screen(plan, own, _next(plan, form.output)),
        cols=None if form.full or names else MIN_WIDTH,
    )


def _next(plan: Plan, saved: str | None) -> str:
    """The command to type next."""
    if not plan.fits:
        return "next  plan explain, with the same options: why, and what would make it fit"
    file = shlex.quote(saved or "plan.json")
    before = "" if saved else "-o plan.json, then "
    target = target_of(plan)
    if target is None:
        command = "show {} --page report.html" if plan.model.spec.traced is None else "probe {}"
        return f"next  {before}plan {command.format(file)}"
    says = f"next  {before}plan export {file} --to {target}"
    rest = " (--full for the rest)"
    return says + rest if len(says) + len(rest) <= MIN_WIDTH else says


def target_of(plan: Plan) -> str | None:
    """The first target that writes files of a plan's trainer; None where none builds its model."""
    from planner.export.targets import TRAINERS
    from planner.shape import Shape
    from planner.trainers.rules.recipe import export_rules_for
    from planner.trainers.rules.rule_rows import first_broken, rules_of

    runtime = plan.runtime_spec
    sizes = {name: getattr(plan.parallelism, name) for name in ("tp", "cp", "pp", "zero_stage")}
    rules = (export_rules_for(runtime), Shape()), (rules_of("module"), Shape(**sizes))
    if any(first_broken(some, plan.model.spec, plan.training, shape) for some, shape in rules):
        return None
    names = (name for kind in (plan.runtime, runtime.family) for name, to in TRAINERS.items() if kind in to.runtimes)
    return next(names, None)


def warn_of_early_stop(plan: Plan) -> None:
    """Say on stderr that a search stopped at its time limit, and the option with which it goes on."""
    if plan.search is not None and plan.search.outcome == "feasible":
        from planner.report.view import longer

        _log.warning("the search stopped early, gap %.1f%%: %s goes on", 100 * plan.search.gap, longer(plan))


@contextmanager
def needing(what: str, extra: str, kind: type[PlannerError] = PlannerError) -> Iterator[None]:
    """Raise for a package of an extra that what is imported meanwhile lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "planner").startswith("planner"):  # a defect
            raise
        raise kind(f"{what} needs {error.name}, which is not installed", install_line(extra)) from None


def refuse_files(paths: Mapping[str, str | None], force: bool) -> None:
    """Raise SpecError for a file to write, by its option, that is there already, or that two options name."""
    named: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        other = named.setdefault(realpath(path), option)
        if other != option:
            raise SpecError(f"{other}, {option}: both name {path}", "name two files")
        refuse_to_overwrite(path, force)


def save(plan: Plan, saving: Saving) -> bool:
    """Write the plan file that other commands read; true where stdout has thereby got its answer."""
    if saving.output is not None:
        plan.save(saving.output, force=saving.force)
        if not saving.is_to_stdout:
            _log.info("wrote %s", saving.output)
    return saving.is_to_stdout


def tell(answer: Any) -> None:
    """Print an answer: plain data as JSON, anything else as it is drawn."""
    if isinstance(answer, dict | list):
        sys.stdout.write(dumps(answer))
    else:
        show(*(answer if isinstance(answer, Iterator) else [answer]))


def show_and_save(data: Any, rendered: RenderableType, saving: Saving, indent: int | None = 2) -> None:
    """Print an answer as a report or as JSON, and then save its data: a file that cannot be written loses nothing."""
    if not saving.is_to_stdout:
        if saving.json:
            sys.stdout.write(dumps(data, indent))
        else:
            show(rendered)
    if saving.output is not None:
        write_text(saving.output, dumps(data, indent), saving.force)


class _Standing:
    """The words beside the spinner: what is done, the best step so far with its gap, and the seconds since it began."""

    def __init__(self, what: str) -> None:
        self.what, self.best, self.began_s = what, "", time.monotonic()

    def told(self, standing: Standing) -> None:
        """The news of a search."""
        from planner.report.format import percent, seconds

        step_s = standing.best.step_s
        self.best = f"step {seconds(step_s)}, gap {percent(max(step_s / standing.bound_s - 1, 0.0))}, "

    def __rich__(self) -> str:
        return f"{self.what}: {self.best}{time.monotonic() - self.began_s:.0f} s"


@contextmanager
def waiting(what: str) -> Iterator[Callable[[Standing], None]]:
    """A spinner on stderr for what takes more than a second, on terminals only; a search that is given what it yields
    shows its best step, its gap and its seconds."""
    standing = _Standing(what)
    if not sys.stderr.isatty() or not _log.isEnabledFor(logging.INFO):
        yield lambda _: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(standing)
    timer = Timer(1.0, status.start)
    timer.start()
    try:
        yield standing.told
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


def show(*renderables: RenderableType, cols: int | None = None) -> None:
    """Renderables on stdout: colour on a terminal only, and no blanks at the ends of lines."""
    from rich.console import Console

    from planner.report.pieces import Plain

    # text in [brackets] or between :colons: is text, also where a file that somebody wrote holds it
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    console = plain()
    if console.no_color:  # nor bold or dim
        console = plain(color_system=None)
    console.width = cols or width()
    with console.capture() as capture:
        for renderable in renderables:
            console.print(Plain(renderable))
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def width() -> int:
    """The columns that answers take."""
    from rich.console import Console

    return min(max(Console().width, MIN_WIDTH), MAX_WIDTH)
