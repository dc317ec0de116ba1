"""`plan --phases`: the options of a phase, what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import Plan
from planner.cli import main

JOB = ["--model", "8b", "--gpus", "16", "--tp", "2", "--pp", "1", "--micro-batch-size", "1", "--switch", "default"]
PHASES = """
phases:
  - {name: short, tokens: 100B, seq_length: 4096, global_batch_size: 128, rampup: {from: 64, by: 32, tokens: 10B}}
  - {name: more, tokens: 400B, seq_length: 4096, batch_tokens: 1048576}
  - {name: packed, steps: 1000, seq_length: 32768, global_batch_size: 32, dtype: fp8, lengths: {mean: 900, sigma: 1.2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    (folder / "phases.yaml").write_text(PHASES)
    return folder


@pytest.fixture(scope="module")
def answer(folder: Path) -> dict[str, Any]:
    """The run as JSON, which has been saved as a folder too."""
    path = str(folder / "phases.yaml")
    assert main([*JOB, "--runtime", "torchtitan", "--phases", path, "-q", "-o", f"{folder}/run/"]) == 0
    return json.loads((folder / "run" / "phases.json").read_text())


def test_a_phase_has_its_own_options(answer: dict[str, Any]) -> None:
    short, more, packed = answer["phases"]
    assert (short["global_batch_size"], [one["global_batch_size"] for one in short["batches"]]) == (128, [64, 96, 128])
    assert more["global_batch_size"] == 256
    assert (packed["seq_length"], packed["dtype"], packed["steps"]) == (32768, "fp8", 1000)
    assert 0 < packed["document_fraction"] < 0.2
    assert "-s 4096" in more["plan"]["command"].replace("--seq-length", "-s")
    assert "--phases" in packed["plan"]["command"]


def test_every_plan_is_a_file_that_commands_read(folder: Path, answer: dict[str, Any]) -> None:
    for phase in answer["phases"]:
        path = folder / "run" / f"plan-{phase['name']}.json"
        plan = Plan.load(path)
        assert plan.training.seq_length == phase["seq_length"]
        assert plan.run_cost.days == phase["days"]
        assert phase["plan"]["best"] == json.loads(path.read_text())["best"]
    exported = folder / "exported"
    assert (
        main(["export", str(folder / "run" / "plan-more.json"), "--to", "torchtitan", "-o", str(exported), "-q"]) == 0
    )
    assert any(exported.iterdir())


def test_a_folder_is_not_written_twice_unasked(folder: Path, answer: dict[str, Any], capsys: Any) -> None:
    path = str(folder / "phases.yaml")
    assert main([*JOB, "--runtime", "torchtitan", "--phases", path, "-o", str(folder / "run")]) == 2
    assert "plan-short.json: already exists" in capsys.readouterr().err


def test_the_table_fits_eighty_columns(folder: Path, capsys: Any) -> None:
    (folder / "one.yaml").write_text(
        "phases:\n  - {name: a-name-that-is-longer-than-its-column, tokens: 1T, global_batch_size: 128, "
        "lengths: {p50: 9, p90: 999}, rampup: {from: 64, by: 32, tokens: 1B}}\n"
    )
    assert main([*JOB, "-s", "4096", "--phases", str(folder / "one.yaml"), "--dp", "8"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "--rampup-batch-size 64 32 244141" in " ".join(text.split())


RECIPES = Path(__file__).parents[2] / "docs" / "phases"
ALIKE = ["--gpus", "64", "--pp", "1", "--micro-batch-size", "1", "--switch", "default", "--top", "1", "--json", "-q"]


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("recipe", "job", "tokens", "lengths"),
    [
        ("llama-3-405b", ["--model", "8b", "--tp", "8"], 15.6e12, [4096, 8192, 8192, 16384, 131072]),
        ("deepseek-v3", ["--model", "deepseek-v2-lite", "--tp", "1", "--ep", "8"], 14.8e12, [4096, 32768, 131072]),
    ],
)
def test_published_recipes_plan_and_sum(
    recipe: str, job: list[str], tokens: float, lengths: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--phases", str(RECIPES / f"{recipe}.yaml"), *job, *ALIKE]) == 0
    answer = json.loads(capsys.readouterr().out)
    phases = answer["phases"]
    assert [phase["seq_length"] for phase in phases if phase["seq_length"] in lengths] == lengths
    assert sum(phase["tokens"] for phase in phases) == answer["total"]["tokens"] == pytest.approx(tokens, rel=0.01)
    wall = sum(phase["days"] + phase["stop_s"] / 86400 for phase in phases)
    assert answer["total"]["days"] == pytest.approx(wall)
    assert len(answer["changes"]) == sum(phase["stop_s"] > 0 for phase in phases)
