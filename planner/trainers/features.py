"""Features that a run says its trainer had switched on or off, and the fields of RuntimeSpec that each changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import Unsupported

Effect = Callable[[Any], dict[str, Any] | None]
"""A function from a feature's value to the fields that it changes; None for a value that the feature does not have."""


def _switch(name: str) -> Effect:
    return lambda value: {name: bool(value)}


def _fraction(names: tuple[str, ...], when_on: float) -> Effect:
    return lambda value: dict.fromkeys(names, when_on if value else 0.0)


def _one_of(name: str, values: tuple[str, ...]) -> Effect:
    return lambda value: {name: value} if value in values else None


EP_OVERLAP = 0.8
"""Share of expert exchanges that hides behind another micro-batch's products, where a recipe asks for it: a first
guess, which the published runs that overlap bear out on NVLink (docs/CALIBRATION.md)."""
OVERLAP = 0.9
"""Share of the window that reductions and gathers of a sharded optimizer fill: a first guess, fitted to nothing."""
ASYNC_TP = 0.688
"""Share of tensor-parallel exchanges that asynchronous tensor parallelism hides: fitted to torchtitan's published runs
(scripts/calibrate runs, "asynchronous TP")."""
ROWWISE = 1.45
"""Seconds of torchao's 8-bit products with a scale for each row or block, over seconds with one for a tensor.

Llama 3 8B on eight H100: 6,150 tokens/s in bf16, 7,690 by tensors, 6,768 by rows (torchao's training benchmarks). 1.6
in torchtitan's report of June 2025 (70B, TP 8: by rows no faster than bf16), 1.5 for its mxfp8 on GB200."""
SCALES_BY_ROW: dict[str, Any] = {"narrow_factor": ROWWISE, "narrow_exchanges": False}
ONE_SCALE: dict[str, Any] = {"narrow_factor": 1.0, "narrow_exchanges": True}
_RECIPES: dict[str, dict[str, Any]] = {
    # gradients of bf16 training are summed in fp32; the mixed precision of older trainers was fp16
    "bf16": {"gradient_bytes": 4},
    "fp8-tensorwise": ONE_SCALE,
    "fp8-rowwise": SCALES_BY_ROW,
}
_COMPILED = ("compiled", "fused_norm", "fused_activation", "fused_cross_entropy")
"""Switches that a trainer which relies on torch.compile loses without it."""
_SEND_ONCE = ("flex", "deepep", "hybridep")
ROUTING_REPLAYED = 0.85
"""Host time of a mixture's layer that is left where a CUDA graph replays its routing: Qwen3 30B and 235B on B200, GB200
and GB300, whose recipes of one release replay routing, attention or both."""
ATTENTION_REPLAYED = 0.6
"""Host time that is left where a graph replays attention too; from the same runs."""
_CAPACITY = {"sends_tokens_once": False, "awaits_token_counts": False, "moe_host_factor": ROUTING_REPLAYED}
"""Only the all-to-all among Megatron's dispatchers gives experts a fixed number of tokens; the host awaits no count."""


def _graphs(value: Any) -> dict[str, Any]:
    """CUDA graphs replay whole iterations, or parts of a mixture's layer."""
    if value in (True, "full_iteration", "full"):
        # recipes that capture whole iterations of mixtures also overlap their exchanges (Megatron-Bridge since 26.06)
        return {"cuda_graphs": True} | ({} if value is True else {"ep_overlap_fraction": EP_OVERLAP})
    if not value:
        return {}
    left = ATTENTION_REPLAYED if "attn" in str(value) else ROUTING_REPLAYED
    return {"moe_host_factor": left, "ep_overlap_host_factor": 1.0}


FEATURES: dict[str, Effect] = {
    "flash_attention": _switch("flash_attention"),
    "activation_fusion": _switch("fused_activation"),
    "async_tp": _fraction(("tp_overlap_fraction", "mla_tp_overlap_fraction"), ASYNC_TP),
    "compile": lambda value: {"compiled": True} if value else dict.fromkeys(_COMPILED, False),
    "attention_kernel": _one_of("attention_kernel", ("fastest", "flash", "flash1")),
    "cp_comm_type": _one_of("cp_comm_type", ("p2p", "all_gather", "a2a")),
    "cross_entropy_fusion": _switch("fused_cross_entropy"),
    "cuda_graph": _graphs,
    "dropout": _switch("dropout"),
    "dispatcher": lambda value: (
        {"sends_tokens_once": value in _SEND_ONCE} if value in (*_SEND_ONCE, "alltoall", "allgather") else None
    ),
    "ep_overlap": _fraction(("ep_overlap_fraction",), EP_OVERLAP),
    "fp8_output_proj": _switch("narrow_head"),
    "fp32_grad_accum": lambda value: dict.fromkeys(
        ("gradient_bytes", "fp16_gradient_bytes", "narrow_gradient_bytes"), 4 if value else 2
    ),
    "gradient_accumulation_fusion": _switch("fused_grad_accumulation"),
    "loss_metrics": lambda value: {"loss_metrics": value} if type(value) is int and value >= 0 else None,
    "moe_capacity_factor": lambda value: _CAPACITY if value else {},
    "moe_token_drop": lambda value: _CAPACITY if value else {},
    "overlap_grad_reduce": _fraction(("gradient_overlap_fraction",), OVERLAP),
    "overlap_param_gather": _fraction(("parameter_overlap_fraction",), OVERLAP),
    "p2p_overlap": lambda value: {"p2p_overlap": bool(value), "interleaved_p2p_overlap": bool(value)},
    "precision_recipe": lambda value: _RECIPES.get(str(value), {}),
    "reentrant_checkpoint": lambda value: {"stops_recompute_early": not value},
    # on: as much hides as the trainer's own runs say
    "tp_comm_overlap": lambda value: {} if value else {"tp_overlap_fraction": 0.0},
}
"""The fields that each known feature of a run changes."""
# features of the published rows that describe and change nothing
FEATURES |= dict.fromkeys(
    ("match", "uneven_pp", "natural_routing", "flex_attention", "fp8_dot_product_attention"), lambda value: {}
)
NOT_MODELLED = {"cpu_offload": "tensors kept in host memory", "cpu_offloading_num_layers": "layers kept in host memory"}
"""Features that change a run in a way that nothing here prices."""


def changes(features: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a RuntimeSpec with the values that `features` give them, and the names, or values, that are unknown.

    Raises Unsupported where a feature is on that is not modelled.
    """
    changed: dict[str, Any] = {}
    unknown = []
    # graphs imply values of other features, which count where a run states them itself
    for key, value in sorted(features.items(), key=lambda pair: pair[0] != "cuda_graph"):
        effect = FEATURES.get(key)
        if key in NOT_MODELLED and value:
            raise Unsupported(
                f"features: {key}: {NOT_MODELLED[key]} are not modelled",
                "leave it out to price the run as if the GPU kept them",
            )
        fields = effect(value) if effect is not None else None
        if fields is not None:
            changed.update(fields)
        elif key not in NOT_MODELLED:
            unknown.append(key if effect is None else f"{key}: {value!r:.60}")
    return changed, tuple(unknown)
