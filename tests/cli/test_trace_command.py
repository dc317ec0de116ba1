"""`plan trace` writes events that a trace viewer accepts, for every stage of the plan."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from planner.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "plan.json"
    assert main(["--model", "8b", "--gpus", "16", "--pp", "4", "-s", "4096", "-b", "64", "-o", str(path)]) == 0
    return path


def _run(*arguments: str) -> int:
    return main(["trace", *arguments])


def test_every_stage_computes_waits_and_exchanges_gradients(plan_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert _run(str(plan_file), "-o", str(target)) == 0
    events = json.loads(target.read_text())["traceEvents"]
    layout = json.loads(plan_file.read_text())["best"]["parallelism"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(layout["pp"]))
    computed = [event for event in slices if event["name"].startswith(("forward", "backward"))]
    assert len(computed) == 2 * layout["pp"] * layout["vpp"] * layout["num_microbatches"]
    reductions = [event for event in slices if event["name"] == "reduce gradients"]
    assert len(reductions) == (layout["pp"] * layout["vpp"] if layout["dp"] > 1 else 0)
    for rank in range(layout["pp"]) if reductions else ():
        ours = sorted((event["ts"], event["dur"]) for event in reductions if event["pid"] == rank)
        assert all(end >= (begin + length) * (1 - 1e-9) for (begin, length), (end, _) in pairwise(ours))
        last = max(event["ts"] for event in computed if event["pid"] == rank)
        assert ours[0][0] < last or layout["vpp"] == 1, "the first chunk to end does not wait for the others"
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)


@pytest.mark.parametrize(
    "options",
    [
        # an all-reduce among many ranks that two passes cannot hide
        ["--model", "8b", "--gpus", "512", "--pp", "2", "-s", "2048", "-b", "512"],
        # torch's stages wait for the reduction
        ["--model", "8b", "--gpus", "128", "--pp", "2", "-s", "4096", "-b", "64", "--runtime", "torchtitan"],
        # ZeRO-3 without a pipeline gathers and reduces in every micro-batch
        ["--model", "8b", "--gpus", "16", "--pp", "1", "-s", "4096", "-b", "64", "--runtime", "torchtitan"],
        ["--model", "8b", "--gpus", "4", "--pp", "4", "-s", "4096", "-b", "32", "--tp", "1", "--cp", "1"],
    ],
    ids=["many ranks", "torchtitan", "every micro-batch", "one replica"],
)
def test_ends_with_the_step(options: list[str], tmp_path: Path) -> None:
    saved, target = tmp_path / "plan.json", tmp_path / "trace.json"
    assert main([*options, "--top", "1", "-o", str(saved)]) == 0
    assert _run(str(saved), "-o", str(target)) == 0
    slices = [event for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"]
    end_s = max(event["ts"] + event["dur"] for event in slices) / 1e6
    assert end_s == pytest.approx(json.loads(saved.read_text())["best"]["step"]["step_s"], rel=1e-9)
    assert min(event["ts"] for event in slices) >= 0
    threads = {(event["pid"], event["tid"]) for event in slices}
    for thread in threads:
        ours = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        assert all(end >= begin + length - 1e-9 * end_s * 1e6 for (begin, length), (end, _) in pairwise(ours))


def test_refuses_an_alternative_that_is_not_there(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(plan_file), "--alternative", "99", "-o", "-") == 2
    assert "--alternative" in capsys.readouterr().err


def test_keeps_a_file_that_is_there(plan_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    target.write_text("mine")
    assert _run(str(plan_file), "-o", str(target)) == 2
    assert target.read_text() == "mine"
