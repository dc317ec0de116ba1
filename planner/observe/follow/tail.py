"""The end of a file that grows: whole lines as they come, wherever the file goes, asked for again and again.

A file may not be there yet, be renamed and made anew (`logrotate`), be cut to nothing (`copytruncate`), or vanish and
come back. Of a file that was cut and outgrew its old size before it is asked again, the lines between are lost.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from planner.errors import SpecError
from planner.observe.lines import BLOCK_BYTES, MAX_LINE_BYTES, is_binary, split
from planner.specs.reading import STDIN, label

_GZIP = b"\x1f\x8b"


class Source(Protocol):
    """A place where lines come from."""

    def read(self) -> list[bytes] | None:
        """The whole lines that are new; empty where there are none now, None where there never will be."""


class Lines:
    """The whole lines of blocks; the last one is held back until its end comes."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, block: bytes) -> list[bytes]:
        """The lines that this block ends, without their ends and cut to the longest that is read."""
        first, *others = split(block)
        self._rest = (self._rest + first)[: MAX_LINE_BYTES + 1]
        if not others:
            return []
        *whole, last = [self._rest, *others]
        self._rest = last[: MAX_LINE_BYTES + 1]
        return [line[:MAX_LINE_BYTES] for line in whole]

    def last(self) -> list[bytes]:
        """The line without an end, where nothing can follow it."""
        rest, self._rest = self._rest, b""
        return [rest[:MAX_LINE_BYTES]] if rest else []


class FileEnd:
    """A file that something else writes."""

    def __init__(self, path: str, say: Callable[[str], None] = lambda text: None) -> None:
        if path.endswith(".gz"):
            raise _packed(label(path))
        self.path, self._say = path, say
        self._file: int | None = None
        self._identity: tuple[int, int] = (0, 0)
        self._offset = 0
        self._missed = False
        self._lines = Lines()

    def read(self) -> list[bytes]:
        """The whole lines that are new, of at most a block. Raises SpecError for what is no text file."""
        if self._file is None and not self._open():
            return []
        assert self._file is not None
        try:
            if os.fstat(self._file).st_size < self._offset:  # cut off: what is there now is new
                self._offset, self._lines = 0, Lines()
                self._say(f"{label(self.path)}: was cut off, and is read from its begin")
            block = os.pread(self._file, BLOCK_BYTES, self._offset)
        except OSError:  # a network's file system has lost it
            block = b""
        if block:
            self._check(block)
            self._offset += len(block)
        elif self._replaced():
            self._close()
        return self._lines.of(block) if block else []

    def _open(self) -> bool:
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                hint = f"name the log in it, such as {label(self.path)}/train.log"
                if not os.path.isdir(self.path):
                    hint = "pipe it into plan observe --follow -"
                raise SpecError(f"{label(self.path)}: is no regular file", hint)
            self._file = os.open(self.path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            if not self._missed:
                self._say(f"{label(self.path)}: is not there: waiting for it")
            self._missed = True
            return False
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(f"{label(self.path)}: cannot be read: {reason}", "check the path") from None
        found = os.fstat(self._file)
        self._identity, self._offset, self._missed = (found.st_dev, found.st_ino), 0, False
        self._lines = Lines()  # half a line of the file before is no number to trust
        return True

    def _replaced(self) -> bool:
        """True where the name is another file's now, or nobody's."""
        try:
            found = os.stat(self.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._identity

    def _check(self, block: bytes) -> None:
        if self._offset == 0 and block.startswith(_GZIP):
            raise _packed(label(self.path))
        if self._offset == 0 and is_binary(block[:4096]):
            raise SpecError(f"{label(self.path)}: is a binary file", "name a text log")

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


class StdinEnd:
    """Standard input, until its writer closes it."""

    def __init__(self) -> None:
        self._file = sys.stdin.buffer.fileno()
        self._begun = self._ended = False
        self._lines = Lines()

    def read(self) -> list[bytes] | None:
        """The whole lines that are new, without waiting for more; None at the end."""
        if self._ended:
            return None
        if not select.select([self._file], [], [], 0)[0]:
            return []
        block = os.read(self._file, BLOCK_BYTES)
        if block and not self._begun:
            self._begun = True
            if block.startswith(_GZIP):
                raise _packed("stdin")
            if is_binary(block[:4096]):
                raise SpecError("stdin: is binary", "pipe a text log")
        self._ended = not block
        return self._lines.of(block) if block else self._lines.last()


def source_of(path: str, say: Callable[[str], None] = lambda text: None) -> Source:
    """The end of a file, or of standard input. `say` takes what a user should know of it."""
    return StdinEnd() if path == STDIN else FileEnd(path, say)


def _packed(where: str) -> SpecError:
    return SpecError(f"{where}: is packed, and a packed file does not grow by lines", "plan observe without --follow")
