"""The lines of a log of any size: plain or gzipped, from a file or stdin, one at a time, none longer than a limit."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BufferedReader
from typing import cast

from planner.errors import SpecError
from planner.files import STDOUT as STDIN
from planner.specs.reading import label

BLOCK_BYTES = 2**20
MAX_LINE_BYTES = 2**16
"""Longer lines are cut: the longest that a trainer prints, NeMo's whole configuration, has 12 kB."""
MAX_BYTES = 2**37
"""The most bytes that are read, unpacked: 128 GiB, ten times the longest log known, and the end of a gzip bomb."""
_GZIP = b"\x1f\x8b"
_BREAKS = re.compile(rb"[\r\n]+")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
_LAUNCHER = re.compile(
    r"\s*(?:"
    r"\[(?:default|rank)(\d+)\]:(?:\[titan\])?\s?"  # torchrun --tee, torchelastic
    r"|\[\d{4}-\d\d-\d\dT[\d:.,]+Z?\]\s(?=\S)"  # container runtimes
    r"|\d{4}-\d\d-\d\dT[\d:.]+Z\s(?=\S)"
    r"|(\d{1,6}):\s"  # srun --label
    r"|\[\d+,(\d+)\]<std(?:out|err)>:\s?"  # mpirun --tag-output
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
    where, rest = label(path), b""
    with opened(path) as file:
        for block in _blocks(file, tally, where, advance):
            first, *others = split(block)
            rest = (rest + first)[: MAX_LINE_BYTES + 1]
            for part in others:
                yield _counted(rest, tally)
                rest = part[: MAX_LINE_BYTES + 1]
    if rest:
        yield _counted(rest, tally)
    if not tally.num_bytes:
        raise SpecError(f"{where}: is empty", "name a log with steps in it")


def split(block: bytes) -> list[bytes]:
    """The parts of a block between the ends of lines: the first ends a line, the last begins one."""
    return _BREAKS.split(block)


def _counted(line: bytes, tally: Tally) -> bytes:
    tally.num_lines += 1
    tally.num_cut += len(line) > MAX_LINE_BYTES
    return line[:MAX_LINE_BYTES]


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
        if not tally.num_bytes and is_binary(block[:4096]):
            raise SpecError(f"{where}: is a binary file", "name a text log, a trace or a snapshot")
        for _ in range(tally.num_bytes // 2**20, (tally.num_bytes + len(block)) // 2**20):
            advance()
        tally.num_bytes += len(block)
        yield block
    tally.partial = f"longer than {MAX_BYTES:,} bytes: the rest was not read"


def is_binary(head: bytes) -> bool:
    """True if every tenth byte or more is one that no text has; NCCL may leave a few in a log."""
    return sum(head.count(byte) for byte in (b"\0", b"\x01", b"\x02", b"\x03", b"\x04")) * 10 > len(head)


def cleaned(line: bytes) -> tuple[str, int | None]:
    """The text of a line without colours and what launchers put before it, and the rank that they name."""
    text = line.decode(errors="replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    rank = None
    for _ in range(4):  # a container's time, then srun's label, then torchrun's
        match = _LAUNCHER.match(text)
        if match is None:
            break
        rank = next((int(group) for group in match.groups() if group), rank)
        text = text[match.end() :]
    return text, rank
