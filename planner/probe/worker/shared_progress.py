"""The progress of ranks that no launcher watches: each tells it in the store that they share, and rank 0 judges."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from planner.probe.worker.status import Progress

_KEY = "plan/progress/{}"
_VERDICT = "plan/verdict"


class Heard(NamedTuple):
    """The last that a rank told, and when that and its sign of life last changed (seconds of this machine's clock)."""

    told: tuple[str, ...]
    progress: Progress


def connect(world_size: int, timeout_s: float = 30.0) -> Any:
    """A connection of one's own to the store at MASTER_ADDR and MASTER_PORT, which another thread may use meanwhile."""
    untyped = cast(Any, dist)
    store = untyped.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return untyped.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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
        """The progress of every rank, in seconds of this machine's clock."""
        return {rank: self._hear(rank) for rank in range(self.world_size)}

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

    def decide(self, sentence: str) -> None:
        """Rank 0's word to all ranks: the sentence that names the rank that hangs, or an empty one."""
        self.store.set(_VERDICT, f"{time.monotonic():.3f}|{sentence}")

    def verdict(self) -> tuple[str, str] | None:
        """The time when rank 0 last spoke (by its own clock) and its sentence; None before it has."""
        if not self.store.check([_VERDICT]):
            return None
        spoken, _, sentence = self.store.get(_VERDICT).decode().partition("|")
        return spoken, sentence
