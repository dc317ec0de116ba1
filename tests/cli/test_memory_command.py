"""`plan memory` shows a plan's stages as table, JSON, picture and snapshot, and refuses what it cannot do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from planner.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("memory") / "plan.json"
    options = ["--gpus", "4", "--pp", "2", "--tp", "2", "-s", "1024", "-b", "16", "-o", str(path)]
    assert main(["evaluate", "--model", "8b", *options]) == 0
    return str(path)


def test_json_adds_up_to_the_plan(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", plan_file, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    planned = json.loads(Path(plan_file).read_text())["best"]["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1]
    for stage, plan in zip(stages, planned, strict=True):
        assert stage["peak_bytes"] == plan["memory"]["peak_allocated_bytes"] == max(size for _, size in stage["curve"])
        assert sum(tensor["bytes"] for tensor in stage["tensors"]) == stage["peak_bytes"]
        keys = {"name", "layer", "microbatch", "shape", "dtype", "bytes", "from", "to"}
        assert all(keys <= tensor.keys() for tensor in stage["tensors"])


def test_the_table_fits_a_terminal(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", plan_file, "--stage", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "Memory at the peak of each stage" in text
    assert "mlp up [1024, 14336] bf16" in text
    assert "recompute all layers" in text


def test_pictures_and_a_snapshot(plan_file: str, tmp_path: Path) -> None:
    picture, saved, pickled = (tmp_path / name for name in ("m.svg", "m.json", "m.pickle"))
    options = ["--snapshot", str(pickled), "-o", str(saved), "--plot", str(picture)]
    assert main(["memory", plan_file, "--stage", "0", *options]) == 0
    assert "activations" in picture.read_text()
    assert pickle.loads(pickled.read_bytes())["device_traces"][0]
    assert [stage["stage"] for stage in json.loads(saved.read_text())["stages"]] == [0]
