"""`plan observe --follow`: exit code 7, lines, JSON lines, and errors."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main, observe_command

LINE = (
    " iteration {number:8d}/     500 | consumed samples: 1 | elapsed time per iteration (ms): {ms:.1f} | "
    "global batch size:   128 | lm loss: 2.0E+00 | number of skipped iterations:   0 |"
)
FINE, SLOW = [9000.0] * 60, [9000.0] * 60 + [12000.0] * 40


def log(milliseconds: list[float]) -> str:
    return "".join(f"{LINE.format(number=number, ms=ms)}\n" for number, ms in enumerate(milliseconds, start=1))


@contextmanager
def piped(text: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard input that gives this text and ends."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        feeder = threading.Thread(target=lambda: (os.write(writer, text.encode()), os.close(writer)))
        feeder.start()
        yield
        feeder.join()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_command, "POLL_S", 0.001)


def test_a_run_that_leaves_its_band_is_exit_code_7(capsys: Any, monkeypatch: Any) -> None:
    with piped(log(SLOW), monkeypatch):
        assert main(["observe", "--follow", "-"]) == 7
    out, err = capsys.readouterr()
    assert "step 60 of 500  9.000 s a step  in band up to 9.450 s" in out
    assert "Slow: a step takes 33% longer than predicted" in out
    assert err.startswith("error: stdin: above the band up to 9.45 s")
    assert max(map(len, out.splitlines())) <= 100


def test_json_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(log(SLOW), monkeypatch):
        assert main(["observe", "--follow", "-", "--json"]) == 7
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in found] == [20, 40, 60, 80, 82]
    assert [one["final"] for one in found] == [False] * 4 + [True]
    last = found[-1]
    assert (last["schema_version"], last["rings"], last["place"], last["out_steps"]) == (1, True, "above", 20)


def test_interrupted_is_the_final_answer_and_no_failure(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(log(FINE))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(observe_command.time, "sleep", interrupt)
    assert main(["observe", "--follow", str(path)]) == 0
    assert "median step" in capsys.readouterr().out


def test_the_example_of_the_docs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (
        (Path(__file__).parents[2] / "docs" / "OBSERVE.md")
        .read_text()
        .partition("## A log that grows")[2]
        .split("```\n")
    )
    shown, error = blocks[1], blocks[3]
    steps = [15000.0 if n < 3 else 9000.0 + n % 7 * 10 if n <= 70 else 11000.0 for n in range(1, 121)]
    with piped(log(steps), monkeypatch):
        assert main(["observe", "--follow", "-"]) == 7
    out, err = capsys.readouterr()
    assert out.startswith(shown)
    assert err.startswith(error)


def test_input_without_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with piped("hello\nworld\n", monkeypatch):
        assert main(["observe", "--follow", "-"]) == 2
    assert "has no lines of steps" in capsys.readouterr().err
