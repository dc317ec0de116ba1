"""Plans to export: layouts priced by the planner, of any model on any number of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

HOSTILE = "evil\"; touch pwned; $(touch pwned) `touch pwned` 'x' |*()\n#SBATCH --nodes=99\ntouch pwned"


@lru_cache(maxsize=256)
def _model(name: str) -> ModelSpec:
    return load_model(name)


def _planned(
    model: str | ModelSpec = "llama-3.1-70b",
    gpus: int = 64,
    *,
    runtime: str = "megatron",
    hardware: str = "h100",
    dtype: str = "bf16",
    seq_length: int = 2048,
    batch: int | None = None,
    num_microbatches: int | None = None,
    tokens: float | None = None,
    features: dict[str, Any] | None = None,
    **layout: Any,
) -> Plan:
    spec = _model(model) if isinstance(model, str) else model
    ranks = layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)
    layout.setdefault("dp", gpus // ranks)
    layout.setdefault("zero_stage", 3 if runtime == "torchtitan" else 1)
    if layout["zero_stage"] > 1:
        layout.setdefault("fsdp", "all")
    if batch is None:
        batch = layout["dp"] * layout.get("micro_batch_size", 1) * (num_microbatches or 4 * layout.get("pp", 1))
    chosen, _ = load_runtime(runtime).with_features(features or {})
    return evaluate(
        spec, ClusterSpec(hardware=load_hardware(hardware), num_gpus=gpus),
        TrainingSpec.model_validate(
            {"seq_length": seq_length, "global_batch_size": batch, "dtype": dtype, "tokens": tokens},
        ),
        Parallelism.model_validate(layout), runtime=chosen,
    )  # fmt: skip


@pytest.fixture(scope="session")
def planned() -> Callable[..., Plan]:
    """planned(model, gpus, runtime=…, **parallelism): a layout as a plan, four micro-batches per stage unless said."""
    return _planned


@pytest.fixture(scope="session")
def hostile_name() -> str:
    """A model name that a careless script would run."""
    return HOSTILE
