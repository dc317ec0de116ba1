"""The desk runs few searches, shares them, ends those that nobody waits for, and forgets the oldest answers."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from hostile import CLOSED, JSON, hostile, posted, request, status_of
from served import SMALL, Running
from tables import beside

from planner.answer import Plan
from planner.cli.views import read_question
from planner.errors import Infeasible, PlannerError
from planner.serve import desk as desk_module
from planner.serve import server
from planner.serve.controls import Question
from planner.serve.desk import KEPT, MAX_WAITING, Desk, Found, start, whole
from planner.serve.server import HOST

TABLES = beside(__file__)

NOTHING = Infeasible("nothing fits", "add GPUs")


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Searches that end when they are told to; how many run, and how many were ended."""
    state: dict[str, Any] = {"may_end": asyncio.Event(), "running": 0, "most": 0, "ended": 0}

    async def fake(case: object) -> AsyncGenerator[Found, None]:
        state["running"] += 1
        state["most"] = max(state["most"], state["running"])
        try:
            await state["may_end"].wait()
        except asyncio.CancelledError:
            state["ended"] += 1
            raise
        finally:
            state["running"] -= 1
        yield Found(NOTHING, is_final=True)

    monkeypatch.setattr(desk_module, "found_by", fake)
    return state


def question(gpus: int) -> Question:
    return read_question({**SMALL, "gpus": str(gpus)})


async def follow(desk: Desk, asked: Question) -> list[Found]:
    return [found async for found in desk.follow(asked)]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_same_question_is_searched_once_and_then_known(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk()
        both = [asyncio.create_task(follow(desk, question(8))) for _ in range(2)]
        await asyncio.sleep(0.01)
        searches["may_end"].set()
        assert [[found.answer for found in each] for each in await asyncio.gather(*both)] == [[NOTHING], [NOTHING]]
        assert searches["most"] == 1
        assert desk.known(question(8).key) is NOTHING

    run(test)


def test_a_search_that_nobody_waits_for_is_ended(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk()
        stays, leaves = (asyncio.create_task(follow(desk, question(8))) for _ in range(2))
        await asyncio.sleep(0.01)
        leaves.cancel()
        await asyncio.sleep(0.01)
        assert (searches["running"], searches["ended"]) == (1, 0)
        stays.cancel()
        await asyncio.sleep(0.01)
        assert (searches["running"], searches["ended"], desk.num_searches) == (0, 1, 0)

    run(test)


def test_few_searches_run_and_few_wait(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk(num_searches=2)
        waiting = [asyncio.create_task(follow(desk, question(8 * n))) for n in range(1, MAX_WAITING + 1)]
        await asyncio.sleep(0.05)
        assert searches["most"] == 2
        with pytest.raises(PlannerError, match="other questions"):
            await follow(desk, question(8 * MAX_WAITING + 8))
        searches["may_end"].set()
        await asyncio.gather(*waiting)
        assert searches["most"] == 2

    run(test)


def test_the_oldest_answers_are_forgotten(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk()
        searches["may_end"].set()
        asked = [question(8 * n) for n in range(1, KEPT + 2)]
        for each in asked:
            await follow(desk, each)
        assert desk.known(asked[0].key) is None
        assert desk.known(asked[1].key) is NOTHING

    run(test)


def test_a_search_in_a_process_ends_when_it_is_killed() -> None:
    process, connection = start(question(8).case)
    process.kill()
    with pytest.raises(EOFError):
        connection.recv()
    process.join(10)
    assert not process.is_alive()


def test_an_answer_never_gets_slower_until_it_is_final() -> None:
    told: list[Plan] = []
    final = whole(question(8).case, told.append)
    so_far = told[0]
    assert so_far.search.lower_bound_s <= final.search.lower_bound_s * (1 + 1e-9)
    assert so_far.step.step_s >= final.step.step_s * (1 - 1e-9)


AS_JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(("headers", "status"), TABLES["foreign_requests_are_refused"])
def test_foreign_requests_are_refused(running: Running, headers: dict[str, str], status: int) -> None:
    response, text = running.ask("POST", "/answer", "{}", {**AS_JSON, **headers})
    assert response.status == status
    assert not text.startswith(b"{")


def test_a_page_that_only_links_here_may_do_so(running: Running) -> None:
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert running.ask("GET", "/?model=8b", headers=visit)[0].status == 200
    assert running.ask("GET", "/files/plan.json?model=8b&gpus=8", headers=visit)[0].status == 403
    assert running.ask("GET", "/", headers={**visit, "Sec-Fetch-Dest": "iframe"})[0].status == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods_are_refused(running: Running, method: str) -> None:
    assert running.ask(method, "/")[0].status == 405


def test_large_bodies_are_refused(running: Running) -> None:
    assert running.ask("POST", "/answer", b"x" * 70_000, AS_JSON)[0].status == 413
    chunked = {**AS_JSON, "Transfer-Encoding": "chunked"}
    body = b"".join(b"4000\r\n" + b"x" * 0x4000 + b"\r\n" for _ in range(6)) + b"0\r\n\r\n"
    assert running.ask("POST", "/answer", body, chunked)[0].status == 413
    assert running.ask("GET", f"/?x={'x' * 20_000}")[0].status == 414


@pytest.mark.parametrize("body", TABLES["other_bodies_are_refused"])
def test_other_bodies_are_refused(running: Running, body: str) -> None:
    assert running.ask("POST", "/answer", body, AS_JSON)[0].status == 400


def test_every_response_forbids_foreign_scripts_and_frames(running: Running) -> None:
    for path in ("/", "/page.js", "/page.css", "/nothing"):
        headers = running.ask("GET", path)[0].headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers
    assert "unsafe" not in headers["content-security-policy"].partition("script-src")[2].partition(";")[0]


def test_what_the_address_says_is_escaped(running: Running) -> None:
    _, text = running.ask("GET", "/?gpus=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert b"<script>alert" not in text
    assert b"&lt;script&gt;" in text
    assert b'value="8"' not in text
    assert SMALL["gpus"].encode() not in text.partition(b'name="gpus"')[2][:40]


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


@pytest.mark.parametrize("kind", TABLES["a_request_that_does_not_end_is_hung_up_on"])
def test_a_request_that_does_not_end_is_hung_up_on(kind: str, running: Running, monkeypatch: Any) -> None:
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


def test_a_whole_request_outlasts_the_time_that_its_sending_may_take(running: Running, monkeypatch: Any) -> None:
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
