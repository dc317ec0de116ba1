"""The time that a part of a check may take."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(KeyboardInterrupt):
    """A part took longer than it may. Whatever it started ends as it does at Ctrl-C."""


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
