"""The time that a check may take, and that each of its parts may."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(KeyboardInterrupt):
    """A part took longer than it may. Whatever it started ends as it does at Ctrl-C."""


class Budget:
    """Seconds of a check that are left."""

    def __init__(self, seconds: float) -> None:
        self.started_s, self.seconds = time.monotonic(), seconds

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def left_s(self) -> float:
        return self.seconds - self.elapsed_s


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    usual = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
