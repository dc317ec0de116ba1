"""What a run says that its trainer had switched on or off, and which fields of a RuntimeSpec that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Effect = Callable[[Any], dict[str, Any] | None]
"""Fields that a feature's value changes; None where it is no value of the feature."""


def _switch(name: str) -> Effect:
    return lambda value: {name: bool(value)}


def _fraction(names: tuple[str, ...], when_on: float) -> Effect:
    return lambda value: dict.fromkeys(names, when_on if value else 0.0)


def _one_of(name: str, values: tuple[str, ...]) -> Effect:
    return lambda value: {name: value} if value in values else None


EP_OVERLAP = 0.8
"""Of expert exchanges, behind another micro-batch's products, where a recipe asks for it."""
ROWWISE = 1.45
"""Of torchao's 8-bit products with a scale for each row or block, over those with one for a tensor.

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
"""What a trainer that relies on torch.compile loses without it."""
_SEND_ONCE = ("flex", "deepep", "hybridep")
_CAPACITY = {"sends_tokens_once": False, "awaits_token_counts": False, "moe_host_factor": 0.85}
"""Of Megatron's dispatchers the all-to-all alone gives experts a fixed number of tokens: the host awaits no count."""


def _graphs(value: Any) -> dict[str, Any]:
    """CUDA graphs of whole iterations, or of parts of a mixture's layer.

    Of the host's time routing is 0.15, attention another 0.25: Qwen3 30B and 235B on B200, GB200 and GB300, whose
    recipes of one release replay the one, the other or both.
    """
    if value in (True, "full_iteration", "full"):
        # recipes that capture whole iterations of mixtures also overlap their exchanges (Megatron-Bridge since 26.06)
        return {"cuda_graphs": True} | ({} if value is True else {"ep_overlap_fraction": EP_OVERLAP})
    if not value:
        return {}
    return {"moe_host_factor": 0.6 if "attn" in str(value) else 0.85, "ep_overlap_host_factor": 1.0}


FEATURES: dict[str, Effect] = {
    "flash_attention": _switch("flash_attention"),
    "activation_fusion": _switch("fused_activation"),
    "async_tp": _fraction(("tp_overlap_fraction", "mla_tp_overlap_fraction"), 0.688),
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
    "overlap_grad_reduce": _fraction(("gradient_overlap_fraction",), 0.9),
    "overlap_param_gather": _fraction(("parameter_overlap_fraction",), 0.9),
    "p2p_overlap": lambda value: {"p2p_overlap": bool(value), "interleaved_p2p_overlap": bool(value)},
    "precision_recipe": lambda value: _RECIPES.get(str(value), {}),
    "reentrant_checkpoint": lambda value: {"stops_recompute_early": not value},
    # where it is on, as much hides as the trainer's own runs say
    "tp_comm_overlap": lambda value: {} if value else {"tp_overlap_fraction": 0.0},
}
"""What each known feature of a run changes; descriptive ones change nothing."""
# features of the published rows that describe and change nothing
for _name in ("match", "uneven_pp", "natural_routing", "flex_attention", "fp8_dot_product_attention"):
    FEATURES[_name] = lambda value: {}
NOT_MODELLED = {"cpu_offload": "tensors kept in host memory", "cpu_offloading_num_layers": "layers kept in host memory"}
"""What would change a run in a way that nothing here prices."""
