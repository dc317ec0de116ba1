"""`plan --from plan.json --gpus N`: what it answers, saves and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.answer import Plan
from planner.cli import main

JOB = ["--model", "8b", "--hardware", "h100", "--gpus", "32", "-s", "4096", "-b", "64", "--tp", "2", "--pp", "2"]
QUICK = ["--schedule", "1f1b", "--recompute", "none", "--top", "1", "-q"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replan") / "plan.json"
    assert main(["evaluate", *JOB, "--dp", "8", "-q", "-o", str(path)]) == 0
    return path


def answer(saved: Path, *more: str) -> list[str]:
    return ["--from", str(saved), "--gpus", "28", *QUICK, *more]


def test_the_json_is_a_plan_with_the_ways_beside_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(answer(saved, "--json")) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    resume = data.pop("resume")
    plan = Plan.from_json(data)
    chosen = resume["choices"][resume["recommended"]]
    assert chosen["parallelism"] == plan.parallelism.model_dump(mode="json")
    assert {"split", "reshard", "wait"} <= {choice["kind"] for choice in resume["choices"]}
    assert resume["num_gpus"] == plan.cluster.num_gpus == 28
    assert resume["checkpoint"]["source"]
    assert all(row["gpu_hours"] == row["idle_gpu_hours"] + row["lost_gpu_hours"] for row in resume["spares"])
    assert plan.command.startswith("plan --gpus 28")


def test_what_is_saved_is_a_plan_that_commands_read(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.json"
    assert main(answer(saved, "--keep", "tp, pp", "-o", str(new))) == 0
    assert "Ways to go on" in capsys.readouterr().out
    assert Plan.load(new).parallelism.tp == 2
    assert main(["compare", str(saved), str(new)]) == 0
    assert main(answer(saved, "-o", str(new))) == 2
    assert "--force" in capsys.readouterr().err


def test_options_take_the_place_of_the_jobs_own(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["-b", "56", "--spares", "1", "--failures-per-1000-gpu-days", "2", "--tokens", "1T", "--json"]
    assert main(answer(saved, *more)) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "resume.json"
    jsonschema.validate(data, json.loads(schema.read_text()))
    assert data["training"]["global_batch_size"] == 56
    assert data["training"]["operations"]["num_spare_nodes"] == 1
    assert data["run_cost"]["days"] > 0
    assert {choice["global_batch_size"] for choice in data["resume"]["choices"]} == {56, 64}
    rates = [failure["per_day"] for failure in data["resume"]["failures"]]
    assert sum(rates) == pytest.approx(2 * data["best"]["parallelism"]["num_gpus_used"] / 1000)


def test_the_same_gpus_leave_nothing_to_do(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(saved), "--gpus", "32"]) == 0
    assert capsys.readouterr().out == "Nothing to do: the plan is for 32 GPUs.\n"


def test_an_infeasible_job_is_json_too(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*answer(saved, "--keep", "tp,pp,dp"), "--json"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["error"]["hint"].startswith("leave ")
    assert data["remedy"]["options"]
