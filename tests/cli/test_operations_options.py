"""Options of the whole run reach the specs; whatever is wrong names the option."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from planner.cli import main
from planner.cli.inputs import Job, read_job
from planner.cli.options import JobOptions

PRICED = ["evaluate", "--model", "8b", "--gpus", "16", "--tp", "8"]


def job(**options: Any) -> Job:
    return read_job(JobOptions(model="8b", gpus=16, tokens="1T", **options))


def test_they_reach_the_training() -> None:
    operations = job(storage_gb_per_s=5.0, failures_per_1000_gpu_days=0.3, spares=1, usd_per_gpu_hour=2.5)
    assert operations.training.operations.model_dump() == {
        "storage_gb_per_s": 5.0, "failures_per_1000_gpu_days": 0.3, "num_spare_nodes": 1, "usd_per_gpu_hour": 2.5,
    }  # fmt: skip


def test_without_tokens_they_are_told_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_job(JobOptions(model="8b", gpus=16, spares=1))
    assert "--spares: has no effect without --tokens" in caplog.text


def test_a_price_that_is_given_is_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PRICED, "--tokens", "1T", "--usd-per-gpu-hour", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["run_cost"]["usd"] == pytest.approx(2 * answer["run_cost"]["gpu_hours"])
