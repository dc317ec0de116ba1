"""Long searches side by side, in as many processes as there are processors."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

WORTH_PROCESSES_S = 3.0
"""Seconds of all searches together below which they run one after another: a process needs half a second to start."""


def side_by_side(
    search: Callable[[A], R], asked: Sequence[A], search_s: float, tick: Callable[[], None] = lambda: None
) -> list[R]:
    """The result of each search, in order, where one takes about `search_s` seconds; `tick` is called after each.

    They run one after another where they are short or no processors are free. So do those that are left where the
    system allows no processes, or kills one.
    """
    num_workers, results = min(len(asked), num_processors()), list[R]()
    if num_workers > 1 and search_s * len(asked) >= WORTH_PROCESSES_S:
        with suppress(OSError, BrokenProcessPool):  # OSError where a sandbox allows no semaphores
            for result in _in_processes(search, asked, num_workers):
                results.append(result)
                tick()
    for one in asked[len(results) :]:
        results.append(search(one))
        tick()
    return results


def _in_processes(search: Callable[[A], R], asked: Sequence[A], num_workers: int) -> Iterator[R]:
    others = set(multiprocessing.active_children())
    # spawned, since whoever shows that this is waited for has threads; Ctrl-C is the parent's, which ends them all
    context = multiprocessing.get_context("spawn")
    ignored = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(num_workers, context, initializer=signal.signal, initargs=ignored) as pool:
        try:
            yield from pool.map(search, asked)
        except BaseException:  # Ctrl-C, or nobody asks for the next result: do not wait for searches under way
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def num_processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
