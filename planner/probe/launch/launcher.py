"""Starts the ranks of a probe on this machine, watches them, and turns the outcome into a result or one error.

This process hosts the store in which its ranks meet and tell of themselves. A launcher that a signal ends does as with
Ctrl-C, the server that forks its ranks ignores Ctrl-C, and no rank outlives its launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from planner.errors import ProbeError
from planner.probe.launch.process import (
    CONSEQUENCES,
    LOCALHOST,
    Start,
    failed_rank,
    hint_of,
    out_of_memory_result,
    rank_process,
)
from planner.probe.rank.groups import (
    SILENT_HINT,
    START_TIMEOUT_S,
    Heard,
    failures_in,
    hanging_rank,
    results_in,
    tcp_store,
)
from planner.probe.result import MeasuredRun, RankFailure
from planner.probe.run import ProbeRun

POLL_S = 0.05
GRACE_S = 1.0
"""Seconds that the other ranks still get to report what they know after one has failed."""
STOPPED_S = 10.0
"""Seconds that a process may take to end."""
Child = Callable[[Start, int, int], None]
"""The function that a process runs, called with what all are given, its global rank, and its number on this machine."""
_PRELOAD = ["planner.probe.launch.process"]


def launch(run: ProbeRun, child: Child = rank_process, ranks: Sequence[int] = ()) -> MeasuredRun:
    """Run all ranks, or those named, on this machine, one process each.

    Raises ProbeError naming rank, stage and phase, and the folder with all logs and stacks. All processes are gone when
    this returns or raises.
    """
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    with handled(signal.default_int_handler, *ends), log_folder() as folder:
        return _StartedRanks(run, folder, child, ranks or range(run.world_size)).watch()


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals within, in the main thread, which alone can."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    usual = [(number, signal.signal(number, handler)) for number in numbers] if in_main_thread else []
    try:
        yield
    finally:
        for number, before in usual:
            signal.signal(number, before)


@contextmanager
def log_folder() -> Iterator[Path]:
    """A folder for the logs of one run, which a ProbeError names: else it is removed. Raises ProbeError where none can
    be made."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="plan-probe-"))
    except OSError as error:
        raise ProbeError(
            f"the probe's folder cannot be made in {tempfile.gettempdir()}: {error.strerror}",
            "set TMPDIR to a folder with space that you may write to",
        ) from None
    is_named = False
    try:
        yield folder
    except ProbeError:
        is_named = True
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)


def process_context() -> ForkServerContext:
    """The context that starts ranks: from a process that has imported torch, once for all of them.

    A terminal sends Ctrl-C to that process too, and while it imports torch it would answer with a traceback. Ranks
    inherit that it is ignored, and end with the launcher.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with handled(signal.SIG_IGN, signal.SIGINT):
        forkserver.ensure_running()
    return context


class _StartedRanks:
    def __init__(self, run: ProbeRun, folder: Path, child: Child, ranks: Sequence[int]) -> None:
        self.run, self.ranks = run, ranks
        self.logs = f"stacks and logs of all ranks are in {folder}"
        self.store = tcp_store(LOCALHOST, 0, START_TIMEOUT_S, is_host=True)
        self.heard = Heard(self.store, ranks)
        context, start = process_context(), Start(run, self.store.port, folder)
        self.processes: dict[int, BaseProcess] = {
            rank: context.Process(target=child, args=(start, rank, number), daemon=True)
            for number, rank in enumerate(ranks)
        }

    def watch(self) -> MeasuredRun:
        """Start the ranks and wait for them. None of them runs any more afterwards, whatever happens."""
        try:
            for started in self.processes.values():
                started.start()
            while not self._is_over():
                self._require_progress()
                time.sleep(POLL_S)
            if any(self._codes().values()):
                return self._out_of_memory_or_raise()
            return MeasuredRun(run=self.run, ranks=results_in(self.store, self.ranks))
        finally:
            self._stop()

    def _codes(self) -> dict[int, int | None]:
        """The exit code of each rank's process; None where it still runs."""
        return {rank: started.exitcode for rank, started in self.processes.items()}

    def _is_over(self) -> bool:
        """True once a rank has failed, or all have ended, or left their results and do not end by themselves."""
        codes = self._codes()
        left = (self.heard.progress[rank] for rank, code in codes.items() if code is None)
        return any(codes.values()) or all(one.phase == "done" and one.still_s > STOPPED_S for one in left)

    def _require_progress(self) -> None:
        """Raise ProbeError if a rank keeps the others from moving, once all have written their stacks."""
        self.heard.listen()
        running = {rank: self.heard.progress[rank] for rank, code in self._codes().items() if code is None}
        rank = hanging_rank(running, self.run.timeout_s)
        if rank is None:
            return
        for started in self.processes.values():
            if started.exitcode is None and started.pid is not None:
                os.kill(started.pid, signal.SIGUSR1)
        time.sleep(GRACE_S)
        progress = self.heard.progress[rank]
        hint = f"{SILENT_HINT}; " if progress.is_silent(self.run.timeout_s) else ""
        raise ProbeError(
            f"{failed_rank(self.run, rank)} {progress.hang(self.run.timeout_s)}",
            f"{hint}{self.logs}; --timeout gives slow ranks longer",
        )

    def _out_of_memory_or_raise(self) -> MeasuredRun:
        """Find the rank that failed first: one that was killed, or one whose error is more than the loss of another
        rank."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and None in self._codes().values():
            time.sleep(POLL_S)
        self.heard.listen()
        failures = sorted(failures_in(self.store, self.ranks), key=lambda one: (_consequence(one), one.time_s))
        out_of_memory = next((failure for failure in failures if failure.kind == "out_of_memory"), None)
        if out_of_memory is not None:
            return out_of_memory_result(self.run, out_of_memory)
        told = {failure.rank for failure in failures}
        # NCCL's watchdog aborts a rank whose peer is gone
        silent = sorted(
            (code == -signal.SIGABRT, rank, code) for rank, code in self._codes().items() if code and rank not in told
        )
        if silent and all(map(_consequence, failures)):
            _, rank, code = silent[0]
            ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            last = self.heard.progress[rank]
            raise ProbeError(f"{failed_rank(self.run, rank)} {ended}: the last heard of it was {last}", self.logs)
        hint = "; ".join(filter(None, (hint_of(failures[0]), self.logs)))
        raise ProbeError(failures[0].in_words(self.run.place(failures[0].rank)), hint)

    def _stop(self) -> None:
        begun = [started for started in self.processes.values() if started.pid is not None]
        for started in begun:
            started.kill()
        for started in begun:
            started.join(STOPPED_S)


def _consequence(failure: RankFailure) -> int:
    """How likely a failure is the consequence of another rank's: 0 for a cause of its own."""
    return 1 + CONSEQUENCES.index(failure.kind) if failure.kind in CONSEQUENCES else 0
