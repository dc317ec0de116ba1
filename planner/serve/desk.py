"""The searches of one question, each in a process of its own: a quick one for a first answer, and the whole one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import os
import signal
import time
import zipfile
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from planner.answer import Plan
from planner.errors import Infeasible, PlannerError, SolverError, SpecError, defect
from planner.layout.price import with_microbatches
from planner.plan_file import with_alternative
from planner.search.case import Case
from planner.search.layouts import Standing
from planner.search.search import planned
from planner.serve.controls import Form, Question
from planner.specs.units import is_count

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


Tell = Callable[[Plan], None]
"""A listener for answers that are not final."""


def whole(case: Case, tell: Tell) -> Plan:
    """The answer of the command line; `tell` gets the best layout so far while the search runs."""
    begun_s, told_s = time.monotonic(), -EVERY_S

    def news(standing: Standing) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= EVERY_S:
            so_far = standing.plan()
            assert so_far.search is not None
            search = so_far.search.model_copy(update={"seconds": time.monotonic() - begun_s})
            tell(so_far.model_copy(update={"search": search}))
            told_s = time.monotonic()

    return planned(case, news)


def context() -> BaseContext:
    """The way to start processes: forked from one that has imported the planner, where the system can fork."""
    if os.name == "nt":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__])
    return made


def start(case: Case) -> tuple[BaseProcess, Connection]:
    """A process that searches, and the end of a pipe on which it sends what it `Found`, the last being its result."""
    ours, theirs = context().Pipe(duplex=False)
    process: BaseProcess = context().Process(target=_run, args=(case, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return process, ours


def _run(case: Case, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its searches itself
    _limit_memory()

    def send(answer: Plan | PlannerError, is_final: bool = False) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            connection.send(Found(answer, is_final))

    try:
        found: Plan | PlannerError = whole(case, send)
    except PlannerError as error:
        found = _plain(error)
    except MemoryError:
        found = PlannerError("the search needs more memory than the page gives one", "pin an axis, or use plan")
    except Exception as error:  # the outermost frame of this process
        found = defect(error)
    send(found, is_final=True)


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


KEPT = 64
"""Number of answers kept; the one asked for longest ago goes first."""
MAX_WAITING = 32
"""Questions that may wait for a search to end; further ones are refused."""
MOST_SEARCHES = 16
"""Questions that are answered at a time, however many processors there are."""
GRACE_S = 15.0
"""Seconds that a search may take beyond its own time limit before it is ended."""


_WAITING = ThreadPoolExecutor(2 * MOST_SEARCHES, "search")
"""Threads that wait for the search of each question; others draw answers."""


@dataclass(eq=False)
class Search:
    """A question that is being answered, and everyone who waits for it."""

    question: Question
    listeners: set[asyncio.Queue[Found]] = field(default_factory=set)
    found: Found | None = None
    """The last thing that was found."""
    task: asyncio.Task[None] | None = None

    def tell(self, found: Found) -> None:
        """Tell all who wait."""
        self.found = found
        for listener in self.listeners:
            listener.put_nowait(found)


class Desk:
    """Answers questions, from memory where it can. All of it runs in one event loop."""

    def __init__(self, num_searches: int = 0) -> None:
        self._answers: OrderedDict[str, Plan | PlannerError] = OrderedDict()
        self._searches: dict[str, Search] = {}
        self._turns = asyncio.Semaphore(num_searches or min(max(2, os.cpu_count() or 1), MOST_SEARCHES))

    @property
    def num_searches(self) -> int:
        """Questions that are being answered, or wait for it."""
        return len(self._searches)

    def known(self, key: str) -> Plan | PlannerError | None:
        """The answer to a question that was asked before; None if it is not kept."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    async def follow(self, question: Question) -> AsyncGenerator[Found, None]:
        """Findings for a question, the last of them final. Who stops listening last ends the search."""
        key = question.key
        answer = self.known(key)
        if answer is not None:
            yield Found(answer, is_final=True)
            return
        search = self._searches.get(key) or self._begin(key, question)
        queue: asyncio.Queue[Found] = asyncio.Queue()
        if search.found is not None:
            queue.put_nowait(search.found)
        search.listeners.add(queue)
        try:
            while True:
                found = await queue.get()
                yield found
                if found.is_final:
                    return
        finally:
            search.listeners.discard(queue)
            if not search.listeners and search.task is not None:
                self._forget(key, search)
                search.task.cancel()

    async def close(self) -> None:
        """End all searches."""
        tasks = [search.task for search in self._searches.values() if search.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, key: str, question: Question) -> Search:
        if len(self._searches) >= MAX_WAITING:
            raise PlannerError(f"{len(self._searches)} other questions are being answered", "ask again in a minute")
        search = self._searches[key] = Search(question)
        search.task = asyncio.create_task(self._answer(key, search))
        return search

    async def _answer(self, key: str, search: Search) -> None:
        try:
            async with self._turns:
                await self._search(search)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a search that cannot start must not leave its listeners waiting
            search.tell(Found(PlannerError(f"the search could not run: {error}", "plan it on the command line"), True))
        finally:
            self._forget(key, search)
        assert search.found is not None
        answer = search.found.answer
        if isinstance(answer, Plan | Infeasible):
            self._answers[key] = answer
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)

    def _forget(self, key: str, search: Search) -> None:
        if self._searches.get(key) is search:
            del self._searches[key]

    async def _search(self, search: Search) -> None:
        """Tell what the process of a search finds, until its answer is final or the time that it may take is up."""
        case = search.question.case
        limit_s = case.limits.time_limit_s + GRACE_S
        try:
            async with asyncio.timeout(limit_s), contextlib.aclosing(found_by(case)) as all_found:
                async for found in all_found:
                    search.tell(found)
                    if found.is_final:
                        return
        except TimeoutError:
            wrong = SolverError(f"the search did not end within {limit_s:g} s", "pin an axis to shrink it")
        else:
            wrong = SolverError("the search's process died", "plan it on the command line")
        search.tell(Found(wrong, is_final=True))


async def found_by(case: Case) -> AsyncGenerator[Found, None]:
    """The findings of one process, which is killed when nobody waits for more of them."""
    loop = asyncio.get_running_loop()
    starting = loop.run_in_executor(_WAITING, start, case)
    try:
        process, connection = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_end_late)
        raise
    try:
        while True:
            yield await loop.run_in_executor(_WAITING, connection.recv)
    except (EOFError, OSError):
        return
    finally:
        _end(process, connection)


def _end_late(started: asyncio.Future[tuple[BaseProcess, Connection]]) -> None:
    """End a search that nobody waits for any more when it has started."""
    if started.exception() is None:
        _end(*started.result())


def _end(process: BaseProcess, connection: Connection) -> None:
    """End a search; a thread that waits for its answer sees the end of the pipe."""
    process.kill()
    process.join()
    connection.close()


NAMES = ("report.html", "plan.json", "trace.json", "export.zip")
OWN_FIELDS = ("alternative", "to", "launcher")
"""The names in a download's address that are no controls."""
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of all files of an archive, so that the same plan makes the same bytes."""


def download(name: str, plan: Plan, own: Form) -> tuple[str, str, bytes]:
    """Name, content type and content of one of NAMES. Raises PlannerError where the plan cannot be exported so."""
    from planner.export.export import bundle_of
    from planner.export.trainer_files import slug
    from planner.report.page import report_page

    text = own.get("alternative", "")
    if text and not is_count(text):
        raise SpecError(f"--alternative: {text[:20]!r} is no whole number", "choose one of the alternatives")
    number = int(text or 0) or None
    chosen, stem = with_alternative(plan, number), slug(plan.model.name)
    if name == "plan.json":  # the file keeps every alternative: commands take --alternative themselves
        return f"{stem}.json", "application/json", plan.saved_text().encode()
    stem += f"-alternative-{number}" if number else ""
    if name == "report.html":
        return f"{stem}.html", "text/html; charset=utf-8", report_page(chosen).encode()
    if name == "trace.json":
        return f"{stem}-trace.json", "application/json", _trace(chosen).encode()
    targets = ",".join(word for word in (own.get("to", ""), own.get("launcher", "")) if word and word != "default")
    bundle, packed = bundle_of(chosen, targets or "megatron"), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in bundle.with_manifest():
            info = zipfile.ZipInfo(file.name, _FIXED_DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, (0o755 if file.executable else 0o644) << 16
            archive.writestr(info, file.text)
    return f"{stem}-{'-'.join(bundle.targets)}.zip", "application/zip", packed.getvalue()


def _trace(plan: Plan) -> str:
    """The whole step, or a shorter one of the same pipeline where it is too long for a trace."""
    from planner.report.schedules import shown_step
    from planner.report.trace import MAX_ACTIONS, trace_text

    layout, sizes = plan.best, plan.parallelism
    if 2 * sizes.pp * sizes.vpp * sizes.num_microbatches > MAX_ACTIONS:
        layout = with_microbatches(layout, shown_step(plan).num_microbatches)
    return trace_text(plan, layout)
