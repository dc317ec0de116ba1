"""Logs that something writes, moves, cuts, copies and loses while they are followed, at random and by a seed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from planner.observe.log_tail import FileEnd

TEXTS = ("iteration {} | lm loss: 2.0 |", "[rank0]: étape {} — 损失 2.0", "{}", "checkpoint {} \U0001f4be " + "x" * 400)


@contextmanager
def failing(call: str, number: int) -> Iterator[None]:
    """A file system whose `os` call fails with this error."""
    with mock.patch.object(os, call, side_effect=OSError(number, os.strerror(number))):
        yield


@dataclass
class Story:
    """One history of a log: what was written to it, and what its follower read and said."""

    chance: random.Random
    path: Path
    written: list[bytes] = field(default_factory=list)
    """Every line whose end was written."""
    seen: list[bytes] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    lost: set[bytes] = field(default_factory=set)
    """Lines that stood in the log when it was cut, and were not read by then."""
    num_rotations: int = 0
    _half: bytes = b""
    """The begin of the line that stands at the end of the log."""
    _pending: bytes = b""
    """The rest of it, and lines after it, which are to be written next."""
    _count: int = 0

    def __post_init__(self) -> None:
        self.end = FileEnd(str(self.path), self.said.append)
        self._away = self.path.with_suffix(".away")
        self._rename("w")

    def _rename(self, mode: str) -> None:
        self._file = open(self.path, f"{mode}b", buffering=0)  # noqa: SIM115 - closed by what replaces it

    def write(self) -> None:
        """Bytes of lines, ended anywhere: in the midst of a line or of a letter, which the next bytes go on with."""
        for _ in range(self.chance.randrange(1, 6)):
            self._count += 1
            self._pending += self.chance.choice(TEXTS).format(f"n{self._count}").encode() + b"\n"
        end = len(self._pending) if self.chance.random() < 0.4 else self.chance.randrange(len(self._pending) + 1)
        self._put(end)

    def _put(self, end: int) -> None:
        self._file.write(self._pending[:end])
        *whole, self._half = (self._half + self._pending[:end]).split(b"\n")
        self._pending = self._pending[end:]
        self.written += whole

    def read(self) -> None:
        self.seen += self.end.read() or []

    def read_all(self) -> None:
        """Read until nothing new comes twice: whoever moves a file moves on in steps."""
        idle = 0
        while idle < 3:
            before = len(self.seen)
            self.read()
            idle = idle + 1 if len(self.seen) == before else 0

    def end_line(self) -> None:
        """Write the rest, as whoever opens another log does."""
        self._put(len(self._pending))

    def rotate(self) -> None:
        """Rename the log and make it anew, with what is written in between still in the old one."""
        self.end_line()
        self.read_all()
        self.num_rotations += 1
        self.path.rename(self.path.with_suffix(f".{self._count}"))
        self.write()
        self.end_line()
        if self.chance.random() < 0.5:
            self.read()
            self.write()
            self.end_line()
        if self.chance.random() < 0.5:
            self.path.touch()
            self.read()
            self.write()
            self.end_line()
        self._file.close()
        self._rename("a")
        self.write()
        self.read_all()

    def cut(self) -> None:
        """Cut the log to nothing; its writer goes on at the end, or behind a hole, before or after it is read again."""
        self.read_all()
        if not self.path.stat().st_size:
            return
        if self.chance.random() < 0.5:
            self.write()
        self.lost |= set(self.written) - set(self.seen)
        at = self._file.tell() if self.chance.random() < 0.5 else 0
        os.truncate(self.path, 0)
        self._file.seek(at)
        self._half = self._pending = b""
        if self.chance.random() < 0.3:
            self.read()
        for _ in range(self.chance.randrange(4)):
            self.write()
        self.read_all()

    def hide(self) -> None:
        """Move the log away and back, or put something else in its place meanwhile, as it grows."""
        self.path.rename(self._away)
        kind = self.chance.randrange(4)
        if kind == 1:
            self.path.mkdir()
        elif kind == 2:
            os.mkfifo(self.path)
        elif kind == 3:
            self.path.symlink_to(self.path.name)
        self.read()
        self.write()
        self.read()
        if kind == 1:
            self.path.rmdir()
        elif kind:
            self.path.unlink()
        self._away.rename(self.path)

    def copy(self) -> None:
        """Put a copy in its place, which grows on, as rsync does."""
        self._away.write_bytes(self.path.read_bytes())
        self._file.close()
        self._away.rename(self.path)
        self._rename("a")
        self.write()

    def fail(self) -> None:
        """Lose the file for a while."""
        number = self.chance.choice((errno.ESTALE, errno.EIO, errno.EACCES))
        for call in self.chance.sample(("pread", "fstat", "stat", "open"), self.chance.randrange(1, 4)):
            with failing(call, number):
                self.read()
            self.write()
        self.read()

    def faults(self) -> list[str]:
        """Lines that were read twice, changed, in another order or not at all, though nothing was said of it."""
        seen, written = [line for line in self.seen if line], set(self.written)
        found = [f"not as written: {line!r}" for line in seen if line not in written]
        order = [line for line in self.written if line in set(seen)]
        if sum("another file" in text for text in self.said) <= self.num_rotations and seen != order:
            found.append("read twice, or in another order")
        found += [f"lost: {line!r}" for line in self.written if line not in set(seen) | self.lost]
        if self.lost - set(seen) and not any("read from its begin" in text for text in self.said):
            found.append("lost without a word")
        return found


def told(seed: int, folder: Path, num_events: int = 12) -> Story:
    """The history of a seed."""
    chance = random.Random(seed)
    story = Story(chance, folder / f"train{seed}.log")
    story.write()
    story.read()
    events = (story.write, story.write, story.read, story.rotate, story.cut, story.hide, story.copy, story.fail)
    for _ in range(num_events):
        chance.choice(events)()
    story.read_all()
    story._file.close()
    return story
