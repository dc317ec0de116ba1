"""A mixture of experts from Megatron-LM's arguments: its sizes, its router, and how it balances the load."""

from __future__ import annotations

from typing import Any

from planner.export.megatron.model.layer_flags import layer_flags
from planner.export.megatron.options import Options, decimal, given, size, text
from planner.specs.units import is_count

ROUTER_OPTIONS = {
    "--num-experts", "--moe-router-topk", "--moe-layer-freq", "--moe-ffn-hidden-size",
    "--moe-router-topk-scaling-factor", "--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate",
    "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-router-score-function",
    "--moe-router-pre-softmax", "--moe-router-num-groups", "--moe-router-group-topk",
    "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--moe-apply-probs-on-input",
}  # fmt: skip


def read_experts(options: Options, width: int, bias: bool) -> dict[str, Any]:
    """Fields of the mixture; experts are as wide as a dense MLP (`width`) unless they are given their own."""
    chosen = given(options, "--moe-router-topk", 2)
    score = text(options, "--moe-router-score-function", "softmax")
    by_bias = "--moe-router-enable-expert-bias" in options
    # a softmax over the chosen is the whole one divided by their sum; others are divided where there are several
    normed = "--moe-router-pre-softmax" not in options if score == "softmax" else chosen > 1
    return {
        "num_experts": size(options, "--num-experts"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": given(options, "--moe-ffn-hidden-size", width),
        "shared_expert_intermediate_size": given(options, "--moe-shared-expert-intermediate-size", 0),
        "shared_expert_gate": "--moe-shared-expert-gate" in options,
        "router_bias": bias or by_bias,
        "balancing_bias": by_bias,
        "bias_update_rate": decimal(options, "--moe-router-bias-update-rate", 1e-3) if by_bias else None,
        "scoring_func": score,
        "norm_topk_prob": normed,
        "routed_scaling_factor": decimal(options, "--moe-router-topk-scaling-factor") or 1.0,
        "scores_on_input": "--moe-apply-probs-on-input" in options,
        **_groups(options),
        **_losses(options),
    }


def _groups(options: Options) -> dict[str, Any]:
    if "--moe-router-group-topk" not in options or "--moe-router-num-groups" not in options:
        return {}
    return {"n_group": size(options, "--moe-router-num-groups"), "topk_group": size(options, "--moe-router-group-topk")}


def _losses(options: Options) -> dict[str, Any]:
    """The first of the balancing losses; Megatron-LM's weight is 0 unless it is told."""
    kind = (options.get("--moe-router-load-balancing-type") or ["aux_loss"])[0]
    weight = decimal(options, "--moe-aux-loss-coeff", 0.0) if kind.endswith("aux_loss") else 0.0
    return {
        "router_aux_loss_coef": weight,
        "seq_aux": kind == "seq_aux_loss" and weight > 0,
        "router_z_loss_coef": decimal(options, "--moe-z-loss-coeff", 0.0),
    }


def layers_with_experts(options: Options, num_layers: int) -> list[bool]:
    """True for each layer that has experts: every n-th from the first on, or as a list says."""
    pattern = text(options, "--moe-layer-freq", "1").strip()
    if is_count(pattern) and int(pattern):
        return [layer % int(pattern) == 0 for layer in range(num_layers)]
    return layer_flags("--moe-layer-freq", pattern, num_layers)


def expert_layers(has_experts: list[bool]) -> dict[str, Any]:
    """Fields that say which layers have experts: the first k have none, then every n-th has; else each one's kind."""
    first = has_experts.index(True) if True in has_experts else len(has_experts)
    for every in range(1, first + 2):
        dense = first + 1 - every
        if has_experts == [i >= dense and (i - dense + 1) % every == 0 for i in range(len(has_experts))]:
            return {"moe": {"first_k_dense_replace": dense, "moe_layer_freq": every}}
    return {"mlp_layer_types": ["moe" if experts else "dense" for experts in has_experts]}
