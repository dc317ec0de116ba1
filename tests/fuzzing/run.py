"""Gives mutants to a reader in a process of its own, which has so much time and memory for each."""

from __future__ import annotations

import io
import logging
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzzing.made import Seeds
from fuzzing.mutate import mutant
from fuzzing.readers import READERS, Reader
from planner.errors import MAX_LINE, PlannerError

SECONDS, MIB = 2.0, 300
"""The most of the processor's time and of memory that one file may take."""
KILLED_S = 10
"""Seconds of the processor's after which the system ends a process that no signal reaches, as in one long product."""
MAX_MESSAGE = MAX_LINE + len("error: ")
"""The most characters of a line of stderr."""
MEMORY = Path("/dev/shm")
"""Files that are written ten thousand times a minute lie in memory: a disk takes milliseconds for each."""
_ECHO = re.compile(r"(.)\1{200}")
"""More than 200 letters of what a user wrote: mutants hold thousands of one letter."""


@dataclass(frozen=True)
class Escape:
    """A mutant that ended in something else than an answer or a PlannerError."""

    reader: str
    seed: int
    problem: str
    name: str
    data: bytes


class _TooSlow(BaseException):
    pass


class _Notes(logging.Handler):
    """Formats what is logged, as the command line does."""

    def emit(self, record: logging.LogRecord) -> None:
        if len(text := record.getMessage()) > MAX_MESSAGE or _ECHO.search(text):
            raise AssertionError(f"note of {len(text)} characters: {text[:100]!r}")


def fuzz(name: str, first: int, last: int) -> list[Escape]:
    """What escapes of the mutants of the seeds `first` to `last` - 1, in a process of its own.

    A process that dies leaves the seed that it died of, and another goes on behind it.
    """
    escapes: list[Escape] = []
    READERS[name].seeds()  # what they are made of is made once, and not in each process
    while first < last:
        ours, its = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=_fuzzed, args=(name, first, last, its))
        process.start()
        its.close()
        at = first - 1
        with suppress(EOFError):
            while True:
                at, escape = ours.recv()
                if escape is not None:
                    escapes.append(escape)
        process.join()
        first = at + 1
        if process.exitcode and first < last:
            seed_name, data = mutant_of(name, READERS[name].seeds(), first)
            escapes.append(Escape(name, first, f"process ended with {process.exitcode}", seed_name, data))
            first += 1
        elif not process.exitcode:
            break
    return escapes


def mutant_of(name: str, seeds: Seeds, seed: int) -> tuple[str, bytes]:
    """The mutant that a seed stands for, and the name of the file that it was made of."""
    return mutant(seeds, READERS[name].grammar, random.Random(f"{name} {seed}"))


def _fuzzed(name: str, first: int, last: int, news: Connection) -> None:
    reader = READERS[name]
    seeds = reader.seeds()
    with limited(reader, seeds) as judge:
        for seed in range(first, last):
            seed_name, data = mutant_of(name, seeds, seed)
            problem = judge(seed_name, data)
            if problem or seed % 50 == 0 or seed == last - 1:
                news.send((seed, Escape(name, seed, problem, seed_name, data) if problem else None))


class Judge:
    """Gives files to a reader, and says what is wrong with how it ended."""

    def __init__(self, reader: Reader, seeds: Seeds, folder: Path) -> None:
        self._reader, self._seeds, self._folder = reader, seeds, folder

    def __call__(self, name: str, data: bytes) -> str:
        """What escaped; empty where nothing did."""
        path = self._folder / name
        if self._reader.suffix is not None:
            path = self._folder / f"file{self._reader.suffix}"
        path.write_bytes(data)
        try:
            return _problem(self._reader, path)
        finally:
            os.chdir(self._folder)
            if self._reader.folder:
                path.write_bytes(self._seeds[name])


@contextmanager
def limited(reader: Reader, seeds: Seeds) -> Iterator[Judge]:
    """A judge in this process, which from now on has the limits of all mutants."""
    signal.signal(signal.SIGPROF, _rings)
    warnings.simplefilter("error")
    logging.basicConfig(handlers=[_Notes()], level=logging.INFO, force=True)
    logging.basicConfig = lambda **_: None  # type: ignore[assignment]
    os.environ["PLANNER_HISTORY"] = os.devnull
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        judge = Judge(reader, seeds, Path(folder))
        for name, data in seeds.items():
            (Path(folder) / name).write_bytes(data)
        for name, data in seeds.items():  # what is loaded once is loaded before memory is counted
            judge(name, data)
        limit = _statm(0) + 4 * MIB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        yield judge


def _rings(*_: Any) -> None:
    raise _TooSlow(f"took more than {SECONDS} s")


def _problem(reader: Reader, path: Path) -> str:
    """A description of what escaped; empty where nothing did."""
    out, before = io.StringIO(), _statm(1)
    _forget_peak()
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + KILLED_S, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with _no_input(), redirect_stderr(io.StringIO()), redirect_stdout(out):
            reader.read(path)
    except PlannerError as error:
        if problem := _of_message(error):
            return problem
    except BaseException as error:
        return _of_exception(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if strange := next((text for text in out.getvalue() if not text.isprintable() and text != "\n"), None):
        return f"prints {strange!r}"
    grown = _peak_bytes() - before
    return f"took {grown / 2**20:.0f} MiB" if grown > MIB * 2**20 else ""


def _of_message(error: PlannerError) -> str:
    text = error.lines()
    if max(map(len, text.splitlines())) > MAX_MESSAGE or _ECHO.search(text):
        return f"message of {len(text)} characters: {text[:200]!r}"
    if not error.message.strip() or error.message.startswith("internal"):
        return f"message {error.message[:200]!r}"
    strange = next((letter for letter in text if not letter.isprintable() and letter != "\n"), None)
    return "" if strange is None else f"message with {strange!r}"


def _of_exception(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}planner{os.sep}" in frame.filename]
    spot = (
        f"{own[-1].filename.split('/planner/')[-1]}:{own[-1].lineno}"
        if own
        else f"{frames[-1].filename}:{frames[-1].lineno}"
    )
    return f"{type(error).__name__} in {spot}: {str(error)[:160]}"


@contextmanager
def _no_input() -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO())
    try:
        yield
    finally:
        sys.stdin = before


def _statm(column: int) -> int:
    """Bytes of this process: 0 for its addresses, 1 for what is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


def _forget_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The most that was in memory since `_forget_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
