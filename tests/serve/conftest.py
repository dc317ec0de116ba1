"""A server on this machine's own address, in a thread; all tests of a session share it, and what it has found."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from served import SMALL, Running

from planner.cli.options import DEFAULT_HARDWARE, SearchOptions
from planner.cli.views import read_question, start_of
from planner.serve.app import application
from planner.serve.desk import Desk
from planner.serve.server import listen, server_of


@pytest.fixture(scope="package")
def running() -> Iterator[Running]:
    """The page as `plan serve` runs it, on a free port."""
    listener = listen(0)
    port = listener.getsockname()[1]
    start = start_of(SearchOptions(model=SMALL["model"], gpus=8, micro_batch_size="1", global_batch_size=64, top=2))
    desk, is_ready = Desk(), threading.Event()
    app = application(read_question, start, {"hardware": DEFAULT_HARDWARE}, desk)
    server = server_of(listener, app, lambda _: is_ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    assert is_ready.wait(30)
    yield Running(port, server, desk)
    server.should_exit = True
    thread.join(10)
    listener.close()
