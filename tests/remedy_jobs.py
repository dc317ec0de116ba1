"""Runs that are slower than their plans, of each trainer: what remedies are tested with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.answer import Plan
from planner.cli import main
from planner.layout.evaluate import evaluate
from planner.observe.case import Case
from planner.observe.judge import predicted
from planner.observe.measured import JobFacts
from planner.observe.observation import Cause, Observation
from planner.plan_file import plan_of
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.generations import described
from planner.trainers.load import load_runtime
from planner.trainers.switches import written

SLOWER = 1.3
"""The measured step over the predicted one."""


@dataclass(frozen=True)
class Job:
    """A job in the words of `plan evaluate`."""

    words: Mapping[str, str]
    switches: Mapping[str, Any] = field(default_factory=dict)

    def command(self, options: Sequence[str] = ()) -> list[str]:
        """The words of the job with some options in place of its own."""
        given = dict(zip(options[::2], options[1::2], strict=True))
        switches = {name: written(value) for name, value in self.switches.items()}
        switches |= dict(part.split("=") for part in given.pop("--switch", "").split(",") if part)
        words = {**self.words, **given}
        words |= {"--switch": ",".join(f"{name}={value}" for name, value in switches.items())} if switches else {}
        if words.get("--recompute") != "full":
            words.pop("--recompute-num-layers", None)
        return ["evaluate", *(word for pair in words.items() for word in pair)]


def _job(model: str, gpus: int, runtime: str, hardware: str, switches: Mapping[str, Any], **layout: object) -> Job:
    words = {"--model": model, "--gpus": str(gpus), "--runtime": runtime, "--hardware": hardware}
    words |= {"--seq-length": "4096", "--global-batch-size": "64"}
    words |= {f"--{name.replace('_', '-')}": str(value) for name, value in layout.items()}
    return Job(words, switches)


JOBS = {
    "megatron": _job(
        "8b", 16, "megatron", "h100",
        {"overlap_grad_reduce": False, "overlap_param_gather": False, "activation_fusion": False},
        tp=2, pp=2, recompute="full",
    ),
    "bridge": _job("8b", 16, "bridge", "h100", {"tp_comm_overlap": False}, tp=2, pp=2),
    "experts": _job("qwen3-30b-a3b", 16, "megatron", "h100", {"ep_overlap": False}, ep=8, pp=2),
    "torchtitan": _job("8b", 8, "torchtitan", "h100", {"compile": False}, zero_stage=3, recompute="selective"),
    "primus": _job("deepseek-v2-lite", 8, "primus-megatron", "mi300x", {"sync_free_moe": 0}, ep=8),
    "deepspeed": _job("8b", 16, "deepspeed", "h200", {"overlap_grad_reduce": False}, zero_stage=1),
}  # fmt: skip


@cache
def plan_of_job(name: str) -> Plan:
    """The price of a job's layout."""
    job = JOBS[name]
    words, layout = job.words, dict[str, Any]()
    for option in Parallelism.model_fields:
        value = words.get(f"--{option.replace('_', '-')}")
        if value is not None:
            layout[option] = int(value) if value.isdigit() else value
    model, hardware = load_model(words["--model"]), load_hardware(words["--hardware"])
    runtime, _ = described(load_runtime(words["--runtime"]), hardware, model, job.switches)
    cluster = ClusterSpec(hardware=hardware, num_gpus=int(words["--gpus"]))
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    return evaluate(model, cluster, training, Parallelism(**layout), runtime=runtime)


def case_of(name: str, slower: float = SLOWER, run: Mapping[str, Any] | None = None, **observed: Any) -> Case:
    """A run of a job that takes so many times as long as predicted."""
    plan = plan_of_job(name)
    facts = JobFacts(run=dict(run or {}))
    observation = Observation(sources=(), facts=facts, step_s=plan.step.step_s * slower, **observed)
    return Case(observation, None, predicted(plan, "plan.json"), plan)


def cause(name: str, seconds: float | None = None, where: str = "") -> Cause:
    return Cause(name=name, likelihood=0.9, evidence="", seconds=seconds, where=where)


def typed(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> Plan:
    """The plan that a command line prints."""
    capsys.readouterr()
    assert main([*words, "--json", "-q"]) == 0, words
    return plan_of(json.loads(capsys.readouterr().out), "stdout")


def saved(name: str, folder: Path) -> str:
    """A file of a job's plan."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_of_job(name).to_json()))
    return str(path)
