"""A run is dated by what it uses: the oldest generation of its trainer that knows all of it."""

from __future__ import annotations

from typing import Any

import pytest

from planner.layout.runs import parse_run
from planner.specs.registry import load_model
from planner.specs.training import Parallelism
from planner.trainers.generations import runtime_of_its_day
from planner.trainers.load import load_runtime


def generation(name: str, architecture: str, **features: Any) -> str:
    model = load_model("gpt3-175b" if name == "megatron" else "llama3-8b")
    return runtime_of_its_day(name, architecture, model, Parallelism(tp=8), features).name


@pytest.mark.parametrize(
    ("name", "architecture", "features", "expected"),
    [
        ("megatron", "ampere", {}, "megatron-2021"),
        ("megatron", "ampere", {"flash_attention": True}, "megatron"),
        ("megatron", "ampere", {"flash_attention": False}, "megatron-2021"),
        ("megatron", "hopper", {}, "megatron"),
        ("torchtitan", "hopper", {}, "torchtitan-2024"),
        ("torchtitan", "hopper", {"precision_recipe": None}, "torchtitan-2024"),
        ("torchtitan", "hopper", {"precision_recipe": "fp8"}, "torchtitan-2024"),
        ("torchtitan", "hopper", {"precision_recipe": "fp8-tensorwise"}, "torchtitan-2025"),
        ("torchtitan", "hopper", {"cross_entropy_fusion": True}, "torchtitan-2025"),
        ("torchtitan", "hopper", {"flex_attention": True}, "torchtitan"),
        ("torchtitan", "blackwell", {}, "torchtitan"),
        ("torch-eager", "hopper", {}, "torch-eager"),
    ],
)
def test_what_dates_a_run(name: str, architecture: str, features: dict[str, Any], expected: str) -> None:
    assert generation(name, architecture, **features) == expected


@pytest.mark.parametrize(
    ("hardware", "model", "features", "factor"),
    [
        ("gb200", "qwen3-30b-a3b", {}, 0.85),
        ("gb200", "qwen3-30b-a3b", {"cuda_graph": False}, 1.0),
        ("b200", "qwen3-30b-a3b", {}, 1.0),
        ("gb200", "llama-3.1-8b", {}, 1.0),
        ("gb200", "qwen3-30b-a3b", {"moe_token_drop": True}, 0.85),
    ],
)
def test_racks_replay_routing_unless_a_run_says_otherwise(
    hardware: str, model: str, features: dict[str, Any], factor: float
) -> None:
    """Nor does the host prepare counts that are known before."""
    layout = {"tp": 1, "dp": 8, "micro_batch_size": 1}
    run = {"model": model, "hardware": hardware, "num_gpus": 8, "runtime": "megatron", "seq_length": 4096}
    run |= {"global_batch_size": 8, "dtype": "bf16", "parallelism": layout, "features": features}
    runtime = parse_run({"run": run}).runtime
    assert min(runtime.moe_host_factor, runtime.launched_fraction) == factor


def test_fp16_and_bf16_gradients_of_megatron_deepspeed() -> None:
    runtime = load_runtime("megatron-deepspeed")
    assert (runtime.gradient_bytes, runtime.kept_gradient_bytes) == (4, 2)
    half = runtime.in_dtype("fp16", "ampere")
    assert (half.gradient_bytes, half.kept_gradient_bytes) == (2, 0)
    assert half.in_dtype("fp16", "ampere") == half
    assert runtime.in_dtype("bf16", "ampere") is runtime
