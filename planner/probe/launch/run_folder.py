"""The temporary folder of a run: made and locked while the run lives, and removed, whatever ends the run.

A run that was killed cannot remove its folder. The next run finds that nobody holds the folder's lock and does it. A
folder whose stacks and logs an error has named has no lock file any more, and nobody removes it. A launcher that a
signal ends does as with Ctrl-C, the server that forks its ranks ignores Ctrl-C, and a rank that torchrun ends clears
up.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, cast

from planner.errors import PlannerError, ProbeError
from planner.files import write_text
from planner.probe.rank.status import RUN_FILE, START_TIMEOUT_S
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
    try:
        yield folder
    except ProbeError:
        if not keeps_after_error:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def write_run(folder: Path, run: ProbeRun) -> None:
    """Write the run that every rank reads. Raises ProbeError where the folder has no space."""
    try:
        write_text(folder / RUN_FILE, run.model_dump_json(), force=True)
    except PlannerError as error:
        raise ProbeError(error.message, "set TMPDIR to a folder with space that you may write to") from None


def sweep() -> None:
    """Remove folders of this user's runs that were killed: those whose lock nobody holds."""
    with suppress(OSError):
        for lock_file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
            if _is_abandoned(lock_file):
                shutil.rmtree(lock_file.parent, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Lock the folder; the lock file gets its name once it is locked, so that no other run finds it without a lock."""
    unnamed = folder / f".{LOCK_FILE}"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: then nobody sweeps there either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / LOCK_FILE)
    return lock


def _is_abandoned(lock_file: Path) -> bool:
    try:
        if lock_file.stat().st_uid != os.geteuid():
            return False
        lock = os.open(lock_file, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


@contextmanager
def signals_end_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (a closed terminal) as Ctrl-C; otherwise they would end the launcher before it cleans
    up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = _unhandled()
    for number in handled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def removed_when_ended(folder: Path) -> Iterator[None]:
    """Remove `folder` when torchrun or srun ends this process (SIGTERM), also while it is in a call that does not
    return to Python, such as a collective: a thread hears of the signal through a pipe."""
    if threading.current_thread() is not threading.main_thread():
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
    handled = _unhandled()
    for heard in handled:
        signal.signal(heard, lambda *_: None)
    usual = signal.set_wakeup_fd(writer)
    try:
        yield
    finally:
        signal.set_wakeup_fd(usual)
        for heard in handled:
            signal.signal(heard, signal.SIG_DFL)
        os.close(writer)


def _unhandled() -> list[signal.Signals]:
    return [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]


def start_process_server() -> None:
    """Start the server that forks the ranks, with Ctrl-C ignored. A terminal sends Ctrl-C to the server too, and while
    it imports torch it would answer with a traceback. Ranks inherit this, and end with the launcher."""
    if threading.current_thread() is not threading.main_thread():
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, usual)
    atexit.register(_keep_for_its_remover, util.get_temp_dir())


@contextmanager
def process_server_answers() -> Iterator[None]:
    """Raise ProbeError where the process server does not fork a rank in time: it is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        server = cast(Any, forkserver)._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)  # multiprocessing would wait for its end for ever
        raise ProbeError(
            f"the process server, which forks the ranks, has not answered for {START_TIMEOUT_S:.0f} s",
            f"a signal (SIGSTOP) or a debugger stops process {server}: start again",
        )

    usual = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def _keep_for_its_remover(folder: str) -> None:
    """Make the process server's folder again where somebody has removed it: at its end, multiprocessing removes it and
    shows a traceback if it is gone."""
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
