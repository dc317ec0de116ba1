"""Starts the ranks of a probe on this machine, watches them, and turns the outcome into a result or one error.

Their temporary folder is locked while the run lives, and removed, whatever ends the run. A run that was killed cannot
remove its folder: the next one finds that nobody holds the lock and does it. A folder whose stacks and logs an error
has named has no lock file any more, and nobody removes it. A launcher that a signal ends does as with Ctrl-C, the
server that forks its ranks ignores Ctrl-C, and a rank that torchrun ends clears up.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from planner.errors import PlannerError, ProbeError
from planner.files import sweep_one, write_text
from planner.probe.launch.process import (
    CONSEQUENCES,
    DISK_HINT,
    EXIT_FAILED,
    failed_rank,
    hint_of,
    out_of_memory_result,
    rank_process,
)
from planner.probe.rank.groups import (
    FAILURE_FILE,
    RUN_FILE,
    SILENT_HINT,
    STACK_FILE,
    START_TIMEOUT_S,
    Progress,
    hanging_rank,
    read_results,
    read_status,
)
from planner.probe.result import MeasuredRun, RankFailure
from planner.probe.run import ProbeRun

PREFIX = "plan-probe-"
LOCK_FILE = "lock"


@contextmanager
def run_folder(keeps_after_error: bool) -> Iterator[Path]:
    """A folder for the files of one run. Raises ProbeError where none can be made.

    It is removed at the end; where `keeps_after_error`, not after a ProbeError, whose hint names it.
    """
    sweep()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = _lock(folder)
    except OSError as error:
        raise ProbeError(
            f"the probe's folder cannot be made in {tempfile.gettempdir()}: {error.strerror}",
            "set TMPDIR to a folder with space that you may write to",
        ) from None
    keeps = False
    try:
        yield folder
    except ProbeError:
        keeps = keeps_after_error
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        raise
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def write_run(folder: Path, run: ProbeRun) -> None:
    """Write the run that every rank reads. Raises ProbeError where the folder has no space."""
    try:
        write_text(folder / RUN_FILE, run.model_dump_json(), force=True)
    except PlannerError as error:
        raise ProbeError(error.message, "set TMPDIR to a folder with space that you may write to") from None


def sweep() -> None:
    """Remove folders of this user's runs that were killed: those whose lock nobody holds."""
    for lock_file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError):
            sweep_one(lock_file, lock_file.parent)


def _lock(folder: Path) -> int:
    """Lock the folder; the lock file gets its name once it is locked, so that no other run finds it without a lock."""
    unnamed = folder / f".{LOCK_FILE}"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: then nobody sweeps there either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / LOCK_FILE)
    return lock


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals within, in the main thread, which alone can."""
    usual = [(number, signal.signal(number, handler)) for number in numbers] if in_main_thread() else []
    try:
        yield
    finally:
        for number, before in usual:
            signal.signal(number, before)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def unhandled() -> list[signal.Signals]:
    """Those of SIGTERM and SIGHUP (a closed terminal) that would end this process before it cleans up."""
    return [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]


@contextmanager
def removed_when_ended(folder: Path) -> Iterator[None]:
    """Remove `folder` when torchrun or srun ends this process (SIGTERM), also while it is in a call that does not
    return to Python, such as a collective: a thread hears of the signal through a pipe."""
    if not in_main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def end() -> None:
        number = os.read(reader, 1)
        os.close(reader)
        if number:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(128 + number[0])

    threading.Thread(target=end, daemon=True).start()
    usual = signal.set_wakeup_fd(writer)
    try:
        with handled(lambda *_: None, *unhandled()):
            yield
    finally:
        signal.set_wakeup_fd(usual)
        os.close(writer)


def start_process_server() -> None:
    """Start the server that forks the ranks, with Ctrl-C ignored. A terminal sends Ctrl-C to the server too, and while
    it imports torch it would answer with a traceback. Ranks inherit this, and end with the launcher."""
    with handled(signal.SIG_IGN, signal.SIGINT):
        forkserver.ensure_running()
    atexit.register(_keep_for_its_remover, util.get_temp_dir())


@contextmanager
def process_server_answers() -> Iterator[None]:
    """Raise ProbeError where the process server does not fork a rank in time: it is stopped."""

    def give_up(*_: object) -> None:
        server = cast(Any, forkserver)._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)  # multiprocessing would wait for its end for ever
        raise ProbeError(
            f"the process server, which forks the ranks, has not answered for {START_TIMEOUT_S:.0f} s",
            f"a signal (SIGSTOP) or a debugger stops process {server}: start again",
        )

    with handled(give_up, signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S if in_main_thread() else 0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _keep_for_its_remover(folder: str) -> None:
    """Make the process server's folder again where somebody has removed it: at its end, multiprocessing removes it and
    shows a traceback if it is gone."""
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)


POLL_S = 0.02
GRACE_S = 1.0
"""Seconds that the other ranks still get to report what they know after one has failed."""
STOPPED_S = 10.0
"""Seconds that a process may take to end."""
Child = Callable[[Path, int, int], None]
"""The function that a process runs, called with (folder, global rank, number on this machine)."""
_PRELOAD = ["planner.probe.launch.process"]


def launch(run: ProbeRun, child: Child = rank_process, ranks: Sequence[int] = ()) -> MeasuredRun:
    """Run all ranks, or those named, on this machine, one process each.

    The ranks' folder is removed at the end, except after a failure: there the stacks and logs of all ranks are kept.
    Raises ProbeError naming rank, stage and phase. All processes are gone when this returns or raises.
    """
    # a signal that ends the launcher does as Ctrl-C
    with handled(signal.default_int_handler, *unhandled()), run_folder(keeps_after_error=True) as folder:
        write_run(folder, run)
        return _StartedRanks(run, folder, child, ranks or range(run.world_size)).watch()


def process_context() -> ForkServerContext:
    """The context that starts ranks: from a process that has imported torch, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    start_process_server()
    return context


class _StartedRanks:
    def __init__(self, run: ProbeRun, folder: Path, child: Child, ranks: Sequence[int]) -> None:
        self.run, self.folder, self.ranks = run, folder, ranks
        context = process_context()
        self.processes: dict[int, BaseProcess] = {
            rank: context.Process(target=child, args=(folder, rank, number), daemon=True)
            for number, rank in enumerate(ranks)
        }

    def watch(self) -> MeasuredRun:
        """Start the ranks and wait for them. None of them runs any more afterwards, whatever happens."""
        self.started_s = time.monotonic()
        try:
            with process_server_answers():
                for started in self.processes.values():
                    started.start()
            while not self._is_over():
                self._check_progress()
                time.sleep(POLL_S)
            return self._out_of_memory_or_raise() if any(self._codes().values()) else self._collect()
        finally:
            self._stop()

    def _codes(self) -> dict[int, int | None]:
        """The exit code of each rank's process; None where it still runs."""
        return {rank: started.exitcode for rank, started in self.processes.items()}

    def _is_over(self) -> bool:
        """True once a rank has failed, all have ended, or all have left their results and do not end by themselves."""
        codes = self._codes().values()
        told = map(self._progress, self.ranks)
        return any(codes) or None not in codes or all(one.phase == "done" and one.still_s > STOPPED_S for one in told)

    def _collect(self) -> MeasuredRun:
        self._require_folder()
        return MeasuredRun(run=self.run, ranks=read_results(self.folder, self.ranks))

    def _check_progress(self) -> None:
        self._require_folder()
        ranks = {rank: self._progress(rank) for rank in self.ranks}
        rank = hanging_rank(ranks, self.run.timeout_s)
        if rank is None:
            return
        self._dump_stacks()
        hint = f"{SILENT_HINT}; " if ranks[rank].is_silent(self.run.timeout_s) else ""
        raise ProbeError(
            f"{failed_rank(self.run, rank)} {ranks[rank].hang(self.run.timeout_s)}",
            f"{hint}stacks and logs of all ranks are in {self.folder}; --timeout gives slow ranks longer",
        )

    def _require_folder(self) -> None:
        """Raise ProbeError if somebody has removed the folder by which the ranks and this process speak."""
        if not self.folder.is_dir():
            raise ProbeError(
                f"{self.folder} was removed while the ranks ran",
                "keep what clears temporary files away from it, or set TMPDIR to a folder of your own",
            )

    def _progress(self, rank: int) -> Progress:
        return read_status(self.folder, rank, self.started_s)

    def _dump_stacks(self) -> None:
        """Have all ranks write their stacks, and wait until they have; a stopped process writes none."""
        running = [rank for rank, code in self._codes().items() if code is None]
        for rank in running:
            if (pid := self.processes[rank].pid) is not None:
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        sizes = [0] * len(running)
        while time.monotonic() < deadline:
            time.sleep(5 * POLL_S)
            before = sizes
            paths = (self.folder / STACK_FILE.format(rank) for rank in running)
            sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
            if all(sizes) and sizes == before:
                return

    def _out_of_memory_or_raise(self) -> MeasuredRun:
        """Find the rank that failed first: one that was killed, or one whose error is more than the loss of another
        rank."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and None in self._codes().values():
            time.sleep(POLL_S)
        self._require_folder()
        failures = self._failures()
        out_of_memory = next((failure for failure in failures if failure.kind == "out_of_memory"), None)
        if out_of_memory is not None:
            return out_of_memory_result(self.run, out_of_memory)
        hint = f"stacks and logs of all ranks are in {self.folder}"
        codes = {rank: code for rank, code in self._codes().items() if code}
        are_consequences = all(failure.kind in CONSEQUENCES for failure in failures)
        killed = sorted((-code == signal.SIGABRT, rank) for rank, code in codes.items() if code < 0)
        # NCCL's watchdog aborts a rank whose peer is gone
        if killed and (are_consequences or not killed[0][0]):
            rank = killed[0][1]
            sent = signal.Signals(-codes[rank]).name
            raise ProbeError(f"{failed_rank(self.run, rank)} was killed by {sent} in {self._progress(rank)}", hint)
        silent = next((rank for rank in codes if rank not in {failure.rank for failure in failures}), None)
        if silent is not None and are_consequences:
            progress = self._progress(silent)
            if codes[silent] == EXIT_FAILED:  # and had no space to say why, but in its status
                hint = f"{DISK_HINT}; {hint}"
                raise ProbeError(f"{failed_rank(self.run, silent)} failed in {progress.phase}: {progress.detail}", hint)
            raise ProbeError(f"{failed_rank(self.run, silent)} ended with code {codes[silent]} in {progress}", hint)
        first = failures[0]
        hint = "; ".join(filter(None, (hint_of(first), hint)))
        raise ProbeError(first.in_words(self.run.place(first.rank)), hint)

    def _failures(self) -> list[RankFailure]:
        """The records of failed ranks, causes before consequences."""
        paths = (self.folder / FAILURE_FILE.format(rank) for rank in self.ranks)
        failures = (RankFailure.model_validate_json(path.read_text()) for path in paths if path.exists())
        return sorted(failures, key=lambda failure: (_consequence(failure), failure.time_s))

    def _stop(self) -> None:
        begun = [started for started in self.processes.values() if started.pid is not None]
        for started in begun:
            started.kill()
        for started in begun:
            started.join(STOPPED_S)


def _consequence(failure: RankFailure) -> int:
    """How likely a failure is the consequence of another rank's: 0 for a cause of its own."""
    return 1 + CONSEQUENCES.index(failure.kind) if failure.kind in CONSEQUENCES else 0
