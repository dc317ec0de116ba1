"""Requests that no browser of ours sends, as bytes, each with the statuses that may answer it."""

import contextlib
import json
import socket

from planner.serve.server import HOST

JSON = "Content-Type: application/json"
CLOSED = 0
"""The connection was closed without an answer."""


def request(method: str, path: str, port: int, *more: str, body: bytes = b"") -> bytes:
    """A request with our own host."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}:{port}", *more]
    return "\r\n".join([*lines, "", ""]).encode() + body


def posted(port: int, body: bytes, *more: str) -> bytes:
    """A question, as our page sends it."""
    return request(
        "POST", "/answer", port, "Content-Type: application/json", f"Content-Length: {len(body)}", *more, body=body
    )


def hostile(port: int) -> dict[str, tuple[bytes, set[int]]]:
    """Bytes of each hostile request."""
    form = {"model": "llama-3.2-1b", "gpus": "8"}
    odd = json.dumps({"form": {**form, "tp": "\ud800"}}).encode()
    chunked = b"5\r\nhello\r\n0\r\n\r\n"
    paths = (
        "/../../etc/passwd", "/files/../../../etc/passwd", "/files/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/files/..%5c..%5cboot.ini", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/files/%00",
        "/files/plan.json%00.html", "/static/../server.py",
    )  # fmt: skip
    return {
        **{f"GET {path}": (request("GET", path, port), {400, 403, 404}) for path in paths},
        "an address in the first line": (request("GET", "http://evil.example/", port), {400, 404}),
        "no host": (b"GET / HTTP/1.1\r\n\r\n", {400, 403}),
        "HTTP 1.0 without a host": (b"GET / HTTP/1.0\r\n\r\n", {403}),
        "two hosts": (request("GET", "/", port, "Host: evil.example"), {400, 403}),
        "a name bound to this address": (b"GET / HTTP/1.1\r\nHost: evil.example:%d\r\n\r\n" % port, {403}),
        "this address as one number": (b"GET / HTTP/1.1\r\nHost: 2130706433:%d\r\n\r\n" % port, {403}),
        "a forwarded host": (b"GET / HTTP/1.1\r\nHost: evil\r\nX-Forwarded-Host: 127.0.0.1:%d\r\n\r\n" % port, {403}),
        "another page's post": (posted(port, b"{}", "Origin: http://evil.example"), {403}),
        "another site's post": (posted(port, b"{}", "Sec-Fetch-Site: cross-site"), {403}),
        "two lengths": (posted(port, chunked, "Transfer-Encoding: chunked"), {400}),
        "two other lengths": (posted(port, b"{}", "Content-Length: 44"), {400}),
        "a length with a sign": (request("POST", "/answer", port, JSON, "Content-Length: +2", body=b"{}"), {400, 413}),
        "a length below zero": (request("POST", "/answer", port, JSON, "Content-Length: -2", body=b"{}"), {400, 413}),
        "another coding": (request("POST", "/answer", port, JSON, "Transfer-Encoding: gzip, chunked"), {400, 501}),
        "a chunk without a length": (
            request("POST", "/answer", port, JSON, "Transfer-Encoding: chunked", body=b"zz\r\nhello\r\n"), {400, 413},
        ),
        "a request in a body": (
            request("GET", "/", port, "Content-Length: 30", body=b"GET /files/plan.json HTTP/1.1\r\n"), {400},
        ),
        "a space before the colon": (request("GET", "/", port, "Transfer-Encoding : chunked"), {400}),
        "a length of thousands of digits": (
            request("POST", "/answer", port, JSON, "Content-Length: " + "9" * 5000, body=b"{}"), {400, 413, 431}
        ),
        "a long body": (posted(port, b"x" * 70_000), {413}),
        "a longer body than it says": (request("POST", "/answer", port, JSON, "Content-Length: 9999999"), {413}),
        "a long header": (request("GET", "/", port, "X-Long: " + "x" * 200_000), {400, 431, CLOSED}),
        "a header without an end": (request("GET", "/", port)[:-2] + b"X: " + b"x" * 200_000, {400, 431, CLOSED}),
        "many headers": (request("GET", "/", port, *(f"X-{n}: {n}" for n in range(20_000))), {400, 431, CLOSED}),
        "a long address": (request("GET", "/?x=" + "x" * 30_000, port), {400, 414}),
        "a websocket": (
            request(
                "GET", "/", port, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            ),
            {200, 400, 426},
        ),
        "a later version": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 403}),
        "a tunnel": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n", {400, 403, 405}),
        "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400, CLOSED}),
        "nothing but ends of lines": (b"\r\n" * 5_000, {400, CLOSED}),
        "no JSON": (posted(port, b"{"), {400}),
        "no UTF-8": (posted(port, b'{"form": {"model": "\xff"}}'), {400}),
        "deep JSON": (posted(port, b"[" * 60_000), {400}),
        "deep JSON in a form": (posted(port, b'{"form": {"model": ' + b'{"a":' * 9_000 + b"1" + b"}" * 9_002), {400}),
        "long digits": (posted(port, b'{"form": {}, "alternative": ' + b"9" * 50_000 + b"}"), {400}),
        "no such alternative": (posted(port, json.dumps({"form": form, "alternative": 10**12}).encode()), {200}),
        "thirty digits": (posted(port, json.dumps({"form": form, "alternative": 10**30}).encode()), {400}),
        "half a letter": (posted(port, odd), {200, 400}),
        "half a letter in the address": (request("GET", "/?tp=%ED%A0%80&model=8b", port), {200, 400}),
        "a NUL in a control": (posted(port, json.dumps({"form": {**form, "hardware": "h100\0"}}).encode()), {200, 400}),
    }  # fmt: skip


def status_of(port: int, data: bytes, ends: bool = False, timeout_s: float = 60.0) -> int:
    """The status that answers these bytes; `ends` says that no more follow."""
    with socket.create_connection((HOST, port), timeout=timeout_s) as link:
        answer = b""
        with contextlib.suppress(OSError):  # hung up on before all was sent
            link.sendall(data)
            if ends:
                link.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while b"\r\n" not in answer and (part := link.recv(1 << 16)):
                answer += part
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else CLOSED
