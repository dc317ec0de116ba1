"""Signals that reach a launcher: all of them end it as Ctrl-C does, and its process server ignores Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver


@contextmanager
def signals_end_as_ctrl_c() -> Iterator[None]:
    """Take a request to end, or a terminal that is closed, for Ctrl-C: nothing would be cleared up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) == signal.SIG_DFL]
    for sign in taken:
        signal.signal(sign, signal.default_int_handler)
    try:
        yield
    finally:
        for sign in taken:
            signal.signal(sign, signal.SIG_DFL)


def start_process_server() -> None:
    """Start the server of processes deaf to Ctrl-C, which a terminal sends to it too: while it imports torch it would
    answer with a traceback. What it starts inherits that, and ends with the launcher."""
    if threading.current_thread() is not threading.main_thread():
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, usual)
