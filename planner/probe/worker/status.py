"""Where a rank is: a line in a small memory-mapped file that its launcher reads while the rank works."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import NamedTuple

SIZE, MAX_DETAIL = 1024, 800
START_TIMEOUT_S = 60.0
"""Least that starting processes, finding each other and building the model may take on a busy machine."""


class Progress(NamedTuple):
    """Phase of a rank, the action it is at, and since when (host's monotonic clock)."""

    phase: str
    detail: str
    phase_since_s: float
    since_s: float

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)

    def stands_still(self, timeout_s: float) -> bool:
        """Whether nothing has moved for `timeout_s`, or for START_TIMEOUT_S where the steps have not begun."""
        begun = self.phase.startswith(("warm-up", "step"))
        return self.still_s > (timeout_s if begun else max(timeout_s, START_TIMEOUT_S))

    @property
    def still_s(self) -> float:
        """How long nothing has moved."""
        return time.monotonic() - self.since_s


def in_words(phase: str, detail: str) -> str:
    return f"{phase}, at {detail}" if detail else phase


class StatusFile:
    """Writes this rank's line; cheap enough for every action."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * SIZE)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self.phase, self.detail, self._phase_since_s = "", "", 0.0
        self.enter("start")

    def enter(self, phase: str) -> None:
        """Begin a phase; its timeout starts now."""
        self.phase, self._phase_since_s = phase, time.monotonic()
        self.at("")

    def at(self, detail: object) -> None:
        """Note an action within the phase."""
        self.detail = str(detail).replace("|", "/")[:MAX_DETAIL]
        line = f"{self.phase}|{self.detail}|{self._phase_since_s:.3f}|{time.monotonic():.3f}|"
        self._map[:] = line.encode("ascii", "replace")[:SIZE].ljust(SIZE)

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)


def read_status(path: Path) -> Progress | None:
    """The line of a rank, or None where it has not written one yet."""
    try:
        phase, detail, phase_since_s, since_s, _ = path.read_text(errors="replace").split("|")
        return Progress(phase, detail, float(phase_since_s), float(since_s))
    except (OSError, ValueError):
        return None
