"""What a run uses tells which generation of its trainer it ran on."""

from __future__ import annotations

from typing import Any

import pytest

from planner.specs.generations import runtime_of_its_day
from planner.specs.registry import load_model
from planner.specs.trainers import load_runtime
from planner.specs.training import Parallelism


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


def test_fp16_and_bf16_gradients_of_megatron_deepspeed() -> None:
    runtime = load_runtime("megatron-deepspeed")
    assert (runtime.gradient_bytes, runtime.kept_gradient_bytes) == (4, 2)
    half = runtime.in_dtype("fp16", "ampere")
    assert (half.gradient_bytes, half.kept_gradient_bytes) == (2, 0)
    assert half.in_dtype("fp16", "ampere") == half
    assert runtime.in_dtype("bf16", "ampere") is runtime
