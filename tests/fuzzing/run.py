"""Gives mutants to a reader in a process of its own, which has so much time and memory for each."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import resource
import signal
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fuzzing.mutate import mutant
from fuzzing.readers import READERS, Reader
from planner.errors import PlannerError

SECONDS, MIB = 2.0, 300
"""The most that one file may take."""
MAX_MESSAGE = 2000
"""The most characters of an error's message and hint."""


@dataclass(frozen=True)
class Escape:
    """A mutant that ended in something else than an answer or a PlannerError."""

    reader: str
    seed: int
    problem: str
    data: bytes


class _TooSlow(Exception):
    pass


def _rings(*_: Any) -> None:
    raise _TooSlow(f"took more than {SECONDS} s")


def fuzz(name: str, first: int, last: int) -> list[Escape]:
    """What escapes of the mutants of the seeds `first` to `last` - 1, in a process of its own."""
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(_fuzzed, (name, first, last))


def _fuzzed(name: str, first: int, last: int) -> list[Escape]:
    reader = READERS[name]
    seeds = reader.seeds()
    signal.signal(signal.SIGALRM, _rings)
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)
    escapes = []
    with tempfile.TemporaryDirectory() as folder:
        for data in seeds:  # what is loaded once is loaded before memory is counted
            with contextlib.suppress(PlannerError):
                reader.read(_file(reader, data, folder))
        base = _resident_bytes()
        limit = base + _virtual_bytes() + MIB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for seed in range(first, last):
            data = mutant(seeds, random.Random(f"{name} {seed}"))
            if problem := _problem(reader, _file(reader, data, folder)):
                escapes.append(Escape(name, seed, problem, data))
    return escapes


def _file(reader: Reader, data: bytes, folder: str) -> Path:
    path = Path(folder) / f"file{reader.suffix}"
    path.write_bytes(data)
    return path


def _problem(reader: Reader, path: Path) -> str:
    """A description of what escaped; empty where nothing did."""
    before = _resident_bytes()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            reader.read(path)
    except PlannerError as error:
        text = error.lines()
        if len(text) > MAX_MESSAGE:
            return f"message of {len(text)} characters: {text[:200]!r}"
        if not error.message:
            return "empty message"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if f"{os.sep}planner{os.sep}" in frame.filename]
        spot = f"{own[-1].filename.split('/planner/')[-1]}:{own[-1].lineno}" if own else "?"
        return f"{type(error).__name__} in {spot}: {str(error)[:160]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = _resident_bytes() - before
    return f"took {grown / 2**20:.0f} MiB" if grown > MIB * 2**20 else ""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
