"""`explain` is `plan explain` as a function: the same answer as data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.cli import main
from planner.search.why.explain import explain
from planner.search.why.explanation import Explanation
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec

JOB = ["--model", "8b", "--gpus", "16", "-s", "4096", "-b", "64"]
TOO_LARGE: dict[str, Any] = {"tp": (1,), "pp": (1,), "cp": (1,), "micro_batch_size": (16,), "recompute": ("none",)}


def explained(model: str = "8b", num_gpus: int = 16, **limits: Any) -> Explanation:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    return explain(load_model(model), cluster, training, limits=SearchLimits(time_limit_s=60.0, **limits))


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("pins", "verdict"), [({"tp": (8,)}, "slower"), ({"tp": (3,)}, "refused"), (TOO_LARGE, "does_not_fit")]
)
def test_the_answer_is_what_the_command_prints(pins: dict[str, Any], verdict: str, capsys: Any) -> None:
    answer = explained(**pins)
    assert answer.verdict == verdict
    words = [word for axis, (value,) in pins.items() for word in (f"--{axis.replace('_', '-')}", str(value))]
    assert main(["explain", *JOB, *words, "--time-limit", "60", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(answer.to_json()))


def test_the_nearest_miss_is_the_one_that_plan_names(capsys: pytest.CaptureFixture[str]) -> None:
    nearest = explained(**TOO_LARGE).pinned
    words = [word for axis, (value,) in TOO_LARGE.items() for word in (f"--{axis.replace('_', '-')}", str(value))]
    assert main([*JOB, *words]) == 3
    short_gib = (nearest.worst_stage.memory.total_bytes - load_hardware("h100").memory_bytes) / 2**30
    assert f"lacks {short_gib:,.1f} GiB on stage {nearest.worst_stage.stage}" in capsys.readouterr().err
