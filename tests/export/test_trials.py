"""`plan export --trials`: the next best layouts as short runs, and a script that ranks their logs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import preflight_names

from planner.answer import Plan
from planner.export.export import trials_of, write_trials

Planned = Callable[..., Plan]


def test_trials_run_and_are_ranked(planned: Planned, tmp_path: Path) -> None:
    plans = [planned("llama-3.1-8b", 16, tp=tp) for tp in (1, 2, 4)]
    trials, notes = trials_of(plans, "megatron", None, force=True)
    assert [trial.folder for trial in trials] == ["trial-0", "trial-1", "trial-2"]
    assert notes == []
    write_trials(trials, tmp_path, force=False)
    run = (tmp_path / "run_trials.sh").read_text()
    assert run.count("MOCK=1 bash launch.sh") == 3
    assert (tmp_path / "trial-1" / "launch.sh").is_file()
    for number, ms in ((0, 4000.0), (2, 2500.0)):
        lines = [
            f"iteration {i}/ 20 | elapsed time per iteration (ms): {60_000 if i < 5 else ms} |\n" for i in range(20)
        ]
        (tmp_path / f"trial-{number}" / "first_run.log").write_text("".join(lines))
    out = subprocess.run(
        [sys.executable, str(tmp_path / "rank_trials.py")], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["trial-2", "trial-0", "trial-1"], "the fastest first, those without a log last"
    assert rows[0][1] == "2.500", "the first steps are left out"
    assert rows[0][3] == f"{plans[2].step.step_s:.3f}"


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("Step Time : 3.25s GPU utilization: 640.1MODEL_TFLOP/s/GPU", 3.25),
        ("step: 10  loss: 5.1  memory: 40.1GiB(50%)  tps: 4,096  tflops: 200", 2.0),
        ("RunningAvgSamplesPerSec=16.0, CurrSamplesPerSec=16.0", 2.0),
    ],
)
def test_logs_of_other_trainers(line: str, seconds: float, tmp_path: Path) -> None:
    trial = {
        "folder": "trial-0",
        "layout": "x",
        "step_s": 2.0,
        "tokens_per_step": 65536,
        "global_batch_size": 32,
        "num_gpus": 8,
    }
    (tmp_path / "trial-0").mkdir()
    (tmp_path / "trial-0" / "a.log").write_text(f"{line}\n" * 3)
    (tmp_path / "trials.json").write_text(json.dumps({"trials": [trial]}))
    assert preflight_names()["measured_s"](tmp_path / "trial-0", trial) == (pytest.approx(seconds), 3)


def test_a_target_without_a_first_run_of_its_own(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, runtime="torchtitan", zero_stage=3)
    trials, _ = trials_of([plan], "torchtitan", None, force=True)
    assert trials[0].command.startswith(("bash launch.sh", "MOCK=1 bash launch.sh"))
