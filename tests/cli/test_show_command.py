"""`plan show` prints again whatever a command saved."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from planner.cli import main

JOB = ["--model", "1b", "--gpus", "8", "--no-history", "--top", "1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert main([*JOB, "-o", str(folder / "plan.json")]) == 0
    return folder


def test_a_plan_is_shown_as_it_was_answered(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "plan.json"
    capsys.readouterr()
    assert main(["show", str(path), "--show", "rejected,proof"]) == 0
    shown = capsys.readouterr().out
    assert "llama-3.2-1b on 8" in shown
    assert "legal shapes" in shown
    assert "Where the" not in shown
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        (["sweep", *JOB[:2], "--gpus", "8,16", "--no-history", "--json"], "16 GPUs"),
        (["compare", "PLAN", "PLAN", "--json"], "plan"),
        (["--from", "PLAN", "--gpus", "4", "--json"], "Ways to go on"),
        (["evaluate", *JOB[:5], "--tp", "2", "--json"], "TP 2"),
    ],
)
def test_other_answers_are_shown_as_they_were_answered(
    words: list[str], noun: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("PLAN", str(saved / "plan.json")) for word in words]) == 0
    path = saved / f"{words[0].strip('-')}.json"
    path.write_text(capsys.readouterr().out)
    assert main(["show", str(path)]) == 0
    assert noun in capsys.readouterr().out


def test_pictures_are_written_of_a_plan_on_stdin_and_nothing_else_is_shown(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, trace = saved / "page.html", saved / "trace.json"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((saved / "plan.json").read_bytes())))
    assert main(["show", "-", "--page", str(page), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == ""
    assert "<svg" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
