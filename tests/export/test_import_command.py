"""`plan import` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from samples import SCRIPT

from planner.cli import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "run.sh").write_text(SCRIPT)
    return str(tmp_path / "run.sh")


def test_the_command_prices_and_compares(script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "run.jsonl")
    assert main(["import", script, "--json", "-o", saved]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["unknown"] == {"--brand-new-switch": "7"}
    assert "warning: not understood: --brand-new-switch 7" in captured.err
    assert answer["evaluated"]["model"]["name"] == "llama-3.1-70b", "known by its sizes"
    assert [stage["num_layers"] for stage in answer["evaluated"]["best"]["stages"]] == [19, 20, 20, 21]
    assert answer["own"]["step"]["step_s"] <= answer["evaluated"]["best"]["step"]["step_s"]
    assert answer["why"]
    assert main(["evaluate", "--runs", saved, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["step"]["step_s"] == answer["evaluated"]["best"]["step"]["step_s"]


def test_the_command_for_eyes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", script, "--no-search"]) == 0
    out = capsys.readouterr().out
    assert "TP 4 × PP 4 × DP 8" in out
    assert "Not understood" in out
    assert "--brand-new-switch 7" in out


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\0\1")
    assert main(["import", str(tmp_path / "binary")]) == 2
    assert main(["import", str(tmp_path / "missing")]) == 2
    err = capsys.readouterr().err
    assert "is no configuration" in err
    assert "no such file" in err
