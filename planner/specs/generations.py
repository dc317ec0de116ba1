"""Which generation of a trainer a run of the past means, since runs name no version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.specs.model import ModelSpec
from planner.specs.runtime import RuntimeSpec
from planner.specs.trainers import load_runtime
from planner.specs.training import Parallelism

GENERATIONS = {"megatron": ("megatron-2021", "megatron-2022"), "torchtitan": ("torchtitan-2024",)}
"""Older generations of a trainer, oldest first; what bears the trainer's own name is today's."""

SINCE = {
    "megatron": ("flash_attention", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "cuda_graph"),
    "torchtitan": ("cross_entropy_fusion", "precision_recipe"),
}
"""Features that no older generation has; torchtitan had one 8-bit recipe in 2024, which needed no name."""


def runtime_of_its_day(
    name: str, architecture: str, model: ModelSpec, layout: Parallelism, features: Mapping[str, Any]
) -> RuntimeSpec:
    """The oldest generation of the trainer `name` that knows all that a run uses.

    What a run uses dates it: its silicon, the design of its model, its layout, and the features switched on. An A100
    with a GPT of 2021 ran without FlashAttention, unless the run says so (`features: {"flash_attention": true}`); so
    did torchtitan on an H100 without a compiled loss (`{"cross_entropy_fusion": true}`).
    """
    for older in map(load_runtime, GENERATIONS.get(name, ())):
        known = older.trainer != "megatron" or (_is_gpt(model) and _is_known(layout, older))
        if architecture in older.architectures and known and not any(map(features.get, SINCE[name])):
            return older
    return load_runtime(name)


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
