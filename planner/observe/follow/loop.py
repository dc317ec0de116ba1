"""The loop of `plan observe --follow`: new lines in, views out, until the run ends or has left its band."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from planner.observe.follow.follower import Follower
from planner.observe.follow.standing import standing
from planner.observe.follow.state import Standing
from planner.observe.follow.tail import Source
from planner.observe.observation import Cause, Observed

CAUSES_EVERY_S, CAUSES_SHARE = 5.0, 0.05
"""The least seconds between two searches for causes, and the most of the time that they may take."""
SILENT_S = 1800.0
"""Seconds without a step that ring the alarm: evaluations and checkpoints take minutes, a hang takes for ever."""
BURST = 50
"""Views of a log that is read faster than it was written, before they become rarer."""


class View(Protocol):
    """Something that shows where a run stands."""

    def is_due(self, steps: int, seconds: float) -> bool:
        """True where so many steps and seconds after the last time it shows the run again."""

    def show(self, found: Standing) -> None:
        """Show where the run stands."""


@dataclass
class Loop:
    """A followed run with its views."""

    follower: Follower
    source: Source
    views: Sequence[View]
    now: Callable[[], float]
    """Seconds of a clock that never goes back."""
    wait: Callable[[], None]
    """Called where nothing is new, before the log is asked again."""
    is_live: bool = False
    """False until all that the file held at the begin is read: a run that was out and is not now rings no alarm."""
    silent_limit_s: float = SILENT_S
    """0 where silence rings no alarm."""
    total_tokens: float | None = None
    causes: tuple[Cause, ...] = ()
    ended: str = ""
    """Why the loop ended: `alarm`, `silent`, `last step`, `end of input`."""
    _causes_at_s: float = -1e9
    _causes_took_s: float = 0.0
    _step_at_s: float = 0.0
    _shown: list[tuple[int, float]] = field(default_factory=list)
    _in_burst: int = 0

    def run(self) -> None:
        """Read and show until the run ends, leaves its band, or the input ends. KeyboardInterrupt passes through."""
        self._step_at_s = self.now()
        self._shown = [(0, -1e9) for _ in self.views]
        while not self.ended:
            lines = self.source.read()
            if lines is None:
                self.is_live, self.ended = True, "alarm" if self.follower.watch.rings else "end of input"
                return
            for line in lines:
                if self._feeds(line):
                    return
            if not lines:
                self.is_live, self._in_burst = True, 0
                self.ended = self._ends()
                if not self.ended:
                    self._show(is_idle=True)
                    self.wait()

    def _feeds(self, line: bytes) -> bool:
        """Take a line; true where it rings the alarm."""
        if not self.follower.feed(line):
            return False
        self._step_at_s = self.now()
        if self.is_live and self.follower.watch.rings:
            self.ended = "alarm"
        elif self.is_live:
            self._show(is_idle=False)
        return bool(self.ended)

    def _ends(self) -> str:
        if self.follower.watch.rings:
            return "alarm"
        found = self.follower.last_step(self.total_tokens)
        if found is not None and found[0] >= found[1]:
            return "last step"
        return "silent" if 0 < self._patience_s() <= self.silent_s else ""

    @property
    def silent_s(self) -> float:
        """Seconds since the log last showed a step."""
        return self.now() - self._step_at_s

    def _patience_s(self) -> float:
        """Seconds of silence that ring the alarm: so many as asked for, or as many lines as would; 0 for never."""
        watch = self.follower.watch
        if not self.silent_limit_s or watch.band is None:
            return 0.0
        return max(self.silent_limit_s, watch.allowed_steps * watch.band.high_s, 3 * self.follower.line_s)

    def _show(self, is_idle: bool) -> None:
        """Show the run in every view that is due."""
        steps, now_s = self.follower.totals.steps, self.now()
        rarer = 1 if is_idle else 2 ** (self._in_burst // BURST)
        due = [
            index
            for index, (view, (step, at_s)) in enumerate(zip(self.views, self._shown, strict=True))
            if view.is_due((steps - step) // rarer, now_s - at_s)
        ]
        if not due:
            return
        self._in_burst += not is_idle
        self._find_causes()
        found = self.standing()
        for index in due:
            self.views[index].show(found)
            self._shown[index] = (steps, self.now())

    def _find_causes(self, at_once: bool = False) -> None:
        """The causes by the last steps, at most every few seconds."""
        begin_s = self.now()
        if not at_once and begin_s - self._causes_at_s < max(CAUSES_EVERY_S, self._causes_took_s / CAUSES_SHARE):
            return
        record = self.follower.record()
        window = self.follower.window(record) if record.numbers else None
        is_worth = window is not None and self.follower.is_worth_a_cause(window)
        self.causes = self.follower.judged(window).causes if window is not None and is_worth else ()
        self._causes_at_s = self.now()
        self._causes_took_s = self._causes_at_s - begin_s

    def standing(self, final: bool = False) -> Standing:
        """The run as it stands now."""
        return standing(
            self.follower,
            total_tokens=self.total_tokens,
            silent_s=self.silent_s,
            causes=self.causes,
            final=final,
            is_silent=self.ended == "silent",
        )

    def finish(self) -> Standing:
        """Show where the run stands in every view, for the last time."""
        self._find_causes(at_once=True)
        found = self.standing(final=True)
        for view in self.views:
            view.show(found)
        return found

    def answer(self, last_steps: bool) -> Observed | None:
        """The answer of `plan observe` by the last steps, or by all that are kept; None without a step."""
        follower, record = self.follower, self.follower.record()
        if not record.numbers:
            return None
        return follower.judged(follower.window(record) if last_steps else follower.observation(record))
