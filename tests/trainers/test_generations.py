"""A run is dated by what it uses: the oldest generation of its trainer that knows all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.layout.runs import parse_run
from planner.physics.compute import operator_seconds
from planner.physics.operators import Operator
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism
from planner.trainers.generations import runtime_of_its_day
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())


def generation(name: str, architecture: str, **features: Any) -> str:
    model = load_model("gpt3-175b" if name == "megatron" else "llama3-8b")
    return runtime_of_its_day(name, architecture, model, Parallelism(tp=8), features).name


@pytest.mark.parametrize(("name", "architecture", "features", "expected"), TABLES["generations"])
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


@pytest.mark.parametrize(
    ("features", "stage"), [({}, 0), ({"dispatcher": "deepep"}, 1), ({"dispatcher": "deepep", "sync_free_moe": 0}, 0)]
)
def test_runs_of_primus_with_deepep_fuse_routing_unless_they_say_otherwise(
    features: dict[str, Any], stage: int
) -> None:
    layout = {"tp": 1, "dp": 8, "ep": 8, "micro_batch_size": 1}
    run = {"model": "deepseek-v2-lite", "hardware": "mi355x", "num_gpus": 8, "runtime": "megatron", "seq_length": 4096}
    run |= {"global_batch_size": 8, "dtype": "bf16", "parallelism": layout, "features": features}
    assert SWITCHES["sync_free_moe"].value_of(parse_run({"run": run}).runtime) == stage


def test_only_amds_gpus_pay_for_products_that_rocm_leaves_untuned() -> None:
    """Torch takes the kernels that hipBLASLt proposes, in 16 bits as in 8."""
    slow = load_runtime("torchtitan")
    fast = slow.model_copy(update={"rocm_product_factor": 1.0})
    product = Operator(name="up", kind="gemm", m=8192, n=8192, k=8192)

    def seconds(gpu: str, runtime: RuntimeSpec, dtype: str = "bf16") -> float:
        return float(operator_seconds(product, load_hardware(gpu), dtype, runtime).forward_s)

    assert seconds("h100", slow) == seconds("h100", fast)
    assert seconds("mi300x", slow) == pytest.approx(slow.rocm_product_factor * seconds("mi300x", fast))
    assert seconds("mi300x", slow, "fp8") == seconds("mi300x", fast, "fp8")


def test_split_backwards_of_primus_hide_no_exchange_of_gradients() -> None:
    """Its pipeline engine asks for overlap_grad_reduce and overlap_param_gather off; other trainers' does not."""
    primus, megatron = load_runtime("primus-megatron"), load_runtime("megatron")
    assert primus.for_schedules(split_backward=True).gradient_overlap_fraction == 0
    assert primus.for_schedules(split_backward=False) is primus
    assert megatron.for_schedules(split_backward=True) is megatron
