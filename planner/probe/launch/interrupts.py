"""Signals of a launcher: requests to end it act as Ctrl-C does, and the server that forks the ranks ignores Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver


@contextmanager
def signals_end_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (a closed terminal) as Ctrl-C; otherwise they would end the launcher before it cleans
    up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


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
