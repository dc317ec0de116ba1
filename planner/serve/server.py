"""The server: it listens on this machine's own address only, and ends cleanly."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from planner.errors import PlannerError, SpecError
from planner.serve.desk import warm

HOST = "127.0.0.1"
MAX_CONNECTIONS = 256
"""Connections at a time; more are turned away."""
CLOSING_S = 2
"""Seconds that answers under way have when the server ends."""


def listen(port: int, command: str = "plan serve --port") -> socket.socket:
    """A socket on this machine's own address; port 0 takes a free one. Raises SpecError if `command` cannot have it."""
    option = command.rpartition(" ")[2]
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OverflowError:
        listener.close()
        raise SpecError(f"{option}: {port} is no port", "1 to 65535, or 0 for any that is free") from None
    except OSError as error:
        listener.close()
        why = f" is in use on {HOST}" if error.errno == errno.EADDRINUSE else f": {error.strerror}"
        raise PlannerError(f"{option}: {port}{why}", f"{command} {_free_port()}") from None
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
    return Announced(config, lambda: ready(f"http://{HOST}:{port}/"))


class Announced(uvicorn.Server):
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 64 << 10
"""Bytes of a request's body at most."""
MAX_DIGITS = 20
"""Digits of a body's length at most: Python reads no number of thousands of them."""
MAX_QUERY_BYTES = 16 << 10
"""Bytes of a request's query at most."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Scripts are our own file alone. Styles may stand in the page, since charts carry theirs; all text is escaped."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response."""
_NAVIGATES = ("navigate", "document")


class Guard:
    """An ASGI application that passes on what this machine's own browser asks of this page."""

    def __init__(self, app: App, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        if port == 80:
            self._hosts |= {"127.0.0.1", "localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        # as of this version of ASGI, who goes away ends what is made for them at once, not when it is next sent to
        known = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        await self._app(known, _limited(receive), _with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and words where a request is none that our page sends."""
        headers: dict[bytes, bytes] = dict(scope["headers"])

        def header(name: str) -> str:
            return headers.get(name.encode(), b"").decode("latin-1").lower()

        method, origin, site = scope["method"], header("origin"), header("sec-fetch-site")
        if sum(name == b"host" for name, _ in scope["headers"]) != 1 or header("host") not in self._hosts:
            return 403, "this page answers as 127.0.0.1 and localhost only"
        if origin and origin not in {f"http://{host}" for host in self._hosts}:
            return 403, "another page asked"
        is_visit = (header("sec-fetch-mode"), header("sec-fetch-dest")) == _NAVIGATES and scope["path"] == "/"
        if site not in ("", "none", "same-origin") and not (is_visit and method == "GET"):
            return 403, "another page asked"
        if method not in ("GET", "HEAD", "POST"):
            return 405, "GET and POST only"
        if method == "POST" and header("content-type").partition(";")[0].strip() != "application/json":
            return 415, "application/json only"
        length, coding = header("content-length"), header("transfer-encoding")
        if coding and length:
            return 400, "one length of the body, not two"
        if method != "POST" and (coding or length not in ("", "0")):
            return 400, "no body but with POST"
        if length and (not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > MAX_BODY_BYTES):
            return 413, f"at most {MAX_BODY_BYTES:,} bytes"
        if len(scope["query_string"]) > MAX_QUERY_BYTES:
            return 414, f"at most {MAX_QUERY_BYTES:,} bytes of query"
        return None


class TooLarge(Exception):
    """A body is larger than it said, or than is allowed."""


def _limited(receive: Receive) -> Receive:
    """The body as long as it is not too large."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise TooLarge
        return message

    return limited


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", [])}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return sending


async def _refuse(send: Send, status: int, words: str) -> None:
    body = f"{words}\n".encode()
    # closed: what the body would have been is no request
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    sending = _with_headers(send)
    await sending({"type": "http.response.start", "status": status, "headers": headers})
    await sending({"type": "http.response.body", "body": body})


REQUEST_S = 15.0
"""Seconds in which a request must have arrived, its body too; a browser on this machine needs milliseconds."""
READING_S = 30.0
"""Seconds without a byte read by who asked, while an answer waits to be sent."""
HANGING_UP_S = 2.0
"""Seconds in which the last bytes must have been read when the server closes a connection."""
MAX_OPEN = 512
"""Connections at a time, idle ones too; more are hung up on at once, before they take a file descriptor for long."""


class Patient(H11Protocol):
    """A connection of the page."""

    _request: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_OPEN:
            transport.abort()
            return
        self._request = self.loop.call_later(REQUEST_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._request, self._reading):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Hold the time of a request that has begun and not ended, and of no other."""
        is_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_begun and self.conn.their_state is not h11.SEND_BODY:
            if self._request is not None:
                self._request.cancel()
            self._request = None
        elif self._request is None:
            self._request = self.loop.call_later(REQUEST_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(READING_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(HANGING_UP_S, self.transport.abort)
