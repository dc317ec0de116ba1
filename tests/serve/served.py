"""A running server as tests ask it, and the job that they ask about."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from planner.serve.desk import Desk
from planner.serve.server import HOST

SMALL = {"model": "llama-3.2-1b", "gpus": "8", "micro_batch_size": "1", "global_batch_size": "64", "top": "2"}
"""A job that is planned in a fraction of a second."""


@dataclass(frozen=True)
class Running:
    """A server, and ways to ask it."""

    port: int
    server: uvicorn.Server
    desk: Desk

    @property
    def num_open(self) -> int:
        """Connections that the server holds."""
        return len(self.server.server_state.connections)

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
