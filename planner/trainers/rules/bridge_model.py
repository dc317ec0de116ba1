"""Rules on models that Megatron-Bridge cannot describe, which has more recipes and fields than Megatron-LM options."""

from __future__ import annotations

import math
from typing import Literal

from planner.specs.model import ModelSpec
from planner.trainers.rules.common import Rule, model_rule, stretch_rule
from planner.trainers.rules.facts import every_nth, has_local_base, rotary_method
from planner.trainers.rules.megatron_core import CORE_MODEL_RULES
from planner.trainers.rules.megatron_model import came_later
from planner.trainers.rules.plain_fields import HEAD_NORMS, PLAIN

Family = Literal["gpt", "mla", "gemma2", "gemma3"]
"""The recipe that a model starts from; those of Gemma build layers of their own."""


def family_of(model: ModelSpec) -> Family:
    """The recipe whose layers are the model's."""
    if model.mla is not None:
        return "mla"
    if not model.post_norms:
        return "gpt"
    return "gemma2" if model.attn_logit_softcapping is not None else "gemma3"


def _is_gemma(model: ModelSpec) -> bool:
    """Dense gated layers with four zero-centred norms, and an embedding scaled by the root of its width."""
    return (
        model.pre_norms
        and model.gated_mlp
        and model.moe is None
        and model.norm == "rmsnorm"
        and not (model.qkv_bias or model.output_bias or model.has_mlp_bias)
        and math.isclose(model.embedding_multiplier, model.hidden_size**0.5, rel_tol=1e-4)
    )


def _is_gemma3(model: ModelSpec) -> bool:
    """Norms on queries and keys, and every n-th layer without a window."""
    whole = every_nth([kind.attention == "full" for kind in model.layers])
    slides = model.sliding_window is not None and whole is not None and whole > 1
    return _is_gemma(model) and model.qk_norm and slides and model.final_logit_softcapping is None


def _is_gemma2(model: ModelSpec) -> bool:
    """Capped logits of attention and of the vocabulary, and a window on every other layer from the first."""
    halves = [kind.attention == "sliding" for kind in model.layers] == [i % 2 == 0 for i in range(len(model.layers))]
    return _is_gemma(model) and not model.qk_norm and halves and model.final_logit_softcapping is not None


def _is_of_no_recipe(model: ModelSpec) -> bool:
    family = family_of(model)
    return (family == "gemma3" and not _is_gemma3(model)) or (family == "gemma2" and not _is_gemma2(model))


def _has_own_scale(model: ModelSpec) -> bool:
    """The recipe scales the embedding, and caps logits."""
    return family_of(model) in ("gemma2", "gemma3")


def _stretched_otherwise(model: ModelSpec) -> str | None:
    known, method = {"gemma2": (None,), "gemma3": (None, "linear")}.get(family_of(model)), rotary_method(model)
    if known is None or _is_of_no_recipe(model) or method in known:
        return None
    return f"recipes of Gemma 3 stretch linearly and of Gemma 2 not at all, not by {method}"


BRIDGE_MODEL_RULES: tuple[Rule, ...] = (
    *CORE_MODEL_RULES,
    PLAIN["pre_norms"],
    model_rule(
        "post_norms",
        _is_of_no_recipe,
        lambda m: "it has second norms after attention and MLP in recipes of Gemma 2 and 3 only, whose layers differ",
    ),
    HEAD_NORMS,
    model_rule(
        "glu_linear_offset",
        lambda m: m.glu_linear_offset != 0 and not m.gated_mlp,
        lambda m: "a plain MLP has no linear half to add an offset to",
    ),
    model_rule(
        "attn_logit_softcapping",
        lambda m: m.attn_logit_softcapping is not None and not _has_own_scale(m),
        lambda m: "it caps attention logits in recipes of Gemma 2 only",
    ),
    model_rule(
        "final_logit_softcapping",
        lambda m: m.final_logit_softcapping is not None and not _has_own_scale(m),
        lambda m: "it caps the vocabulary's logits in recipes of Gemma 2 only",
    ),
    model_rule(
        "embedding_multiplier",
        lambda m: m.embedding_multiplier != 1 and not _has_own_scale(m),
        lambda m: "it scales the embedding in recipes of Gemma 2 and 3 only",
    ),
    PLAIN["logits_scaling"],
    stretch_rule(_stretched_otherwise),
    model_rule(
        "rope_local_base_freq",
        lambda m: has_local_base(m) and family_of(m) != "gemma3",
        lambda m: "sliding layers have a rotary base of their own in recipes of Gemma 3 only",
    ),
)
"""Rules of Megatron-Bridge 0.7.0 on Megatron core 0.20.0."""


def bridge_model_rules(version: str) -> tuple[Rule, ...]:
    """The rules on models of the release that holds a version of Megatron core: its fields need no options."""
    return BRIDGE_MODEL_RULES + came_later(version)
