"""The recipe of a layout: a dispatcher that the version has, and dtypes that it computes in."""

from __future__ import annotations

import pytest

from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.layout.variation import settled
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Dtype, Parallelism, TrainingSpec
from planner.trainers.load import load_runtime


def cluster(hardware: str, num_gpus: int = 64) -> ClusterSpec:
    return ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("runtime", "hardware", "dispatcher", "once"),
    [
        ("megatron", "gb200", "hybridep", True),
        ("megatron@0.16", "gb200", "hybridep", True),
        ("megatron@0.15", "gb200", "alltoall", False),
        ("megatron@0.14", "gb200", "alltoall", False),
        ("megatron@0.14", "h100", "deepep", True),
        ("megatron", "mi300x", "alltoall", False),
    ],
)
def test_a_dispatcher_that_the_version_has(runtime: str, hardware: str, dispatcher: str, once: bool) -> None:
    found = settled(load_runtime(runtime), cluster(hardware), load_model("deepseek-v3"))
    assert (found.dispatcher, found.sends_tokens_once) == (dispatcher, once)


def test_a_given_layout_is_priced_with_it() -> None:
    def priced_with(runtime: str) -> tuple[object, bool]:
        training = TrainingSpec(seq_length=4096, global_batch_size=256)
        plan = evaluate("qwen3-30b", cluster("gb200"), training, Parallelism(ep=16, dp=64), runtime=runtime)
        return plan.best.recipe["dispatcher"], plan.runtime_spec.sends_tokens_once

    assert priced_with("megatron@0.15") == ("alltoall", False)
    assert priced_with("megatron@0.16") == priced_with("megatron") == ("hybridep", True)


def priced(dtype: Dtype, runtime: str) -> str:
    training = TrainingSpec(seq_length=4096, global_batch_size=256, dtype=dtype)
    return evaluate("llama-3.1-8b", cluster("b200"), training, Parallelism(dp=64), runtime=runtime).training.dtype


def test_four_bits_came_with_a_version() -> None:
    assert (priced("nvfp4", "megatron@0.15"), priced("mxfp8", "megatron@0.14")) == ("nvfp4", "mxfp8")
    with pytest.raises(SpecError) as caught:
        priced("nvfp4", "megatron@0.14")
    assert "megatron 0.14 has no such recipe, which came with 0.15" in caught.value.message
    assert caught.value.hint == "--runtime megatron@0.15 has it"
