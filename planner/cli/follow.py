"""`plan observe --follow`: a run watched through its log, on a screen, in lines, as JSON lines, for Prometheus."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cli.inputs import count_of
from planner.cli.output import MAX_WIDTH, dumps, show
from planner.errors import OutOfBand, SpecError, printable
from planner.files import STDOUT, write_text
from planner.observe.follow.loop import SILENT_S, Loop, View
from planner.saved import with_digest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from planner.observe.follow.follower import Expected
    from planner.observe.follow.state import Standing
    from planner.observe.observation import Observation

_log = logging.getLogger(__name__)
_HINT = "plan observe FILE without --follow says where the seconds of the whole run went"
POLL_S, FILE_EVERY_S, SCREEN_EVERY_S = 0.5, 5.0, 1.0


@dataclass(frozen=True, slots=True)
class Followed:
    """The options of a run that is followed."""

    files: list[str]
    band_steps: int | None = None
    only_slow: bool = False
    silent_minutes: float | None = None
    prometheus: str | None = None
    tokens: str | None = None
    json: bool = False
    output: str | None = None
    force: bool = False

    @property
    def only_here(self) -> list[str]:
        """The options given that mean something only with --follow."""
        given = {
            "--band-steps": self.band_steps is not None,
            "--only-slow": self.only_slow,
            "--silent-minutes": self.silent_minutes is not None,
            "--prometheus": self.prometheus is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    def checked(self) -> Followed:
        """These options. Raises SpecError for what cannot be."""
        if len(self.files) != 1:
            raise SpecError(f"plan observe --follow: {len(self.files)} files", "follow one log, that of rank 0")
        if self.band_steps is not None and not 1 <= self.band_steps <= 10**6:
            raise SpecError(f"--band-steps: {self.band_steps:,} is not from 1 to 1,000,000", "20 suits most runs")
        if self.silent_minutes is not None and not 0 <= self.silent_minutes < 1e6:
            raise SpecError(f"--silent-minutes: {self.silent_minutes} is no time", "30 suits most runs, 0 is never")
        if self.prometheus == STDOUT and (self.json or self.output == STDOUT):
            raise SpecError("--prometheus - and --json: both on standard output", "give --prometheus a file")
        if self.json and self.output == STDOUT:
            raise SpecError("--json and -o -: both on standard output", "give -o a file")
        return self


def follow(options: Followed, expected: Callable[[Observation], Expected]) -> None:
    """Follow a run until it ends, is interrupted, or leaves its band, which raises OutOfBand."""
    from planner.observe.follow.band import DEFAULT_STEPS, LEAST_S, Watch
    from planner.observe.follow.follower import Follower
    from planner.observe.follow.tail import source_of
    from planner.specs.reading import STDIN, label

    path = options.files[0]
    watch = Watch(
        allowed_steps=options.band_steps or DEFAULT_STEPS,
        least_s=LEAST_S if options.band_steps is None else 0.0,
        only_slow=options.only_slow,
    )
    tokens = None if options.tokens is None else count_of("tokens", options.tokens)
    limit_s = SILENT_S if options.silent_minutes is None else 60 * options.silent_minutes
    source = source_of(path, _log.info)
    with _views(options, watch.allowed_steps) as views:
        loop = Loop(
            Follower(label(path), watch, expected), source, views, time.monotonic, lambda: time.sleep(POLL_S),
            is_live=path == STDIN, silent_limit_s=limit_s, total_tokens=tokens,
        )  # fmt: skip
        try:
            loop.run()
        except KeyboardInterrupt:
            loop.ended = "interrupted"
        found = loop.finish()
    _conclude(options, loop, found)


def _conclude(options: Followed, loop: Loop, found: Standing) -> None:
    """The final answer, and the alarm if there is one."""
    from planner.report.observe.answer import render_observed

    rings = loop.ended in ("alarm", "silent")
    answer = loop.answer(last_steps=rings)
    if answer is None:
        if loop.ended == "end of input":
            raise SpecError(f"{found.source}: has no lines of steps that are known", "pipe the output of a trainer")
        return
    if not options.json and STDOUT not in (options.output, options.prometheus):
        show("", render_observed(answer))
    if options.output is not None:
        whole = loop.answer(last_steps=False) if rings else answer
        assert whole is not None
        write_text(options.output, dumps(with_digest(whole.model_dump(mode="json"))), options.force)
    if rings:
        likely = f"; likely: {found.causes[0].name}" if found.causes else ""
        raise OutOfBand(f"{found.source}: {found.says}{likely}", _HINT)


@contextmanager
def _views(options: Followed, every_steps: int) -> Iterator[list[View]]:
    """The views that the options ask for."""
    views: list[View] = []
    if options.prometheus is not None:
        views.append(PrometheusView(options.prometheus))
    if options.json:
        yield [*views, JsonView(every_steps)]
    elif STDOUT in (options.prometheus, options.output):
        yield views
    elif (console := _screen()) is not None:
        from rich.live import Live

        screen = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        try:
            yield [*views, ScreenView(screen)]
        finally:
            screen.stop()
    else:
        yield [*views, LineView(every_steps)]


def _screen() -> Console | None:
    """The terminal on stdout; None where there is none whose lines can be written again."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        return None
    if console.no_color:  # nor bold or dim
        console = Console(highlight=False, markup=False, emoji=False, color_system=None)
    if console.width > MAX_WIDTH:
        console.width = MAX_WIDTH
    return console


@dataclass(slots=True)
class ScreenView:
    """One screen, refreshed; it begins with the first step, so that notes on stderr come before it."""

    screen: Live

    def is_due(self, steps: int, seconds: float) -> bool:
        return seconds >= SCREEN_EVERY_S

    def show(self, found: Standing) -> None:
        from planner.report.observe.live import render_standing
        from planner.report.pieces import Plain

        if found.step is not None:
            self.screen.start()
            self.screen.update(Plain(render_standing(found)), refresh=True)


@dataclass(slots=True)
class LineView:
    """A line once in so many steps."""

    every_steps: int
    last: str = ""

    def is_due(self, steps: int, seconds: float) -> bool:
        return steps >= self.every_steps

    def show(self, found: Standing) -> None:
        from planner.report.observe.live import line_of

        if (line := line_of(found)) != self.last:
            sys.stdout.write(printable(f"{line}\n"))
            sys.stdout.flush()
        self.last = line


@dataclass(slots=True)
class JsonView:
    """An object on a line once in so many steps."""

    every_steps: int

    def is_due(self, steps: int, seconds: float) -> bool:
        return steps >= self.every_steps

    def show(self, found: Standing) -> None:
        sys.stdout.write(dumps(found.model_dump(mode="json"), None))
        sys.stdout.flush()


@dataclass(slots=True)
class PrometheusView:
    """A file of metrics, which is whole at all times."""

    path: str

    def is_due(self, steps: int, seconds: float) -> bool:
        return seconds >= FILE_EVERY_S

    def show(self, found: Standing) -> None:
        from planner.observe.follow.prometheus import exposition

        write_text(self.path, exposition(found), force=True)
        if self.path == STDOUT:
            sys.stdout.flush()
