"""Published runs of a model whose layers scan lie inside the intervals of its plans."""

from __future__ import annotations

import pytest

from planner.layout.evaluate import evaluate
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

RUNS = [
    # Megatron-Bridge's performance summaries, 26.06 and 26.07: Nemotron 3 Nano, sequences of 8,192, ep 8
    ("gb300", 8, "mxfp8", 512, 4, 40_960),
    ("gb200", 8, "mxfp8", 512, 2, 34_816),
    ("b300", 8, "mxfp8", 512, 4, 37_316),
    ("b200", 8, "mxfp8", 512, 2, 32_768),
    ("h100", 16, "fp8", 1024, 1, 14_719),
]
"""GPU, number of them, dtype, sequences a step and a micro-batch, tokens a second and GPU."""


@pytest.mark.parametrize(("gpu", "count", "dtype", "batch", "micro_batch", "tokens_per_s"), RUNS)
def test_a_published_run_lies_in_its_interval(
    gpu: str, count: int, dtype: str, batch: int, micro_batch: int, tokens_per_s: float
) -> None:
    plan = evaluate(
        load_model("nemotron-3-nano-30b-a3b"),
        ClusterSpec(hardware=load_hardware(gpu), num_gpus=count),
        TrainingSpec(seq_length=8192, global_batch_size=batch, dtype=dtype),
        Parallelism(tp=1, pp=1, dp=count, ep=8, micro_batch_size=micro_batch),
        # as the summaries' recipes have it
        runtime=load_runtime("megatron").with_features({"bf16_gradients": True})[0],
        says_switches=False,
    )
    assert plan.fits
    low_s, high_s = plan.best.step.step_s_interval or (0.0, 0.0)
    measured_s = batch * 8192 / count / tokens_per_s
    assert low_s < measured_s < high_s
    assert measured_s == pytest.approx(plan.best.step.step_s, rel=0.15)
