"""Many jobs at a time: as many processes as there are processors, or none where there are few jobs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Each(Protocol):
    """Calls a function of a module on every argument, and gives the results in order."""

    def __call__(self, function: Callable[[A], R], arguments: Iterable[A]) -> list[R]: ...


@contextmanager
def processes(num_jobs: int, fewest: int, preload: str, advance: Callable[[], None] = lambda: None) -> Iterator[Each]:
    """Something that calls a function in several processes, which have `preload` imported, or here for `fewest` jobs.

    `advance` is called after each of them.
    """

    def done(result: Any) -> Any:
        advance()
        return result

    num_processes = min(num_jobs, os.cpu_count() or 1)
    if num_jobs < fewest or num_processes < 2:
        yield lambda function, arguments: [done(function(argument)) for argument in arguments]
        return
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
    if os.name != "nt":
        context.set_forkserver_preload([preload])
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield lambda function, arguments: [done(result) for result in pool.map(function, arguments)]
