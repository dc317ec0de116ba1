"""Requests that our own page does not send are refused before anything is done."""

from __future__ import annotations

import pytest
from served import SMALL, Running

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Host": "localhost:1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_foreign_requests_are_refused(running: Running, headers: dict[str, str], status: int) -> None:
    response, text = running.ask("POST", "/answer", "{}", {**JSON, **headers})
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
    assert running.ask("POST", "/answer", b"x" * 70_000, JSON)[0].status == 413
    chunked = {**JSON, "Transfer-Encoding": "chunked"}
    body = b"".join(b"4000\r\n" + b"x" * 0x4000 + b"\r\n" for _ in range(6)) + b"0\r\n\r\n"
    assert running.ask("POST", "/answer", body, chunked)[0].status == 413
    assert running.ask("GET", f"/?x={'x' * 20_000}")[0].status == 414


@pytest.mark.parametrize(
    "body", ["", "no JSON", "[]", "{}", '{"form": 1}', '{"form": {"gpus": 8}}', '{"form": {}, "shown": 1}']
)
def test_other_bodies_are_refused(running: Running, body: str) -> None:
    assert running.ask("POST", "/answer", body, JSON)[0].status == 400


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
