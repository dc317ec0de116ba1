"""A job in its user's words: nodes, all weights of a trained model, tokens of a time or a sum."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from planner.cli import main
from planner.cli.inputs import read_job
from planner.cli.options import PlanOptions
from planner.errors import SpecError


def job(**options: Any) -> Any:
    return read_job(PlanOptions(**{"model": "1b", "no_history": True, **options}))


def test_nodes_are_gpus_of_the_hardware() -> None:
    assert job(nodes=4).cluster.num_gpus == 32
    assert job(nodes=4, hardware="gb200").cluster.num_gpus == 16
    assert job(nodes=4, gpus_per_node=4).cluster.num_gpus == 16
    with pytest.raises(SpecError, match="32 GPUs"):
        job(nodes=4, gpus=16)


def test_finetune_trains_all_weights_under_the_trainer_of_adapters() -> None:
    tuned = job(gpus=8, finetune=True)
    assert (tuned.runtime, tuned.training.adapters, tuned.training.seq_length) == ("hf", None, 2048)
    assert tuned.training.global_batch_size == 16


@pytest.mark.parametrize(
    ("asked", "figure", "value"),
    [("--days 30", "days", 30), ("--usd $200k", "usd", 200_000), ("--days 2w", "days", 14)],
)
def test_a_time_or_a_sum_says_how_many_tokens(
    asked: str, figure: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = "--tp 1 --pp 1 --micro-batch-size 1 --top 1 --json"
    assert main([*shlex.split(f"-m 1b -g 16 -s 8k -b 256 {pins}"), *asked.split()]) == 0
    cost = json.loads(capsys.readouterr().out)["run_cost"]
    assert cost[figure] == pytest.approx(value, rel=1e-3)
    assert cost["tokens"] > 1e9


def test_options_of_lists_are_joined_and_of_any_other_the_last_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "-m", "8b", "-g", "16", "--tp", "2", "-s", "2048", "-b", "64", "--json"]
    switches = ("cross_entropy_fusion=false", "p2p_overlap=true")
    told = []
    for given in (["--switch", ",".join(switches)], [f"--switch={switches[0]}", "--switch", switches[1]]):
        assert main([*words, *given]) == 0
        told.append(json.loads(capsys.readouterr().out)["best"]["step"]["step_s"])
    assert told[0] == told[1]
    assert main([*words, "--tp", "4"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["best"]["parallelism"]["tp"] == 4
    assert "--tp: given 2 times, the last counts: 2, 4" in shown.err
