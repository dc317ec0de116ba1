"""The progress of a rank: a line in a small memory-mapped file that its launcher reads, or words in the ranks' store.

Where no launcher watches, each rank tells its progress in the store that they share, and rank 0 judges.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

RUN_FILE = "run.json"
RESULT_FILE, STATUS_FILE, FAILURE_FILE = "rank{}.json", "rank{}.status", "rank{}.failure.json"
STACK_FILE, LOG_FILE = "rank{}.stack", "rank{}.log"


SIZE, MAX_DETAIL = 1024, 800
MEET_S, START_TIMEOUT_S = 30.0, 60.0
"""The shortest timeouts of ranks that meet, and of the phases before the first step: on a busy machine, processes start
and build slowly."""
BEAT_S, SILENT_S = 0.5, 10.0
"""Seconds between two signs of life of a rank's process, and without any after which no other rank need stand still
for it to count as stopped."""
WAITING = "(waiting)"
"""The end of an action's text while the rank waits for others. Elsewhere it computes, and others may wait for it."""
SILENT_HINT = "a signal (SIGSTOP), a debugger or a machine that hangs stops a process"


class Progress(NamedTuple):
    """The phase of a rank, its present action, when that began, and its process's last sign of life (seconds of one
    monotonic clock)."""

    phase: str
    detail: str
    since_s: float
    beat_s: float

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

    @property
    def waits(self) -> bool:
        """True if the rank waits for others."""
        return WAITING in self.detail

    @property
    def silent_s(self) -> float:
        """Seconds since the process's last sign of life."""
        return time.monotonic() - self.beat_s

    def is_silent(self, timeout_s: float) -> bool:
        """True if the process itself gives no more signs of life: it is stopped or gone, or its machine is."""
        return self.silent_s > max(4 * BEAT_S, timeout_s / 2)

    def hang(self, timeout_s: float) -> str:
        """How the rank stands still, in words that follow its name."""
        if self.is_silent(timeout_s):
            return f"has stopped in {self}: no sign of life for {self.silent_s:.0f} s"
        return f"{'waits in vain' if self.waits else 'hangs'} in {self}: no progress for {self.still_s:.0f} s"


def hanging_rank(ranks: Mapping[int, Progress], timeout_s: float) -> int | None:
    """The rank that keeps the others from moving, or None while no rank stands still or another one still computes.

    A process that has stopped comes first, in whatever phase; then a rank that computes, then one that waits; among
    equals the first to stand still.
    """
    running = {rank: progress for rank, progress in ranks.items() if progress.phase != "done"}
    stuck = {rank: progress for rank, progress in running.items() if progress.stands_still(timeout_s)}
    silent = [rank for rank, progress in running.items() if progress.is_silent(timeout_s)]
    if silent and (stuck or any(running[rank].silent_s > SILENT_S for rank in silent)):
        return min(silent, key=lambda rank: running[rank].beat_s)
    if not stuck or any(not progress.waits for rank, progress in running.items() if rank not in stuck):
        return None
    return min(stuck, key=lambda rank: (stuck[rank].waits, stuck[rank].since_s))


def in_words(phase: str, detail: str) -> str:
    separator = " " if detail.startswith("(") else ", at "
    return f"{phase}{separator}{detail}" if detail else phase


class StatusFile:
    """The file with this rank's line. Writing it is cheap enough for every action.

    A thread writes that the process is alive, also while the rank computes or waits.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * SIZE)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._lock = threading.Lock()
        self.phase, self.detail = "", ""
        self.enter("start")
        threading.Thread(target=self._beat, daemon=True).start()

    def enter(self, phase: str, detail: str = "") -> None:
        """Begin a phase; its timeout starts now."""
        self.phase = phase
        self.at(detail)

    def at(self, detail: object) -> None:
        """Record an action within the phase."""
        self.detail = str(detail).replace("|", "/")[:MAX_DETAIL]
        self._since_s = time.monotonic()
        self._write()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._write()

    def _write(self) -> None:
        with self._lock:
            line = f"{self.phase}|{self.detail}|{self._since_s:.3f}|{time.monotonic():.3f}|"
            self._map[:] = line.encode("ascii", "replace")[:SIZE].ljust(SIZE)

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)


def read_status(path: Path) -> Progress | None:
    """The progress that a rank wrote, or None if it has not written any yet."""
    try:
        phase, detail, since_s, beat_s, _ = path.read_text(errors="replace").split("|")
        return Progress(phase, detail, float(since_s), float(beat_s))
    except (OSError, ValueError):
        return None


_KEY, _VERDICT = "progress {}", "stands still"


class Heard(NamedTuple):
    """The last that a rank told, and when that and its sign of life last changed (seconds of this machine's clock)."""

    told: tuple[str, ...]
    progress: Progress


class SharedProgress:
    """The words of all ranks in a store. The clocks of their machines differ: what counts is when the words changed."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.heard: dict[int, Heard] = {}
        self.start_s = time.monotonic()

    def tell(self, progress: Progress) -> None:
        """Publish this rank's progress."""
        line = (progress.phase, progress.detail, f"{progress.since_s:.3f}", f"{progress.beat_s:.3f}")
        self.store.set(_KEY.format(self.rank), "|".join(line))

    def all(self) -> dict[int, Progress]:
        """The progress of the ranks, in seconds of this machine's clock: rank 0 hears all, the others rank 0."""
        return {rank: self._hear(rank) for rank in range(self.world_size if self.rank == 0 else 1)}

    def _hear(self, rank: int) -> Progress:
        now_s, key, before = time.monotonic(), _KEY.format(rank), self.heard.get(rank)
        if before is None and not self.store.check([key]):
            return Progress("start", "", self.start_s, self.start_s)
        told = tuple(self.store.get(key).decode().split("|"))
        is_same = before is not None and before.told[:3] == told[:3]
        is_silent = before is not None and before.told == told
        since_s = before.progress.since_s if before is not None and is_same else now_s
        beat_s = before.progress.beat_s if before is not None and is_silent else now_s
        self.heard[rank] = Heard(told, Progress(told[0], told[1], since_s, beat_s))
        return self.heard[rank].progress

    def verdict(self, said: tuple[str, str] | None = None) -> tuple[str, str] | None:
        """The words of rank 0 about a rank that stands still, and a hint: `said` on rank 0, which tells the others."""
        if said is not None:
            self.store.set(_VERDICT, "|".join(said))
        if not self.store.check([_VERDICT]):
            return None
        sentence, _, hint = self.store.get(_VERDICT).decode().partition("|")
        return sentence, hint
