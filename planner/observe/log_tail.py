"""The end of a file that grows: whole lines as they come, wherever the file goes, asked for again and again.

A file may not be there yet, be renamed and made anew (`logrotate`), be cut to nothing (`copytruncate`), vanish and come
back, be replaced by a longer copy of itself (`rsync`), or be out of reach for a while. The last bytes that were read
are kept: where they still stand before the next ones it is the same log, and else another, which is read from its
begin. What may be lost is said; of two logs that take its place between two looks, the first is not seen.
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
_HEAD_BYTES = 4096
KNOWN_BYTES = 512
"""Bytes before the next ones by which a log is known again: a line of a step with its time, in every trainer's log."""
_LEAST_KNOWN_BYTES = 128
"""Fewer say nothing of another file, unless they are all that was read: then nothing else is known of it anyway."""
Identity = tuple[int, int]
"""A file's device and number."""


class LineSource(Protocol):
    """A place where lines come from."""

    def read(self) -> list[bytes] | None:
        """The whole lines that are new; empty where there are none now, None where there never will be."""


class Lines:
    """The whole lines of blocks; the last one is held back until its end comes."""

    def __init__(self) -> None:
        self._rest = b""
        self.num_cut = 0
        """Lines that were longer than is read."""

    def of(self, block: bytes) -> list[bytes]:
        """The lines that this block ends, without their ends and cut to the longest that is read."""
        first, *others = split(block)
        self._rest = (self._rest + first)[: MAX_LINE_BYTES + 1]
        if not others:
            return []
        *whole, last = [self._rest, *others]
        self._rest = last[: MAX_LINE_BYTES + 1]
        return [self._cut(line) for line in whole]

    def last(self) -> list[bytes]:
        """The line without an end, where nothing can follow it."""
        rest, self._rest = self._rest, b""
        return [self._cut(rest)] if rest else []

    @property
    def has_half(self) -> bool:
        """True where a line has begun and not ended."""
        return bool(self._rest)

    def _cut(self, line: bytes) -> bytes:
        self.num_cut += len(line) > MAX_LINE_BYTES
        return line[:MAX_LINE_BYTES]


class FileEnd:
    """A file that something else writes."""

    def __init__(self, path: str, say: Callable[[str], None] = lambda text: None) -> None:
        if path.endswith(".gz"):
            raise _packed(label(path))
        self.path, self._say = path, say
        self._file: int | None = None
        self._identity: Identity = (0, 0)
        self._offset = 0
        self._known = b""
        """The bytes before the offset; none at the begin, where a log that was cut may go on behind zeros."""
        self._said = ""
        self._lines = Lines()

    def read(self) -> list[bytes]:
        """The whole lines that are new, of at most a block. Raises SpecError for what never was a text file."""
        if self._file is None and not self._open():
            return []
        block = self._block()
        if not block and self._moves():
            block = self._block()
        return self._whole(block) if block else []

    def _block(self) -> bytes:
        """The next bytes; none where there are none, where they cannot be had, or where they are to be had anew."""
        assert self._file is not None
        try:
            block = self._next(self._file)
            while not self._known and block and not block.strip(b"\0"):
                self._offset += len(block)
                block = self._next(self._file)
        except OSError as error:  # a network's file system has lost it: ask for it by its name again
            self._tell(f"cannot be read now ({error.strerror}): waiting for it")
            self._close()
            return b""
        return block

    def _next(self, file: int) -> bytes:
        if not self._known:
            self._offset = _data_from(file, self._offset if os.fstat(file).st_size >= self._offset else 0)
        data = os.pread(file, len(self._known) + BLOCK_BYTES, self._offset - len(self._known))
        if data.startswith(self._known):
            return data[len(self._known) :]
        self._begin_again("was cut off, and is read from its begin: lines written just before may be lost")
        return self._next(file)

    def _whole(self, block: bytes) -> list[bytes]:
        """The lines that a block ends."""
        num_cut = self._lines.num_cut
        self._offset += len(block)
        if not self._known:
            block = block.lstrip(b"\0")
            self._check(block)
        self._known, self._said = (self._known + block)[-KNOWN_BYTES:], ""
        lines = self._lines.of(block)
        if self._lines.num_cut > num_cut == 0:
            self._say(f"{label(self.path)}: its lines are read up to {MAX_LINE_BYTES:,} bytes, and one is longer")
        return lines

    def _check(self, block: bytes) -> None:
        if block.startswith(_GZIP):
            raise _packed(label(self.path))
        if is_binary(block[:_HEAD_BYTES]):
            raise SpecError(f"{label(self.path)}: is a binary file", "name a text log")

    def _moves(self) -> bool:
        """True where there may be more: in another file of this name, or in this one, which was ended just now."""
        if self._file is None:
            return self._open()
        try:
            found = os.stat(self.path)
        except OSError as error:  # whoever writes it may go on under another name: it stays open
            self._gone(error)
            return False
        if (found.st_dev, found.st_ino) == self._identity or (stat.S_ISREG(found.st_mode) and not found.st_size):
            return False  # a new file without a line: until its first one, who writes may still write to the old one
        if self._ends_later():
            return True
        return self._open()

    def _ends_later(self) -> bool:
        """True where bytes came to the open file after it was asked, and before its name was another's."""
        assert self._file is not None
        with suppress(OSError):
            return os.fstat(self._file).st_size > self._offset
        return False

    def _open(self) -> bool:
        """Open the file of this name; false where it is to be waited for. Raises SpecError if it never was a log."""
        try:
            # a pipe without a writer would block for ever
            file = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except (OSError, ValueError) as error:
            self._gone(error)
            return False
        try:
            identity, begin = self._regular(file), _data_from(file, 0)
            is_same = self._is_known(file, identity)
            if not is_same:
                head = os.pread(file, _HEAD_BYTES, begin)
                self._check(head.lstrip(b"\0") if begin or any(self._identity) else head)
        except (OSError, SpecError) as error:
            os.close(file)
            self._gone(error)
            return False
        self._close()
        self._file, self._identity = file, identity
        if not is_same:
            half = "; half a line before that is left out" if self._lines.has_half else ""
            self._begin_again(f"is another file now, which is read from its begin{half}" if self._offset else "")
        return True

    def _regular(self, file: int) -> Identity:
        """The identity of an open file. Raises SpecError where it is a folder, a pipe or a device."""
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            hint = f"name the log in it, such as {label(self.path)}/train.log"
            if not stat.S_ISDIR(found.st_mode):
                hint = "pipe it into plan observe --follow -"
            raise SpecError(f"{label(self.path)}: is no regular file", hint)
        return found.st_dev, found.st_ino

    def _is_known(self, file: int, identity: Identity) -> bool:
        """True where what was read before stands in this file too: it is the same one again, or a copy of it."""
        known = self._known
        is_enough = len(known) >= min(self._offset, _LEAST_KNOWN_BYTES) or identity == self._identity
        if not known or not is_enough:
            return False
        return os.pread(file, len(known), self._offset - len(known)) == known

    def _begin_again(self, says: str) -> None:
        """Take what comes as another log's; half a line of the one before is no number to trust."""
        self._offset, self._known, self._lines = 0, b"", Lines()
        if says:
            self._say(f"{label(self.path)}: {says}")

    def _gone(self, error: OSError | ValueError | SpecError) -> None:
        """Say that the file is to be waited for. Raises SpecError where it never was one."""
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            self._tell("is not there: waiting for it")
        elif any(self._identity):  # it was there before, and whoever took it away may bring it back
            reason = getattr(error, "strerror", None) or str(error).rpartition(": ")[2]
            self._tell(f"cannot be read now ({reason}): waiting for it")
        elif isinstance(error, SpecError):
            raise error
        else:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(f"{label(self.path)}: cannot be read: {reason}", "check the path") from None

    def _tell(self, says: str) -> None:
        """Say something that stays so, once."""
        if says != self._said:
            self._say(f"{label(self.path)}: {says}")
        self._said = says

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
            if is_binary(block[:_HEAD_BYTES]):
                raise SpecError("stdin: is binary", "pipe a text log")
        self._ended = not block
        return self._lines.of(block) if block else self._lines.last()


def source_of(path: str, say: Callable[[str], None] = lambda text: None) -> LineSource:
    """The end of a file, or of standard input. `say` takes what a user should know of it."""
    return StdinEnd() if path == STDIN else FileEnd(path, say)


def _data_from(file: int, offset: int) -> int:
    """The first byte from there on that is in no hole, as far as the file's system says it."""
    with suppress(OSError, AttributeError):
        return max(offset, os.lseek(file, offset, os.SEEK_DATA))
    return offset


def _packed(where: str) -> SpecError:
    return SpecError(f"{where}: is packed, and a packed file does not grow by lines", "plan observe without --follow")
