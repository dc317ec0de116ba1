"""`plan rebalance`: what moved, what it gains, and the plan that comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
from probes import probe_result

from planner.cli import main
from planner.plan_file import read_plan


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rebalance") / "plan.json"
    job = ["--model", "8b", "--gpus", "16", "--hardware", "h200", "-s", "4096", "-b", "64"]
    assert main(["evaluate", *job, "--tp", "2", "--pp", "4", "--dp", "2", "-q", "-o", str(path)]) == 0
    return path


def run(*arguments: str) -> int:
    return main(["rebalance", *arguments])


def test_a_slow_stage_gives_layers_away(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "balanced.json"
    assert run(str(plan_file), "--slow-stage", "2:1.5", "-o", str(target)) == 0
    out = capsys.readouterr().out
    assert "× 1.500" in out
    assert "% shorter" in out
    assert max(map(len, out.splitlines())) <= 80
    before, after = read_plan(str(plan_file)), read_plan(str(target))
    assert after.stages[2].num_layers < before.stages[2].num_layers
    assert after.best.rank_factors == (1.0, 1.0, 1.5, 1.0)
    assert after.inputs_sha256 == before.inputs_sha256


def test_a_probe_says_which_stage_is_slow(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(str(plan_file))
    stages = plan.best.stages
    slow = [1.0, 1.4, 1.0, 1.0]
    result = probe_result(plan, lambda j: (slow[j] * stages[j].forward_s, slow[j] * stages[j].backward_s))
    probe = plan_file.with_name("probe.json")
    probe.write_text(result.model_dump_json())
    assert run(str(plan_file), str(probe), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    factors = [stage["rank_factor"] for stage in data["stages"]]
    assert factors.index(max(factors)) == 1
    assert data["stages"][1]["num_layers_after"] < data["stages"][1]["num_layers_before"]
    assert data["step_after_s"] < data["step_before_s"]
    assert data["gain_fraction"] == pytest.approx(1 - data["step_after_s"] / data["step_before_s"])


def test_a_stage_that_did_not_run_is_said_to_be_like_another(plan_file: Path, capsys: Any) -> None:
    plan = read_plan(str(plan_file))
    probe = plan_file.with_name("some.json")
    probe.write_text(probe_result(plan, lambda j: (1e-2, 2e-2), stages=(0, 1)).model_dump_json())
    assert run(str(plan_file), str(probe)) == 0
    out = capsys.readouterr().out
    assert out.count("(like stage 1)") == 1
    assert out.count("(median)") == 1
    assert max(map(len, out.splitlines())) <= 80
    assert run(str(plan_file), str(probe), "--json") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["rank_factor_guessed"] for stage in stages] == [None, None, "like stage 1", "median"]


def test_nothing_to_gain_is_said(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    balanced = tmp_path / "balanced.json"
    assert run(str(plan_file), "--slow-stage", "2:1.01", "-q", "-o", str(balanced)) == 0
    capsys.readouterr()
    assert run(str(balanced), "--slow-stage", "2:1") == 0
    assert "no layer that may move makes it shorter" in capsys.readouterr().out


def test_slownesses_multiply_what_the_plan_knows(plan_file: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.json", tmp_path / "twice.json"
    assert run(str(plan_file), "--slow-stage", "2:1.5,3:1.1", "-q", "-o", str(once)) == 0
    assert run(str(once), "--slow-stage", "2:2", "-q", "-o", str(twice)) == 0
    assert read_plan(str(twice)).best.rank_factors == (1.0, 1.0, 3.0, 1.1)
