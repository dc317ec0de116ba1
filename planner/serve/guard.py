"""The guard before every answer: requests of other hosts and other pages are refused, large ones too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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
