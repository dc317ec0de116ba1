"""A plan warns of its model or dtype where, and only where, the trainer's export refuses it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from planner.export.export import bundle_of
from planner.export.refusal import Inexpressible
from planner.layout.evaluate import evaluate
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model, model_names
from planner.specs.training import Parallelism, TrainingSpec

TARGETS = {"megatron": "megatron", "torchtitan": "torchtitan", "torch-eager": "torch"}
ZERO_STAGES = {"megatron": 1, "torchtitan": 3, "torch-eager": 1}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("runtime", TARGETS)
def test_what_export_refuses_is_said_with_the_plan(runtime: str, dtype: str) -> None:
    warned, cluster = [], ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    names = list(model_names())
    for name in names[::2] if dtype == "bf16" else names[::6]:
        plan = evaluate(
            load_model(name),
            cluster,
            TrainingSpec(seq_length=1024, global_batch_size=8, dtype=dtype),
            Parallelism(tp=1, pp=1, dp=8, micro_batch_size=1, zero_stage=ZERO_STAGES[runtime]),
            runtime=runtime,
        )
        warnings = [
            warning for warning in plan.warnings if warning.startswith(f"plan export refuses this model for {runtime}")
        ]
        with pytest.raises(Inexpressible) if warnings else nullcontext():
            bundle_of(plan, [TARGETS[runtime]])
        warned.append(bool(warnings))
    assert not all(warned) or dtype == "fp8"
