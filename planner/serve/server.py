"""The server: it listens on this machine's own address only, and ends cleanly."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import uvicorn

from planner.errors import PlannerError, SpecError
from planner.serve.guard import App, Guard
from planner.serve.patience import Patient
from planner.serve.searching import warm

HOST = "127.0.0.1"
MAX_CONNECTIONS = 256
"""Connections at a time; more are turned away."""
CLOSING_S = 2
"""Seconds that answers under way have when the server ends."""


def listen(port: int) -> socket.socket:
    """A socket on this machine's own address; port 0 takes a free one. Raises SpecError if it cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OverflowError:
        listener.close()
        raise SpecError(f"--port: {port} is no port", "1 to 65535, or 0 for any that is free") from None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PlannerError(f"--port: {port} is in use on {HOST}", f"plan serve --port {_free_port()}") from None
        raise PlannerError(f"--port: {port}: {error.strerror}", f"plan serve --port {_free_port()}") from None
    return listener


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def serve(listener: socket.socket, app: App, ready: Callable[[str], None]) -> None:
    """Serve an application until interrupted; `ready` is called with the address once it answers."""
    warm()
    with listener:
        server_of(listener, app, ready).run(sockets=[listener])


def server_of(listener: socket.socket, app: App, ready: Callable[[str], None]) -> uvicorn.Server:
    """The server of an application, with the guard before it."""
    port = int(listener.getsockname()[1])
    config = uvicorn.Config(
        Guard(app, port),
        log_level="error",  # what is wrong with a request is told to who sent it
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        http=Patient,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return _Announced(config, lambda: ready(f"http://{HOST}:{port}/"))


class _Announced(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
