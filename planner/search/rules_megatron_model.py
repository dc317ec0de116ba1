"""What Megatron-LM's arguments cannot say about a model, whatever the layout: no search avoids it."""

from __future__ import annotations

from collections.abc import Callable

from planner.search.rules import Rule
from planner.specs.model import ModelSpec


def _rule(reason: str, wrong: Callable[[ModelSpec], bool], message: Callable[[ModelSpec], str]) -> Rule:
    return Rule(reason, lambda model, training, shape: not wrong(model), lambda model, training, shape: message(model))


MEGATRON_MODEL_RULES: tuple[Rule, ...] = (
    _rule("position_embedding", lambda m: m.position_embedding == "alibi", lambda m: "it has no ALiBi"),
    _rule("embedding_norm", lambda m: m.embedding_norm, lambda m: "it has no norm after the embedding"),
    _rule("post_norms", lambda m: m.post_norms, lambda m: "it has no second norm after attention and MLP"),
    _rule(
        "activation",
        lambda m: m.activation not in (("silu",) if m.gated_mlp else ("gelu", "relu2")),
        lambda m: (
            f"{'gated MLPs are silu' if m.gated_mlp else 'plain MLPs gelu or relu2'} there, the model's {m.activation}"
        ),
    ),
    _rule(
        "norm_bias",
        lambda m: m.norm == "layernorm" and not m.has_norm_bias,
        lambda m: "its LayerNorm always has a bias",
    ),
    _rule(
        "qk_norm",
        lambda m: m.qk_norm and m.norm == "layernorm",
        lambda m: "queries and keys have the layers' own kind of norm, a LayerNorm, not RMSNorm",
    ),
    _rule(
        "attention_bias",
        lambda m: m.has_mlp_bias and not (m.qkv_bias and m.output_bias),
        lambda m: "where the MLP has biases attention has them too",
    ),
    _rule(
        "attention_bias",
        lambda m: m.output_bias and not m.has_mlp_bias,
        lambda m: "attention's output projection has a bias only where the MLP has one",
    ),
    _rule(
        "router_bias",
        lambda m: m.moe is not None and m.has_mlp_bias and not m.moe.router_bias,
        lambda m: "its router has a bias where the linear layers have one",
    ),
    _rule(
        "q_lora_rank",
        lambda m: m.mla is not None and m.mla.q_lora_rank is None,
        lambda m: "it norms the key-value latents only where queries are latent too",
    ),
    _rule(
        "num_nextn_predict_layers",
        lambda m: m.num_nextn_predict_layers > 0 and m.position_embedding not in ("rope", "none"),
        lambda m: f"multi-token prediction needs rope or no positions, not {m.position_embedding}",
    ),
)
"""The rules read no training and no shape."""
