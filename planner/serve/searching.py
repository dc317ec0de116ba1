"""The searches of one question, each in a process of its own: a quick one for a first answer, and the whole one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from planner.answer import Plan
from planner.errors import Infeasible, PlannerError, SolverError, defect
from planner.search.case import Case
from planner.search.recipes import pinned
from planner.search.search import plan, search_within_risk

FIRST_S = (1.0, 3.0, 9.0)
"""Seconds after which the quick search ends with what it has; on a busy machine it may need more to have anything."""
FIRST_GAP = 0.05
"""Gap at which the quick search is content."""
MOST_BYTES = 6 << 30
"""Address space of a search at most, so that no question fills the machine's memory."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something that a search found."""

    answer: Plan | PlannerError
    is_final: bool
    """False for the quick search's answer, after which a better one comes."""


def whole(case: Case) -> Plan:
    """The answer of the command line."""
    return plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)


def first(case: Case) -> Plan:
    """A layout that fits, among few: the trainer's own switches, small micro-batches, whole layers recomputed or none.

    A narrower search needs a fraction of the seconds, and its certificate holds for what it looked at.
    """
    limits: dict[str, Any] = {"top": 1, "gap_fraction": FIRST_GAP}
    if case.limits.switches is None and not case.limits.allow:
        limits["switches"] = "default"
    if case.limits.micro_batch_size is None:
        limits["micro_batch_size"] = tuple(n for n in (1, 2) if case.training.global_batch_size % n == 0)
    if case.limits.recompute is None and case.model.moe is not None:
        limits["recompute"] = ("none", "full") if case.runtime.recomputes_layers else ("none",)
    for limit_s in FIRST_S[:-1]:
        with contextlib.suppress(SolverError):
            return _searched(case, limits, limit_s)
    return _searched(case, limits, FIRST_S[-1])


def _searched(case: Case, limits: dict[str, Any], limit_s: float) -> Plan:
    return search_within_risk(pinned(case.limited(**limits, time_limit_s=limit_s)))


def looked_at(case: Case) -> str:
    """The layouts that `first` looks at, in words."""
    words = []
    if case.limits.switches is None and not case.limits.allow:
        words.append("the trainer's own switches")
    if case.limits.micro_batch_size is None:
        words.append("micro-batches of 1 or 2")
    if case.limits.recompute is None and case.model.moe is not None:
        words.append("layers recomputed whole or not at all")
    return ", ".join(words) or "the same choices"


def context() -> BaseContext:
    """The way to start processes: forked from one that has imported the planner, where the system can fork."""
    if os.name == "nt":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__])
    return made


def start(search: Callable[[Case], Plan], case: Case, is_final: bool) -> tuple[BaseProcess, Connection]:
    """A process that searches, and the end of a pipe on which it sends what it `Found`."""
    ours, theirs = context().Pipe(duplex=False)
    process: BaseProcess = context().Process(target=_run, args=(search, case, is_final, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return process, ours


def _run(search: Callable[[Case], Plan], case: Case, is_final: bool, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its searches itself
    _limit_memory()
    answer: Plan | PlannerError
    try:
        answer = search(case)
    except PlannerError as error:
        answer = _plain(error)
    except MemoryError:
        answer = PlannerError("the search needs more memory than the page gives one", "pin an axis, or use plan itself")
    except Exception as error:  # the outermost frame of this process
        answer = defect(error)
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.send(Found(answer, is_final))


def _plain(error: PlannerError) -> PlannerError:
    """The error as one of the classes that travel between processes."""
    if isinstance(error, Infeasible):
        return Infeasible(error.message, error.hint, error.rejections, nearest=error.nearest, remedy=error.remedy)
    return error


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES if most < 0 else min(MOST_BYTES, most), most))


def warm() -> None:
    """Start the process that searches are forked from, so that the first question does not wait for its imports."""
    process: BaseProcess = context().Process(target=_nothing, daemon=True)  # type: ignore[attr-defined]
    process.start()


def _nothing() -> None:
    """Do nothing: the process only makes others start fast."""
