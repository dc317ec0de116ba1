"""Runs have the length, optimizer and intervals that are planned, in every trainer's files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.run_settings import run_settings
from planner.export.targets import TRAINERS
from planner.specs.registry import load_model, model_names

Planned = Callable[..., Plan]


def test_a_published_model_learns_as_it_was_published(planned: Planned) -> None:
    run = run_settings(planned("llama-3.1-405b", 2048, tp=8, pp=16, seq_length=8192, batch=2048, tokens=15.6e12))
    assert run.num_steps == round(15.6e12 / (8192 * 2048))
    assert (run.optimizer.learning_rate, run.optimizer.min_learning_rate, run.warmup_steps) == (8e-5, 8e-7, 8000)
    assert "arXiv:2407.21783" in run.notes[1]
    assert "--tokens" not in run.notes[0]


def test_defaults_say_that_they_are(planned: Planned) -> None:
    run = run_settings(planned("qwen3-8b", 16))
    assert run.optimizer.learning_rate == 3e-4
    assert "none is published" in run.notes[1]
    assert "20 for each active parameter, since the plan states none (--tokens)" in run.notes[0]
    assert run_settings(planned("qwen2.5-72b", 64, tp=4, pp=4)).optimizer.learning_rate == 1.5e-4


def test_a_short_run_warms_up_for_a_tenth_of_it(planned: Planned) -> None:
    run = run_settings(planned("llama-3.1-8b", 16, batch=64, tokens=64 * 2048 * 50))
    assert (run.num_steps, run.warmup_steps) == (50, 5)
    assert run_settings(planned("llama-3.1-8b", 16, batch=64, tokens=1)).num_steps == 1


def test_a_rate_that_falls_at_the_end_falls_over_that_share(planned: Planned) -> None:
    run = run_settings(planned("deepseek-v3", 512, pp=8, ep=64, layout="Et*7|(t*8|)*6t*6mL"))
    assert run.decay_steps == round(0.32 * (run.num_steps - run.warmup_steps))


@pytest.mark.parametrize(("gpus", "minutes"), [(8, 10), (1024, 10), (2048, 20), (16384, 140)])
def test_timeouts_grow_with_the_ranks(planned: Planned, gpus: int, minutes: int) -> None:
    run = run_settings(planned("llama-3.1-8b", gpus))
    assert (run.init_timeout_minutes, run.timeout_minutes) == (minutes, 10)


def test_saves_are_as_often_as_the_plan_says(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 1024, tokens=1e12)
    assert plan.goodput is not None
    run = run_settings(plan)
    assert run.save_interval_steps == round(plan.goodput.checkpoint_interval_s / plan.step.step_s)
    assert run.kept_save_interval_steps % run.save_interval_steps == 0
    assert run.evaluation_interval_steps * plan.goodput.evaluation_fraction >= 10 / 3


def test_more_gpus_save_more_often(planned: Planned) -> None:
    few, many = (planned("llama-3.1-8b", num_gpus) for num_gpus in (8, 1024))
    seconds = [run_settings(plan).save_interval_steps * plan.step.step_s for plan in (few, many)]
    assert seconds[0] > 2 * seconds[1]
    assert seconds[0] < 3600 + few.step.step_s


@pytest.mark.parametrize("name", model_names())
def test_published_optimizers_name_their_source(name: str) -> None:
    training = load_model(name).training
    if training is not None and training.optimizer is not None:
        optimizer = training.optimizer
        assert "arXiv" in optimizer.source
        assert optimizer.min_learning_rate < optimizer.learning_rate < 1e-3


JOBS: dict[str, dict[str, Any]] = {
    "megatron": {"model": "qwen3-30b-a3b", "gpus": 16, "ep": 8},
    "bridge": {"model": "qwen3-30b-a3b", "gpus": 16, "ep": 8, "runtime": "bridge"},
    "torchtitan": {"model": "llama-3.1-8b", "gpus": 16, "tp": 2, "runtime": "torchtitan"},
    "torch": {"model": "llama-3.1-8b", "gpus": 16, "tp": 2, "runtime": "torch-eager"},
    "deepspeed": {"model": "llama-2-7b", "gpus": 16, "runtime": "deepspeed", "zero_stage": 3},
}
PROOF = "random tokens and saves nothing"
"""The torch runner trains nothing that is kept: it shows that a layout runs."""
NEEDS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("run_needs.yaml").read_text())


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("target", JOBS)
def test_every_need_is_met_or_named(exported: Callable[[str], str], target: str, need: str) -> None:
    pattern = PROOF if target == "torch" else NEEDS[need][target]
    assert re.search(pattern, exported(target)), f"{target}: {need}"


@pytest.fixture(scope="module")
def exported(planned: Planned) -> Callable[[str], str]:
    """exported(target): the text of all files and notes of an export; each is made once."""
    texts: dict[str, str] = {}

    def text_of(target: str) -> str:
        if target not in texts:
            bundle = bundle_of(planned(**JOBS[target]), [target])
            texts[target] = "\n".join([*(file.text for file in bundle.files), *bundle.notes])
        return texts[target]

    return text_of


FROM_THE_LAUNCHER = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MOCK", "PREFLIGHT", "NUMA_BINDING", "PLAN_DIR", "GPUS"}
FROM_ELSEWHERE = re.compile(r"SLURM_\w+|BASH\w*|PWD|PATH|PYTHONPATH|TMPDIR")
"""Variables of Slurm and of the shell itself."""


@pytest.mark.parametrize("target", JOBS)
def test_launchers_read_no_variable_that_nobody_sets(planned: Planned, target: str) -> None:
    bundle = bundle_of(planned(**JOBS[target]), [target])
    for file in bundle.files:
        if not file.executable:
            continue
        code = re.sub(r"^\s*#.*$", "", file.text, flags=re.MULTILINE)
        read = set(re.findall(r"\$\{?([A-Za-z_]\w*)", code))
        assigned = set(re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)\+?=", code)) | {"HOSTS"}
        placeholders = {place.name for place in file.placeholders}
        unknown = {name for name in read - assigned - placeholders if not FROM_ELSEWHERE.fullmatch(name)}
        assert unknown <= FROM_THE_LAUNCHER, f"{file.name}: {unknown}"


@pytest.mark.parametrize(
    ("target", "name"), [("torchtitan", "planned_recipe.py"), ("deepspeed", "planned_training.py")]
)
def test_a_program_reads_no_variable_that_nobody_names(planned: Planned, target: str, name: str) -> None:
    bundle = bundle_of(planned(**JOBS[target]), [target])
    program = next(file.text for file in bundle.files if file.name == name)
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', program))
    assert read - {"MOCK"} == {place.name for place in bundle.placeholders if not place.is_optional}


def test_environments_are_the_vendors(planned: Planned) -> None:
    names = {}
    for hardware in ("h100", "mi300x"):
        for target in ("megatron", "torchtitan"):
            plan = planned("llama-3.1-8b", 16, hardware=hardware, runtime=target)
            command = TRAINERS[target].write(plan).command
            assert command is not None
            names[hardware, target] = set(command.environment)
    for target in ("megatron", "torchtitan"):
        assert {"HSA_NO_SCRATCH_RECLAIM", "GPU_MAX_HW_QUEUES", "NCCL_IB_GID_INDEX"} <= names["mi300x", target]
        assert not any(name.startswith(("HSA", "RCCL", "GPU_")) for name in names["h100", target])
    assert "NCCL_NVLS_ENABLE" not in names["mi300x", "megatron"]
