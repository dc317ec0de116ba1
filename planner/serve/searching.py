"""The searches of one question, each in a process of its own: a quick one for a first answer, and the whole one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from planner.answer import Plan
from planner.errors import Infeasible, PlannerError, defect
from planner.search.case import Case
from planner.search.layouts import Standing, some_layout
from planner.search.recipes import pinned
from planner.search.search import plan

EVERY_S = 0.5
"""Seconds between two answers of a search that goes on, at least: to price one takes a tenth of them."""
MOST_BYTES = 6 << 30
"""Address space of a search at most, so that no question fills the machine's memory."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something that a search found."""

    answer: Plan | PlannerError
    is_final: bool
    """False for an answer after which a better one may come."""
    of_all: bool = True
    """True where its gap is to the best of all layouts, false where to the best of those that `first` looks at."""

    def after(self, before: Found | None) -> Found:
        """This, unless it is not final and what was found before is faster: then that, with the gap known now."""
        if before is None or self.is_final or not isinstance(self.answer, Plan) or not isinstance(before.answer, Plan):
            return self
        if self.answer.step.step_s <= before.answer.step.step_s and (self.of_all or not before.of_all):
            return self
        faster = min(self.answer, before.answer, key=lambda plan: plan.step.step_s)
        known = self if self.of_all else before
        assert isinstance(known.answer, Plan)
        assert known.answer.search is not None
        bound_s = min(known.answer.search.lower_bound_s, faster.step.step_s)
        update = {"lower_bound_s": bound_s, "gap": faster.step.step_s / bound_s - 1}
        search = known.answer.search.model_copy(update=update)
        return Found(faster.model_copy(update={"search": search}), False, known.of_all)


Tell = Callable[[Plan], None]
"""Something that is told answers which are not final."""
Search = Callable[[Case, Tell], Plan]


def whole(case: Case, tell: Tell) -> Plan:
    """The answer of the command line; the best so far is told while it is searched."""
    told_s = -EVERY_S

    def news(standing: Standing) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= EVERY_S:
            tell(standing.plan())
            told_s = time.monotonic()

    return plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime, news=news)


def first(case: Case, tell: Tell) -> Plan:
    """The plan of the first layout that is found to fit, among few; its gap is to the best of these."""
    return some_layout(pinned(case))


def context() -> BaseContext:
    """The way to start processes: forked from one that has imported the planner, where the system can fork."""
    if os.name == "nt":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__])
    return made


def start(search: Search, case: Case) -> tuple[BaseProcess, Connection]:
    """A process that searches, and the end of a pipe on which it sends what it `Found`, the last being its result."""
    ours, theirs = context().Pipe(duplex=False)
    process: BaseProcess = context().Process(target=_run, args=(search, case, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return process, ours


def _run(search: Search, case: Case, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its searches itself
    _limit_memory()
    of_all = search is whole

    def send(answer: Plan | PlannerError, is_final: bool = False) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            connection.send(Found(answer, is_final, of_all))

    try:
        send(search(case, send), is_final=of_all)
    except PlannerError as error:
        send(_plain(error), is_final=of_all)
    except MemoryError:
        send(PlannerError("the search needs more memory than the page gives one", "pin an axis, or use plan"), of_all)
    except Exception as error:  # the outermost frame of this process
        send(defect(error), is_final=of_all)


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
