"""A router in Megatron-LM's arguments: how it scores, which experts it may choose, and how their load is balanced."""

from __future__ import annotations

from planner.export.common.arguments import Arguments
from planner.specs.model_parts import MoESpec


def router_arguments(moe: MoESpec) -> Arguments:
    """The arguments of a router with everything stated."""
    arguments: Arguments = {
        "--moe-router-topk": moe.num_experts_per_tok,
        "--moe-router-dtype": "fp32",
        "--moe-router-score-function": moe.scoring_func or "softmax",
        **_balance(moe),
    }
    # before the choice scores are not normed over the chosen; of a single one the softmax would be 1
    if moe.scoring_func == "softmax" and (not moe.norm_topk_prob or moe.num_experts_per_tok == 1):
        arguments["--moe-router-pre-softmax"] = True
    if moe.n_group is not None and moe.topk_group is not None:
        arguments |= {"--moe-router-num-groups": moe.n_group, "--moe-router-group-topk": moe.topk_group}
    if moe.routed_scaling_factor != 1:
        arguments["--moe-router-topk-scaling-factor"] = moe.routed_scaling_factor
    if moe.scores_on_input:
        arguments["--moe-apply-probs-on-input"] = True
    return arguments


def _balance(moe: MoESpec) -> Arguments:
    """A loss of each sequence or of the batch, a bias that moves with the load, or both."""
    loss = moe.router_aux_loss_coef or 0.0
    kind = "none" if not loss else "seq_aux_loss" if moe.seq_aux else "aux_loss"
    arguments: Arguments = {"--moe-router-load-balancing-type": kind, "--moe-aux-loss-coeff": loss}
    if moe.balancing_bias:
        arguments["--moe-router-enable-expert-bias"] = True
        arguments["--moe-router-bias-update-rate"] = moe.bias_update_rate or 0.0
    if moe.router_z_loss_coef:
        arguments["--moe-z-loss-coeff"] = moe.router_z_loss_coef
    return arguments
