"""A server on this machine's own address, in a thread; all tests of a session share it, and what it has found."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from planner.cli.job_options import SearchOptions
from planner.cli.options import DEFAULT_HARDWARE
from planner.cli.serve_command import read_question, start_of
from planner.serve.app import application
from planner.serve.server import HOST, listen, server_of

SMALL = {"model": "llama-3.2-1b", "gpus": "8", "micro_batch_size": "1", "global_batch_size": "64", "top": "2"}
"""A job that is planned in a fraction of a second."""


@dataclass(frozen=True)
class Running:
    """A server, and ways to ask it."""

    port: int

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"

    def ask(
        self, method: str, path: str, body: str | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """A response and its body."""
        link = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            link.request(method, path, body, dict(headers or {}))
            response = link.getresponse()
            return response, response.read()
        finally:
            link.close()

    def answer(self, form: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        """The lines of an answer."""
        body = json.dumps({"form": dict(form), **more})
        response, text = self.ask("POST", "/answer", body, {"Content-Type": "application/json"})
        assert response.status == 200, text
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="package")
def running() -> Iterator[Running]:
    """The page as `plan serve` runs it, on a free port."""
    listener = listen(0)
    port = listener.getsockname()[1]
    start = start_of(SearchOptions(model=SMALL["model"], gpus=8, micro_batch_size="1", global_batch_size=64, top=2))
    app, is_ready = application(read_question, start, {"hardware": DEFAULT_HARDWARE}), threading.Event()
    server = server_of(listener, app, lambda _: is_ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    assert is_ready.wait(30)
    yield Running(port)
    server.should_exit = True
    thread.join(10)
    listener.close()
