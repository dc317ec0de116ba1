"""Signals: a launcher that is asked to end does as with Ctrl-C, the server that forks its ranks ignores Ctrl-C, and a
rank that torchrun ends clears up."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path


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


def _keep_for_its_remover(folder: str) -> None:
    """Make the process server's folder again where somebody has removed it: at its end, multiprocessing removes it and
    shows a traceback if it is gone."""
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
