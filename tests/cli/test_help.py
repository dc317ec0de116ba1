"""Help answers everywhere, ends in an example, and fits 80 columns."""

import http.client
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from tables import beside

import planner
from planner.cli import main
from planner.cli.app import COMMANDS, TOPICS
from planner.cli.options import DTYPES, SCHEDULES, SECTIONS, first_screen
from planner.report.view import SECTIONS as OF_A_VIEW
from planner.schedule.orders import SCHEDULES as ORDERS
from planner.specs.training import Dtype
from planner.trainers.shipped import calibration_date

TABLES = beside(__file__)

OF_A_JOB = ("evaluate", "explain", "sweep", "serve", "observe")

EVERY = [[], *([name] for name in COMMANDS)]


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_with_an_example(command: list[str], flag: str, capsys: Any) -> None:
    assert main([*command, flag]) == 0
    shown = capsys.readouterr().out
    head, _, example = shown.partition("Example:\n")
    assert len(head.split("\n\n")[1].strip()) > 20
    assert example.strip().startswith(" ".join(["plan", *command]))


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_help_fits_80_columns_and_is_not_cut(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*command, "-h"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "..." not in shown.partition("\n")[2], "but in the usage, for arguments that repeat"


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("topic", ["all", *TOPICS])
def test_every_option_is_explained_under_its_topic(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [line for line in lines(capsys, "-h", topic) if line.startswith("  -")]
    assert len(options) > (50 if topic == "all" else 3)
    assert all(len(line.split("  ")) > 2 for line in options)


def test_the_first_help_is_one_screen_with_every_command_and_options_that_exist(capsys: Any) -> None:
    first, every = lines(capsys, "-h"), " ".join(lines(capsys, "-h", "all"))
    assert len(first) <= 38
    named = re.findall(r"--[a-z][a-z-]+", " ".join(name for name, _ in first_screen()))
    assert len(named) > 15
    assert [name for name in named if f"{name} " not in every] == []
    listed = " ".join(first).partition("Commands:")[2]
    assert [name for name, row in COMMANDS.items() if row.group and name not in listed] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_is_its_own_options_and_a_line_for_the_others(command: str, capsys: Any) -> None:
    own = lines(capsys, command, "-h")
    assert len(own) <= 60
    assert ("--debug" if command not in OF_A_JOB else "plan -h all") in " ".join(own[-3:])
    assert not any(line.startswith("  -q,") for line in own)
    assert any(line.startswith("  -q,") for line in lines(capsys, command, "-h", "all"))


def test_what_shells_complete_is_what_there_is() -> None:
    assert get_args(Dtype) == DTYPES
    assert {*ORDERS, "auto"} == set(SCHEDULES)
    assert set(SECTIONS) <= {*OF_A_VIEW, "memory"}
    sources = [path.read_text() for path in Path(planner.__file__).parent.glob("[rc]*/*.py")]
    assert set(re.findall(r"--show ([a-z]+)", "".join(sources))) <= set(SECTIONS)


def test_version_names_the_calibration_the_solver_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    ours, *others = capsys.readouterr().out.split(", ")
    assert ours == f"trainplan {planner.__version__} (calibration of {calibration_date()})"
    assert [other.split()[0] for other in others] == ["Python", "pulp", "highspy", "torch"]


@pytest.mark.parametrize(("words", "index", "expected"), TABLES["shells_complete_names"])
def test_shells_complete_names(words: str, index: int, expected: str, monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"_PLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 0
    assert expected in capsys.readouterr().out.split()


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


def test_without_its_packages_it_names_them(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "planner.serve.server", raising=False)
    assert main(["serve"]) == 1
    said = capsys.readouterr().err
    assert "uvicorn, which is not installed" in said
    assert "pip install 'trainplan[serve]'" in said
