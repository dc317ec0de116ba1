"""Forged, broken, slow and abandoned requests: each is refused or ended, and the page answers the next one."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hostile import CLOSED, JSON, hostile, posted, request, status_of
from served import SMALL, Running

from planner.cli.views import read_question
from planner.serve import server
from planner.serve.server import HOST

LONG = {"model": "deepseek-v3", "gpus": "2048"}
"""A job that is searched for seconds."""


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what must come; the test fails where it does not come at all."""
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextlib.contextmanager
def connected(running: Running, data: bytes, receive_bytes: int = 0) -> Iterator[socket.socket]:
    """A connection on which these bytes were sent."""
    with socket.socket() as link:
        if receive_bytes:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        link.settimeout(60)
        link.connect((HOST, running.port))
        link.sendall(data)
        yield link


def read_to_end(link: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := link.recv(1 << 20):
            data += part
    return data


@pytest.mark.parametrize("name", hostile(0))
def test_a_hostile_request_is_answered_in_kind_and_the_next_one_as_ever(name: str, running: Running) -> None:
    data, statuses = hostile(running.port)[name]
    assert status_of(running.port, data, ends=CLOSED in statuses) in statuses
    response, text = running.ask("GET", "/icon.svg")
    assert (response.status, text[:4]) == (200, b"<svg")


@pytest.mark.parametrize(
    "kind", ["nothing", "half a header", "half a body", "a body nobody asked for", "half a second request"]
)
def test_a_request_that_does_not_end_is_hung_up_on(
    kind: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    port = running.port
    whole = request("GET", "/icon.svg", port)
    data = {
        "nothing": b"", "half a header": whole[:-3], "half a body": posted(port, b"x" * 100)[:-50],
        "a body nobody asked for": request("POST", "/page.css", port, JSON, "Content-Length: 9"),
        "half a second request": whole + whole[:-3],
    }[kind]  # fmt: skip
    with connected(running, data) as link:
        answer = read_to_end(link)
    assert answer.count(b"HTTP/1.1") == (1 if kind in ("a body nobody asked for", "half a second request") else 0)
    assert running.ask("GET", "/icon.svg")[0].status == 200


def test_a_whole_request_outlasts_the_time_that_its_sending_may_take(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    assert running.answer(SMALL)[-1]["state"] == "final"


def test_who_does_not_read_is_hung_up_on(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READING_S", 0.2)
    until(lambda: running.num_open == 0)
    with connected(running, request("GET", "/page.js", running.port) * 900, receive_bytes=4096) as link:
        until(lambda: running.num_open == 1)
        until(lambda: running.num_open == 0)
        assert read_to_end(link).count(b"HTTP/1.1 200") < 900
    assert running.ask("GET", "/icon.svg")[0].status == 200


def test_connections_beyond_the_most_are_hung_up_on(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: running.num_open == 0)
    monkeypatch.setattr(server, "MAX_OPEN", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(running, b""))
        until(lambda: running.num_open == 3)
        with connected(running, b"") as link:
            assert read_to_end(link) == b""
    until(lambda: running.num_open == 0)
    assert running.ask("GET", "/icon.svg")[0].status == 200


@pytest.mark.parametrize("path", ["/answer", "/files/plan.json?model=deepseek-v3&gpus=2048"])
def test_a_search_whose_client_went_away_ends(path: str, running: Running) -> None:
    key = read_question(LONG).key
    data = request("GET", path, running.port)
    if path == "/answer":
        data = posted(running.port, json.dumps({"form": LONG}).encode())
    with connected(running, data):
        until(lambda: running.desk.num_searches == 1)
    until(lambda: running.desk.num_searches == 0)
    assert running.desk.known(key) is None, "nobody waited for it"
    assert running.ask("GET", "/icon.svg")[0].status == 200
