"""Rules on models that Megatron core cannot build, whether Megatron-LM's arguments or Megatron-Bridge describe them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.common import Rule, model_rule, release, stretch_rule
from planner.trainers.rules.facts import rotary_method
from planner.trainers.rules.fine_tuning import WHOLE_MODEL_RULES
from planner.trainers.rules.layer_kinds import UNWRITTEN_RULES
from planner.trainers.rules.plain_fields import PLAIN

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of Llama 3's scaling that are fixed there (RotaryEmbedding._apply_scaling), and Llama 3's own."""


def _has_two_scores(model: ModelSpec) -> bool:
    """Several sigmoid scores that are not divided by their sum."""
    moe = model.moe
    several = moe is not None and moe.num_experts_per_tok > 1 and not moe.norm_topk_prob
    return several and model.scoring_func != "softmax"


def _broken_scaling(model: ModelSpec) -> str | None:
    """The number or method of a model's rotary scaling that core does not have; None where it has all."""
    method, scaling = rotary_method(model), model.rope_scaling
    if method is None or scaling is None:
        return None
    if method in ("dynamic", "longrope"):
        return f"it has no {method} scaling"
    if method == "yarn" and not math.isclose(_core_yarn_scale(scaling), scaling.yarn_scale, rel_tol=1e-6):
        return f"yarn scales queries and keys by {_core_yarn_scale(scaling):.4g} there, not by {scaling.yarn_scale:.4g}"
    if model.mla is not None and method != "yarn":
        return f"latent attention has yarn there, not {method}"
    return next(_other_llama3(scaling), None) if method == "llama3" else None


def _core_yarn_scale(scaling: RopeScalingSpec) -> float:
    """Yarn's scale of rotated queries and keys as core computes it: of weights that are not told 1 and 0."""
    growth = 0.1 * math.log(max(scaling.factor or 1.0, 1.0))
    weight = 1.0 if scaling.mscale is None else scaling.mscale
    return (growth * weight + 1) / (growth * (scaling.mscale_all_dim or 0.0) + 1)


def _other_llama3(scaling: RopeScalingSpec) -> Iterator[str]:
    for name, there in _LLAMA3.items():
        given = getattr(scaling, name)
        if given is not None and given != there:
            yield f"{name} of llama3 is {there:g} there, not {given:g}"


CORE_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    model_rule("position_embedding", lambda m: m.position_embedding == "alibi", lambda m: "it has no ALiBi"),
    PLAIN["embedding_norm"],
    PLAIN["parallel_residual"],
    PLAIN["residual_multiplier"],
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
        "qk_norm",
        lambda m: m.qk_norm and m.mla is not None,
        lambda m: "latent attention norms its latents there, not queries and keys",
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
        "attn_output_gate",
        lambda m: m.attn_output_gate and m.mla is not None,
        lambda m: "latent attention has no output gate there",
    ),
    model_rule(
        "router_bias",
        lambda m: m.moe is not None and m.has_mlp_bias and not m.moe.router_bias,
        lambda m: "its router has a bias where the linear layers have one",
    ),
    model_rule(
        "router_bias",
        lambda m: m.moe is not None and m.moe.router_bias and not m.balances_by_bias and not m.has_mlp_bias,
        lambda m: "its router learns a bias only where the linear layers have one",
    ),
    model_rule(
        "balancing_bias",
        lambda m: m.balances_by_bias and m.scoring_func == "softmax",
        lambda m: "a balancing bias needs sigmoid or sqrtsoftplus scores there, not softmax",
    ),
    model_rule(
        "norm_topk_prob",
        _has_two_scores,
        lambda m: f"it divides {m.scoring_func} scores of several experts by their sum",
    ),
    model_rule(
        "scores_on_input",
        lambda m: m.moe is not None and m.moe.scores_on_input and m.moe.num_experts_per_tok > 1,
        lambda m: "scores scale what goes into experts there where a token visits one alone",
    ),
    model_rule(
        "swiglu_limit",
        lambda m: m.swiglu_limit is not None and not (m.activation == "quick_gelu" or m.moe is not None),
        lambda m: "it clamps dense SwiGLU nowhere",
    ),
    stretch_rule(_broken_scaling),
    model_rule(
        "num_nextn_predict_layers",
        lambda m: m.num_nextn_predict_layers > 0 and m.position_embedding not in ("rope", "none"),
        lambda m: f"multi-token prediction needs rope or no positions, not {m.position_embedding}",
    ),
    Rule(
        "attention_chunk_size",
        lambda model, training, shape: training.seq_length <= (model.attention_chunk_size or training.seq_length),
        lambda model, training, shape: (
            f"it has no attention in chunks, the model's are of {model.attention_chunk_size} tokens and sequences of "
            f"{training.seq_length}"
        ),
    ),
)
"""Rules of Megatron core 0.20.0."""

NEW_QUERY_NORM_SINCE = "0.19"
"""`QKNormConfigResolver` gives the projection of queries that are not latent a norm of its own, beside the layer's."""


def norms_queries_twice(model: ModelSpec, version: str) -> bool:
    """True where a version of Megatron core norms the input of queries once more than the model does."""
    is_older = bool(version) and release(version) < release(NEW_QUERY_NORM_SINCE)
    return model.mla is not None and model.mla.q_lora_rank is None and not is_older
