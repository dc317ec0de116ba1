"""The lines of a log: of one of any size, plain or gzipped, from a file or stdin; and of the end of one that grows.

A log that grows may not be there yet, be renamed and made anew (`logrotate`), be cut to nothing (`copytruncate`), or be
out of reach for a while. Another file of its name, or one shorter than what was read, is read from its begin.
"""

from __future__ import annotations

import gzip
import os
import re
import select
import stat
import sys
import zlib
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BufferedReader
from typing import Protocol, cast

from planner.errors import SpecError
from planner.files import STDOUT as STDIN
from planner.specs.reading import label

BLOCK_BYTES = 2**20
MAX_LINE_BYTES = 2**16
"""Longer lines are cut: the longest that a trainer prints, NeMo's whole configuration, has 12 kB."""
MAX_BYTES = 2**37
"""The most bytes that are read, unpacked: 128 GiB, ten times the longest log known, and the end of a gzip bomb."""
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BREAKS = re.compile(rb"[\r\n]+")
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
_LAUNCHER = re.compile(
    r"\s*(?:"
    r"\[(?:default|rank)(\d+)\]:(?:\[titan\])?\s?"  # torchrun --tee, torchelastic
    r"|\[\d{4}-\d\d-\d\dT[\d:.,]+Z?\]\s"  # container runtimes
    r"|\d{4}-\d\d-\d\dT[\d:.]+Z\s"
    r"|(\d{1,6}):\s"  # srun --label
    r"|\[\d+,(?:mpirank:)?(\d+)(?:,[\w-]{1,80})?\]<std(?:out|err)>:\s?"  # mpirun --tag-output, SageMaker
    r"|\((?:[\w.-]{1,80},?\s)?(?:rank=(\d+),\s)?pid=\d+(?:,\sip=[\d.]+)?\)\s"  # Ray, SkyPilot
    r"|\[pod/[^\]]{1,200}\]\s"  # kubectl logs --prefix
    r"|(?!step|iter|epoch)[\w.-]{1,80}-\d+\s{1,20}\|\s"  # docker compose
    r"|\[rank=(\d+)\]\s\|\|\s(?:[A-Z]+:\s)?"  # Determined
    r"|\[[a-z]\w{0,40}\|(\d+)\]:\s?"  # torchx and monarch
    r"|[\w.-]{1,80}:\s(?=\[\d{4}-|\[INFO\]|\[default|\[rank|\siteration\s)"  # pdsh: the host
    r"|(?:stdout|stderr|std(?:out|err)\sF)\s?[:F]?\s"
    r")"
)


@dataclass(slots=True)
class Tally:
    """The size of what was read, and why not all of it was."""

    num_bytes: int = 0
    num_lines: int = 0
    num_cut: int = 0
    """Lines that were cut."""
    partial: str = ""


@contextmanager
def opened(path: str) -> Iterator[BufferedReader]:
    """The file, unpacked where it is gzipped. Raises SpecError where it cannot be read."""
    where = label(path)
    try:
        file = cast(BufferedReader, sys.stdin.buffer) if path == STDIN else open(path, "rb")  # noqa: SIM115
    except IsADirectoryError:
        raise SpecError(f"{where}: is a directory", f"name the logs in it, such as {where}/*.log") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{where}: cannot be read: {reason}", "check the path") from None
    with file if path != STDIN else nullcontext(file):
        if file.peek(2)[:2] == _GZIP:
            with gzip.open(file) as unpacked:
                yield cast(BufferedReader, unpacked)
        else:
            yield file


def lines(path: str, tally: Tally, advance: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """Each line of a file without its end; `\\r` ends one too, as progress bars have it.

    `advance` is called for each MiB. A file that is cut off, or damaged further on, gives the lines before that, and
    `tally` the reason. Raises SpecError for a file that is missing, empty or binary.
    """
    where = label(path)
    new = NewLines(where, tally)
    with opened(path) as file:
        for block in _blocks(file, tally, where, advance):
            yield from new.of(block)
    yield from new.last()
    if not tally.num_bytes:
        raise SpecError(f"{where}: is empty", "name a log with steps in it")


def _blocks(file: BufferedReader, tally: Tally, where: str, advance: Callable[[], None]) -> Iterator[bytes]:
    while tally.num_bytes < MAX_BYTES:
        try:
            block = file.read1(BLOCK_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            tally.partial = f"cut off or damaged after {tally.num_bytes:,} bytes ({error})"
            if not tally.num_bytes:
                raise SpecError(f"{where}: cannot be read: {error}", "is it a whole .gz file?") from None
            return
        if not block:
            return
        for _ in range(tally.num_bytes // 2**20, (tally.num_bytes + len(block)) // 2**20):
            advance()
        tally.num_bytes += len(block)
        yield block
    tally.partial = f"longer than {MAX_BYTES:,} bytes: the rest was not read"


def is_binary(head: bytes) -> bool:
    """True if every tenth byte or more is one that no text has; NCCL may leave a few in a log."""
    return sum(head.count(byte) for byte in (b"\0", b"\x01", b"\x02", b"\x03", b"\x04")) * 10 > len(head)


def cleaned(line: bytes) -> str:
    """The text of a line without its colours."""
    return (_ANSI.sub(b"", line) if b"\x1b" in line else line).decode(errors="replace")


def without_launcher(text: str) -> tuple[str, int | None]:
    """A text without what launchers put before it, and the rank that they name."""
    rank = None
    for _ in range(4):  # a container's time, then srun's label, then torchrun's
        match = _LAUNCHER.match(text)
        if match is None:
            break
        rank = next((int(group) for group in match.groups() if group), rank)
        text = text[match.end() :]
    return text, rank


class LineSource(Protocol):
    """A place where lines come from."""

    def read(self) -> list[bytes] | None:
        """The whole lines that are new; empty where there are none now, None where there never will be."""


class NewLines:
    """The whole lines of blocks; the last one is held back until its end comes."""

    def __init__(self, where: str, tally: Tally | None = None) -> None:
        self.where, self.rest, self._begun = where, b"", False
        self._tally = tally or Tally()
        self._recode: IncrementalDecoder | None = None
        """The decoder of a file in UTF-16, as shells of Windows write one."""

    def of(self, block: bytes) -> list[bytes]:
        """The lines that this block ends, without their ends and cut to the longest that is read; SpecError where the
        first block is of no text."""
        if block and not self._begun:
            self._begun = True
            if block.startswith(_GZIP):
                raise _packed(self.where)
            if block[:2] in _UTF16:
                self._recode = getincrementaldecoder("utf-16")("replace")
            elif is_binary(block[:4096]):
                raise SpecError(f"{self.where}: is a binary file", "name a text log, a trace or a snapshot")
        if self._recode is not None:
            block = self._recode.decode(block).encode(errors="replace")
        *whole, last = _BREAKS.split(self.rest + block)
        self.rest = last[: MAX_LINE_BYTES + 1]
        return [self._counted(line) for line in whole]

    def _counted(self, line: bytes) -> bytes:
        self._tally.num_lines += 1
        self._tally.num_cut += len(line) > MAX_LINE_BYTES
        return line[:MAX_LINE_BYTES]

    def last(self) -> list[bytes]:
        """The last line of a file that grows no more, where no newline ends it."""
        rest, self.rest = self.rest, b""
        return [self._counted(rest)] if rest else []


class FileEnd:
    """A file that something else writes."""

    def __init__(self, path: str, say: Callable[[str], None] = lambda text: None) -> None:
        if path.endswith(".gz"):
            raise _packed(label(path))
        self.path = path
        self._say = say
        self._said = ""
        self._file: int | None = None
        self._identity = self._offset = 0
        """The number of the open file, and the bytes of it that were read."""
        self._lines = NewLines(label(path))

    def read(self) -> list[bytes]:
        """The whole lines that are new, of at most a block. Raises SpecError for what never was a text file."""
        try:
            block = self._next() or (self._next() if self._opens() else b"")
        except OSError as error:
            self._gone(error)
            return []
        return self._lines.of(block)

    def _next(self) -> bytes:
        """The next bytes of the open file; of one that was cut, the first."""
        if self._file is None:
            return b""
        if os.fstat(self._file).st_size < self._offset:
            self._begin_again("was cut off, and is read from its begin: lines written just before may be lost")
        block = os.pread(self._file, BLOCK_BYTES, self._offset)
        self._offset += len(block)
        self._said = "" if block else self._said
        return block

    def _opens(self) -> bool:
        """True where there is another file of this name, with bytes in it, which is now the open one."""
        found = os.stat(self.path)
        if self._file is not None and (found.st_ino == self._identity or not found.st_size):
            return False  # until the first line of a new file, who writes may still write to the old one
        if not stat.S_ISREG(found.st_mode):
            if self._file is not None:
                return False
            hint = f"name the log in it, such as {label(self.path)}/train.log"
            if not stat.S_ISDIR(found.st_mode):
                hint = "pipe it into plan observe --follow -"
            raise SpecError(f"{label(self.path)}: is no regular file", hint)
        file = os.open(self.path, os.O_RDONLY)
        if self._file is not None:
            half = "; half a line before that is left out" if self._lines.rest else ""
            self._begin_again(f"is another file now, which is read from its begin{half}")
            os.close(self._file)
        self._file = file
        self._identity = found.st_ino
        return True

    def _begin_again(self, says: str) -> None:
        """Take what comes as another log's; half a line of the one before is no number to trust."""
        self._offset, self._lines = 0, NewLines(label(self.path))
        self._say(f"{label(self.path)}: {says}")

    def _gone(self, error: OSError) -> None:
        """Say once that the file is waited for. Raises SpecError where it never was one."""
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if self._file is None and not missing:
            raise SpecError(f"{label(self.path)}: cannot be read: {error.strerror}", "check the path") from None
        says = "is not there" if missing else f"cannot be read now ({error.strerror})"
        if says != self._said:
            self._say(f"{label(self.path)}: {says}: waiting for it")
        self._said = says


class StdinEnd:
    """Standard input, until its writer closes it."""

    def __init__(self) -> None:
        self._file = sys.stdin.buffer.fileno()
        self._ended = False
        self._lines = NewLines("stdin")

    def read(self) -> list[bytes] | None:
        """The whole lines that are new, without waiting for more; None at the end."""
        if self._ended:
            return None
        if not select.select([self._file], [], [], 0)[0]:
            return []
        block = os.read(self._file, BLOCK_BYTES)
        self._ended = not block
        return self._lines.of(block) if block else self._lines.last()


def source_of(path: str, say: Callable[[str], None] = lambda text: None) -> LineSource:
    """The end of a file, or of standard input. `say` takes what a user should know of it."""
    return StdinEnd() if path == STDIN else FileEnd(path, say)


def _packed(where: str) -> SpecError:
    return SpecError(
        f"{where}: is packed, and a packed file does not grow by lines", "unpack it, or leave --follow out"
    )
