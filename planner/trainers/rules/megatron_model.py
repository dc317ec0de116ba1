"""Rules on models that Megatron-LM's arguments cannot describe, whatever the layout: no search avoids them."""

from __future__ import annotations

from collections.abc import Callable

from planner.specs.model import ModelSpec
from planner.trainers.rules.common import Rule, model_rule, release, stretch_rule
from planner.trainers.rules.facts import has_local_base, has_usual_scale, rotary_method
from planner.trainers.rules.megatron_core import CORE_MODEL_RULES, NEW_QUERY_NORM_SINCE, norms_queries_twice
from planner.trainers.rules.plain_fields import HEAD_NORMS, PLAIN

_YARN_OF_LATENTS = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": True}
"""Numbers of yarn that have no option for latent attention: the defaults of MLATransformerConfig, DeepSeek's."""


def _activations(model: ModelSpec) -> tuple[str, ...]:
    """The activations that an option asks for; GELU fused with a bias is the tanh's."""
    if model.gated_mlp:
        return ("silu", "quick_gelu")
    return ("gelu", "relu2", "gelu_tanh") if model.has_mlp_bias else ("gelu", "relu2")


def _other_yarn(model: ModelSpec) -> str | None:
    """A number of latent attention's yarn that no option says."""
    scaling = model.rope_scaling
    if scaling is None or model.mla is None or rotary_method(model) != "yarn":
        return None
    for name, there in _YARN_OF_LATENTS.items():
        given = getattr(scaling, name)
        if given is not None and given != there:
            return f"{name} of yarn is {there:g} for latent attention, not {given:g}"
    return None


def _other_factor(model: ModelSpec) -> str | None:
    """A factor that no option says: of llama3 the option is read and not used, of linear it is a whole number."""
    method, factor = rotary_method(model), (model.rope_scaling.factor if model.rope_scaling else None) or 1.0
    if method == "llama3" and factor != 8:
        return f"it scales as llama3 by 8 whatever --rope-scaling-factor says, the model by {factor:g}"
    if method == "linear" and factor != round(factor):
        return f"it stretches by whole factors, not {factor:g}"
    return None


_QUERY_NORM = model_rule(
    "q_lora_rank",
    lambda m: norms_queries_twice(m, ""),
    lambda m: (
        f"since core {NEW_QUERY_NORM_SINCE} it norms the layer's input once more before queries that are not latent"
    ),
)

MEGATRON_MODEL_RULES: tuple[Rule, ...] = (
    _QUERY_NORM,
    *CORE_MODEL_RULES,
    PLAIN["pre_norms"],
    PLAIN["post_norms"],
    HEAD_NORMS,
    model_rule(
        "activation",
        lambda m: m.activation not in _activations(m),
        lambda m: (
            f"{'gated' if m.gated_mlp else 'plain'} MLPs {'with' if m.has_mlp_bias else 'without'} biases are "
            f"{' or '.join(_activations(m))} there, the model's {m.activation}"
        ),
    ),
    model_rule(
        "glu_linear_offset",
        lambda m: m.glu_linear_offset != 0 and m.activation != "quick_gelu",
        lambda m: "it adds an offset to the linear half beside quick_gelu only",
    ),
    model_rule(
        "attention_multiplier",
        lambda m: not has_usual_scale(m),
        lambda m: f"no option scales attention logits, the model does by {m.attention_multiplier:.4g}",
    ),
    PLAIN["attn_logit_softcapping"],
    PLAIN["final_logit_softcapping"],
    PLAIN["embedding_multiplier"],
    PLAIN["logits_scaling"],
    model_rule(
        "rope_local_base_freq", has_local_base, lambda m: "sliding layers have the rotary base of the others there"
    ),
    stretch_rule(_other_yarn),
    stretch_rule(_other_factor),
)
"""Rules of the newest Megatron-LM, core 0.20.0."""


_CAME_WITH: tuple[tuple[str, str, Callable[[ModelSpec], bool], str], ...] = (
    ("0.15", "sliding_window", lambda m: m.sliding_window is not None, "sliding windows"),
    ("0.15", "attention_sinks", lambda m: m.attention_sinks, "attention sinks"),
    ("0.15", "activation", lambda m: m.activation == "quick_gelu", "gated quick_gelu"),
    ("0.16", "shared_expert_gate", lambda m: m.moe is not None and m.moe.shared_expert_gate, "gates of shared experts"),
    ("0.16", "attn_output_gate", lambda m: m.attn_output_gate, "gates of attention's output"),
    ("0.18", "scoring_func", lambda m: m.scoring_func == "sqrtsoftplus", "sqrtsoftplus scores"),
    ("0.20", "swiglu_limit", lambda m: m.swiglu_limit is not None and m.activation == "silu", "clamped SwiGLU"),
)
"""Versions of Megatron core, a name, the models that it is about, and the thing that came with the version."""


def megatron_model_rules(version: str) -> tuple[Rule, ...]:
    """The rules on models of one version; of the newest where it is empty."""
    left = tuple(rule for rule in MEGATRON_MODEL_RULES if rule is not _QUERY_NORM)
    normed_twice = () if version and release(version) < release(NEW_QUERY_NORM_SINCE) else (_QUERY_NORM,)
    return (*left, *normed_twice, *came_later(version), *stretches_later(version))


def stretches_later(version: str) -> tuple[Rule, ...]:
    """The rules on stretched frequencies that a version of Megatron core sets and later ones do not."""
    came_with = (("0.19", "yarn", "options for yarn"), ("0.20", "linear", "linear scaling"))
    return tuple(
        stretch_rule(_unless(method, f"Megatron core {version} has no {thing}, which came with {since}"))
        for since, method, thing in came_with
        if version and release(version) < release(since)
    )


def _unless(method: str, says: str) -> Callable[[ModelSpec], str | None]:
    return lambda model: says if rotary_method(model) == method and model.mla is None else None


def came_later(version: str) -> tuple[Rule, ...]:
    """The rules that a version of Megatron core sets and later ones do not; none for the newest."""
    return tuple(
        model_rule(name, wrong, _says(f"Megatron core {version} has no {thing}, which came with {since}"))
        for since, name, wrong, thing in _CAME_WITH
        if version and release(version) < release(since)
    )


def _says(message: str) -> Callable[[ModelSpec], str]:
    """A rule's message that is the same for all models."""
    return lambda model: message
