"""Which generation of a trainer a run of the past means, since runs name no version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.specs.cluster import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Parallelism
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

_MEGATRON = ("flash_attention", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "cuda_graph")
GENERATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron": {"megatron-2021": _MEGATRON, "megatron-2022": _MEGATRON},
    "torchtitan": {
        "torchtitan-2024": ("cross_entropy_fusion", "scaling", "flex_attention"),
        "torchtitan-2025": ("flex_attention",),
    },
}
"""Older generations of a trainer, oldest first, and the features that came after each; the trainer's own name means
today's. `scaling`: a precision recipe that says what shares a scale; torchtitan had one 8-bit recipe in 2024."""
_ONE_RECIPE = (None, "bf16", "fp16", "fp8")


def runtime_of_its_day(
    name: str, architecture: str, model: ModelSpec, layout: Parallelism, features: Mapping[str, Any]
) -> RuntimeSpec:
    """The oldest generation of the trainer `name` that knows all that a run uses.

    What a run uses dates it: its silicon, the design of its model, its layout, and the features switched on. An A100
    with a GPT of 2021 ran without FlashAttention, unless the run says so (`features: {"flash_attention": true}`); so
    did torchtitan on an H100 without a compiled loss (`{"cross_entropy_fusion": true}`) and without FlexAttention.
    """
    used = {**features, "scaling": features.get("precision_recipe") not in _ONE_RECIPE}
    for older, later in GENERATIONS.get(name, {}).items():
        runtime = load_runtime(older)
        known = name != "megatron" or (_is_gpt(model) and _is_known(layout, runtime))
        if architecture in runtime.architectures and known and not any(map(used.get, later)):
            return runtime
    return load_runtime(name)


def unsaid_features(name: str, hardware: HardwareSpec, model: ModelSpec) -> dict[str, Any]:
    """What a run of Megatron-LM on an NVL72 rack has switched on unless it says otherwise.

    Megatron-Bridge's recipes replay the routing of experts in CUDA graphs there since their first release, since Grace
    launches slowly; elsewhere some do and some do not.
    """
    spans_nodes = hardware.nvlink_domain_size > hardware.gpus_per_node
    return {"cuda_graph": "transformer_engine"} if name == "megatron" and spans_nodes and model.moe is not None else {}


def _is_gpt(model: ModelSpec) -> bool:
    """LayerNorm, a plain MLP, as many heads of keys as of queries, positions learned or none."""
    plain = model.norm == "layernorm" and not model.gated_mlp and model.position_embedding != "rope"
    return plain and model.moe is None and model.mla is None and model.num_key_value_heads == model.num_attention_heads


def _is_known(layout: Parallelism, runtime: RuntimeSpec) -> bool:
    if (
        (layout.cp > 1 and not runtime.has_context_parallel)
        or layout.ep > 1
        or ((layout.zero_stage or 0) > 1 and layout.fsdp is None)
    ):
        return False
    if not set(layout.recompute_modules) <= {"core_attn"}:
        return False
    return runtime.has_sequence_parallel or not (layout.sequence_parallel or layout.recompute == "selective")
