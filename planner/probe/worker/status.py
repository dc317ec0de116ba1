"""The progress of a rank: a line in a small memory-mapped file that its launcher reads while the rank works."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import NamedTuple

SIZE, MAX_DETAIL = 1024, 800
START_TIMEOUT_S = 60.0
"""The shortest timeout of the phases before the first step: on a busy machine, processes start and build slowly."""


class Progress(NamedTuple):
    """The phase of a rank, its present action, and the time when that began (host's monotonic clock)."""

    phase: str
    detail: str
    since_s: float

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)

    def stands_still(self, timeout_s: float) -> bool:
        """True if nothing has moved for `timeout_s`, or for START_TIMEOUT_S where the steps have not begun."""
        steps_have_begun = self.phase.startswith(("warm-up", "step"))
        return self.still_s > (timeout_s if steps_have_begun else max(timeout_s, START_TIMEOUT_S))

    @property
    def still_s(self) -> float:
        """Seconds since the rank last moved."""
        return time.monotonic() - self.since_s


def in_words(phase: str, detail: str) -> str:
    return f"{phase}, at {detail}" if detail else phase


class StatusFile:
    """The file with this rank's line. Writing it is cheap enough for every action."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * SIZE)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self.phase, self.detail = "", ""
        self.enter("start")

    def enter(self, phase: str) -> None:
        """Begin a phase; its timeout starts now."""
        self.phase = phase
        self.at("")

    def at(self, detail: object) -> None:
        """Record an action within the phase."""
        self.detail = str(detail).replace("|", "/")[:MAX_DETAIL]
        line = f"{self.phase}|{self.detail}|{time.monotonic():.3f}|"
        self._map[:] = line.encode("ascii", "replace")[:SIZE].ljust(SIZE)

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)


def read_status(path: Path) -> Progress | None:
    """The progress that a rank wrote, or None if it has not written any yet."""
    try:
        phase, detail, since_s, _ = path.read_text(errors="replace").split("|")
        return Progress(phase, detail, float(since_s))
    except (OSError, ValueError):
        return None
