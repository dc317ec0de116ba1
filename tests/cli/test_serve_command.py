"""`plan serve` as a command: where it listens, how it ends, and what stops it from starting."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys

import pytest

from planner.cli import main


def test_it_serves_until_interrupted() -> None:
    arguments = [sys.executable, "-m", "planner.cli", "serve", "--port", "0", "--model", "8b", "--gpus", "8"]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        host, port = server.stdout.readline().strip().removeprefix("http://").removesuffix("/").split(":")
        assert host == "127.0.0.1"
        link = http.client.HTTPConnection(host, int(port), timeout=30)
        link.request("GET", "/")
        text = link.getresponse().read().decode()
        link.close()
        assert '<option selected="selected">8b</option>' in text
    finally:
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=30)
    assert server.returncode == 130
    assert said == "note: answers this machine only; Ctrl-C ends it\n"


def test_a_port_in_use_is_an_error_with_one_that_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: --port: {port} is in use on 127.0.0.1"
    assert hint.startswith("hint: plan serve --port ")


def test_without_its_packages_it_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "planner.serve.server", raising=False)
    assert main(["serve"]) == 1
    said = capsys.readouterr().err
    assert "uvicorn, which is not installed" in said
    assert "pip install 'trainplan[serve]'" in said
