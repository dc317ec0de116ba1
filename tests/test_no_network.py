"""No command reaches for the network: where every socket that leaves the machine is refused, all of them still work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUARD = '''
"""Refuse every socket that leaves this machine, in this process and in all that it starts, and write it down."""
import os, sys

LOCAL = ("127.0.0.1", "localhost", "::1", "")

def leaves(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        address = args[1]
        return isinstance(address, tuple) and address[0] not in LOCAL
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        return args[0] is not None and args[0] not in LOCAL
    return event in ("urllib.Request", "ftplib.connect", "smtplib.connect")

def hook(event, args):
    if leaves(event, args):
        with open(os.environ["REACHED"], "a") as file:
            file.write(f"{event} {args[:2]!r} {sys.argv}\\n")
        raise OSError(f"no network: {event}")

sys.addaudithook(hook)
'''
RUN = """
import contextlib, io, pathlib, shlex, sys
import smoke
from planner.cli import main

smoke.prepare(pathlib.Path())
for line in smoke.FIRST:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    if code:
        sys.exit(f"{line}: exit {code}: {err.getvalue()}")
print(len(smoke.FIRST), "lines")
"""
ASK = """
import socket, urllib.request, sys
for reach in (
    lambda: socket.create_connection(("192.0.2.1", 80), 1),
    lambda: socket.getaddrinfo("example.org", 80),
    lambda: urllib.request.urlopen("http://example.org"),
    lambda: socket.socket().bind(("0.0.0.0", 0)),
):
    try:
        reach()
    except OSError as error:
        print(error)
"""
SERVE = """
import http.client, signal, subprocess, sys
words = [sys.executable, "-m", "planner.cli", "serve", "--port", "0", "-q"]
server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
host, _, port = server.stdout.readline().strip().rstrip("/").rpartition("/")[2].partition(":")
link = http.client.HTTPConnection(host, int(port), timeout=60)
link.request("GET", "/?model=llama-3.2-1b&gpus=8")
text = link.getresponse().read().decode()
server.send_signal(signal.SIGINT)
print(host, '<option selected="selected">llama-3.2-1b</option>' in text, server.wait(30))
"""


def run(code: str, folder: Path) -> tuple[str, str]:
    """What a process without a network prints, and where it and those that it started reached to."""
    site, reached = folder / "site", folder / "reached"
    site.mkdir()
    reached.touch()
    (site / "sitecustomize.py").write_text(GUARD)
    paths = os.pathsep.join(map(str, (site, ROOT, ROOT / "scripts")))
    environment = {**os.environ, "PYTHONPATH": paths, "REACHED": str(reached)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, reached.read_text()


def test_the_guard_refuses_what_leaves_the_machine(tmp_path: Path) -> None:
    out, reached = run(ASK, tmp_path)
    assert out.count("no network: ") == 4
    assert len(reached.splitlines()) == 4


def test_no_command_reaches_for_the_network(tmp_path: Path) -> None:
    out, reached = run(RUN, tmp_path)
    assert out.endswith(" lines\n")
    assert reached == ""


def test_the_page_listens_on_this_machine_alone_and_reaches_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs the serve extra")
    out, reached = run(SERVE, tmp_path)
    assert (out, reached) == ("127.0.0.1 True 130\n", "")
