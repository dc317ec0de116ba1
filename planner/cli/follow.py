"""`plan observe --follow`: a run watched through its log, in lines or as JSON lines, and exit code 7."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cli.inputs import count_of
from planner.cli.output import dumps, show
from planner.errors import OutOfBand, SpecError, printable
from planner.files import STDOUT, write_text
from planner.saved import with_digest

if TYPE_CHECKING:
    from planner.observe.follower import Expected, FollowedRun, FollowLoop
    from planner.observe.observation import Observation

_log = logging.getLogger(__name__)
_HINT = "plan observe FILE without --follow says where the seconds of the whole run went"
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """The options of a run that is followed."""

    files: list[str]
    only_slow: bool = False
    tokens: str | None = None
    json: bool = False
    output: str | None = None
    force: bool = False

    def checked(self) -> FollowOptions:
        """These options. Raises SpecError for what cannot be."""
        if len(self.files) != 1:
            raise SpecError(f"plan observe --follow: {len(self.files)} files", "follow one log, that of rank 0")
        if self.json and self.output == STDOUT:
            raise SpecError("--json and -o -: both on standard output", "give -o a file")
        return self


def follow(options: FollowOptions, expected: Callable[[Observation], Expected]) -> None:
    """Follow a run until it ends, is interrupted, or leaves its band, which raises OutOfBand."""
    from planner.observe.follower import BandWatch, Follower, FollowLoop
    from planner.observe.log_tail import source_of
    from planner.specs.reading import STDIN, label

    path = options.files[0]
    tokens = None if options.tokens is None else count_of("tokens", options.tokens)
    follower = Follower(label(path), BandWatch(only_slow=options.only_slow), expected)
    loop = FollowLoop(
        follower, source_of(path, _log.info), time.monotonic, lambda: time.sleep(POLL_S), path == STDIN, tokens
    )
    try:
        for found in loop.standings():
            _show(options, found)
    except KeyboardInterrupt:
        loop.ended = "interrupted"
    found = loop.standing(final=True)
    _show(options, found)
    _conclude(options, loop, found)


def _show(options: FollowOptions, found: FollowedRun) -> None:
    """One line on where the run stands; nothing where stdout is another's."""
    from planner.report.observe.answer import line_of

    if options.json:
        sys.stdout.write(dumps(found.model_dump(mode="json"), None))
    elif options.output != STDOUT:
        sys.stdout.write(printable(f"{line_of(found)}\n"))
    sys.stdout.flush()


def _conclude(options: FollowOptions, loop: FollowLoop, found: FollowedRun) -> None:
    """The final answer, and the alarm if there is one."""
    from planner.report.observe.answer import render_observed

    rings = loop.ended in ("alarm", "silent")
    answer = loop.answer(last_steps=rings)
    if answer is None:
        if loop.ended == "end of input":
            raise SpecError(f"{found.source}: has no lines of steps that are known", "pipe the output of a trainer")
        return
    if not options.json and options.output != STDOUT:
        show("", render_observed(answer))
    if options.output is not None:
        whole = loop.answer(last_steps=False) if rings else answer
        assert whole is not None
        write_text(options.output, dumps(with_digest(whole.model_dump(mode="json"))), options.force)
    if rings:
        shown = f"; {found.causes[0].name}: {found.causes[0].evidence}" if found.causes else ""
        raise OutOfBand(f"{found.source}: {found.says}{shown}", _HINT)
