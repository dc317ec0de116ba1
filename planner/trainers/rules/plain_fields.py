"""Rules on fields of a model that a trainer has nothing for, so that they must have their plain value."""

from __future__ import annotations

from typing import Any

from planner.trainers.rules.common import Rule, model_rule

_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("zero_centered_norm", False, "its norms multiply by the weight, not by 1 + weight"),
    ("pre_norms", True, "attention and MLP always have a norm before them"),
    ("post_norms", False, "it has no second norm after attention and MLP"),
    ("embedding_norm", False, "it has no norm after the embedding"),
    ("parallel_residual", None, "its MLP reads what attention adds to, never the layer's input"),
    ("attn_output_gate", False, "it has no gate on attention's output"),
    ("attn_logit_softcapping", None, "it does not cap attention logits"),
    ("final_logit_softcapping", None, "it does not cap the vocabulary's logits"),
    ("embedding_multiplier", 1, "it does not scale the embedding"),
    ("residual_multiplier", 1, "it adds to the residual stream unscaled"),
    ("logits_scaling", 1, "it does not scale the vocabulary's logits"),
    ("no_rope_layer_interval", None, "it rotates positions on every layer"),
)
"""Fields, their plain values, and what a trainer says of any other."""


def _unlike(field: str, plain: Any, message: str) -> Rule:
    return model_rule(field, lambda m: getattr(m, field) != plain, lambda m: message)


PLAIN = {row[0]: _unlike(*row) for row in _FIELDS}
"""The rules by field; a trainer lists those that it sets."""

HEAD_NORMS = model_rule(
    "qk_norm_over",
    lambda m: m.qk_norm and m.qk_norm_over != "head_dim",
    lambda m: "norms of queries and keys are over a head there, with one weight for all heads",
)
