"""`plan probe`: its options, its files, its report and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from small_plans import run, small_plan

from planner.cli import main
from planner.cli.measurements import probe_of


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan().to_json()))
    return str(path)


def test_command_prints_json_and_traces(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["probe", plan_file, "--device", "cpu", "--steps", "1", "--json", "--trace", str(trace)]) == 0
    result = probe_of(json.loads(capsys.readouterr().out), "stdout")
    assert result.agrees
    events = json.loads(trace.read_text())["traceEvents"]
    spans = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(0, "0F0"), (1, "0F0"), (0, "1B3"), (1, "1B3")} <= spans
    ends = [
        max(event["ts"] + event["dur"] for event in events if event.get("pid") == pid and "dur" in event)
        for pid in (0, 1)
    ]
    assert ends[0] == pytest.approx(ends[1]), "of the model in small as long as of the plan"
    assert any("to be as long as measured" in event["args"]["name"] for event in events if event["ph"] == "M")


@pytest.mark.parametrize("options", [[], ["--stage", "1"]])
def test_a_tolerance_that_judges_nothing_is_told(options: list[str], plan_file: str, capsys: Any) -> None:
    assert main(["probe", plan_file, "--device", "cpu", "--steps", "1", "--tolerance", "1e-9", *options]) == 0
    assert "--tolerance 1e-09: nothing that this run measured is judged by it" in capsys.readouterr().err


def test_command_splits_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan(tp=2, cp=2, pp=2).to_json()))
    assert main(["probe", str(path), "--device", "cpu", "--steps", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "run TP 2 × CP 2 × PP 2 × DP 1" in printed
    assert "ok loss" in printed
    assert "cp all-gather of " in printed
    assert " KiB over 2 ranks" in printed
    assert "0.00 MiB" not in printed
    assert "not measured: GPU seconds" in printed


def test_a_mismatch_is_exit_code_6(plan_file: str, monkeypatch: Any, capsys: Any) -> None:
    import faulty

    monkeypatch.setattr("planner.probe.probe.stage_process", faulty.stage_out_of_memory)
    assert main(["probe", plan_file, "--device", "cpu", "--stage", "1"]) == 6
    captured = capsys.readouterr()
    assert "stage 1 (rank 1) asked for 2.500 GiB more in warm-up, at 1F0" in " ".join(captured.out.split())
    assert "error: the run contradicts the plan" in captured.err


def test_a_report_is_printed_before_a_file_that_cannot_be_written(
    plan_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = run(small_plan(), stages="all")
    monkeypatch.setattr("planner.probe.probe.probe", lambda plan, options: probed)
    folder = tmp_path / "gone"
    folder.mkdir()

    def full(path: Path, data: bytes, force: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner.files._replace", full)
    assert main(["probe", plan_file, "--stage", "all", "-o", str(folder / "probe.json")]) == 1
    captured = capsys.readouterr()
    assert "the run agrees with the plan" in captured.out
    assert "each stage: median of 1" in captured.out
    assert "probe.json: cannot be written: No space left on device" in captured.err


def test_a_trace_without_a_step_is_not_written(plan_file: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    probed = run(small_plan(), stages=0)
    monkeypatch.setattr("planner.probe.probe.probe", lambda plan, options: probed)
    trace = tmp_path / "trace.json"
    assert main(["probe", plan_file, "--stage", "all", "--trace", str(trace)]) == 0
    assert "trace.json is not written: no step ran to its end" in capsys.readouterr().err
    assert not trace.exists()


def test_no_gpu(plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["probe", plan_file, "--device", "cuda"]) == 5
    assert "torch sees no GPU" in capsys.readouterr().err
