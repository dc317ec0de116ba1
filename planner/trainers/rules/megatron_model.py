"""Rules on models that Megatron-LM's arguments cannot describe, whatever the layout: no search avoids them."""

from __future__ import annotations

from collections.abc import Callable

from planner.specs.model import ModelSpec
from planner.trainers.rules.common import Rule, model_rule, release

MEGATRON_MODEL_RULES: tuple[Rule, ...] = (
    model_rule("position_embedding", lambda m: m.position_embedding == "alibi", lambda m: "it has no ALiBi"),
    model_rule("embedding_norm", lambda m: m.embedding_norm, lambda m: "it has no norm after the embedding"),
    model_rule("post_norms", lambda m: m.post_norms, lambda m: "it has no second norm after attention and MLP"),
    model_rule(
        "attention_chunk_size", lambda m: m.attention_chunk_size is not None, lambda m: "it has no attention in chunks"
    ),
    model_rule(
        "activation",
        lambda m: m.activation not in (("silu",) if m.gated_mlp else ("gelu", "gelu_tanh", "relu2")),
        lambda m: (
            f"{'gated MLPs are silu' if m.gated_mlp else 'plain MLPs gelu or relu2'} there, the model's {m.activation}"
        ),
    ),
    model_rule(
        "norm_bias",
        lambda m: m.norm == "layernorm" and not m.has_norm_bias,
        lambda m: "its LayerNorm always has a bias",
    ),
    model_rule(
        "qk_norm",
        lambda m: m.qk_norm and m.norm == "layernorm",
        lambda m: "queries and keys have the layers' own kind of norm, a LayerNorm, not RMSNorm",
    ),
    model_rule(
        "attention_bias",
        lambda m: m.has_mlp_bias and not (m.qkv_bias and m.output_bias),
        lambda m: "where the MLP has biases attention has them too",
    ),
    model_rule(
        "attention_bias",
        lambda m: m.output_bias and not m.has_mlp_bias,
        lambda m: "attention's output projection has a bias only where the MLP has one",
    ),
    model_rule(
        "router_bias",
        lambda m: m.moe is not None and m.has_mlp_bias and not m.moe.router_bias,
        lambda m: "its router has a bias where the linear layers have one",
    ),
    model_rule(
        "q_lora_rank",
        lambda m: m.mla is not None and m.mla.q_lora_rank is None,
        lambda m: "it norms the key-value latents only where queries are latent too",
    ),
    model_rule(
        "num_nextn_predict_layers",
        lambda m: m.num_nextn_predict_layers > 0 and m.position_embedding not in ("rope", "none"),
        lambda m: f"multi-token prediction needs rope or no positions, not {m.position_embedding}",
    ),
)

_CAME_WITH: tuple[tuple[str, str, Callable[[ModelSpec], bool], str], ...] = (
    ("0.15", "sliding_window", lambda m: m.sliding_window is not None, "sliding windows"),
    ("0.15", "attention_sinks", lambda m: m.attention_sinks, "attention sinks"),
    ("0.16", "shared_expert_gate", lambda m: m.moe is not None and m.moe.shared_expert_gate, "gates of shared experts"),
)
"""Versions of Megatron core, a name, the models that it is about, and the thing that came with the version."""


def model_rules_before(version: str) -> tuple[Rule, ...]:
    """The rules on models that a version of Megatron core sets and later ones do not; none for the newest."""
    return tuple(
        model_rule(name, wrong, _says(f"Megatron core {version} has no {thing}, which came with {since}"))
        for since, name, wrong, thing in _CAME_WITH
        if version and release(version) < release(since)
    )


def _says(message: str) -> Callable[[ModelSpec], str]:
    """A rule's message that is the same for all models."""
    return lambda model: message
