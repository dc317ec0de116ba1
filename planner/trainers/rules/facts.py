"""Facts of a model that a spec implies, which rules ask for and exporters write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec


def has_groups(moe: MoESpec) -> bool:
    """Tokens choose groups of experts first; one group is none."""
    return (moe.n_group or 1) > 1


def query_width(model: ModelSpec) -> int:
    """Width of a query head."""
    return model.head_dim if model.mla is None else model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim


def has_usual_scale(model: ModelSpec) -> bool:
    """Attention logits are divided by the root of a query head's width."""
    given = model.attention_multiplier
    return given is None or math.isclose(given, query_width(model) ** -0.5, rel_tol=1e-6)


def has_local_base(model: ModelSpec) -> bool:
    """Sliding layers have rotary frequencies of their own."""
    given = model.rope_local_base_freq
    return given is not None and given != model.rope_theta and any(kind.attention == "sliding" for kind in model.kinds)


def rotary_method(model: ModelSpec) -> str | None:
    """How rotary frequencies are stretched; None where they are not, or by a factor of 1."""
    scaling = model.rope_scaling
    if scaling is None or model.position_embedding != "rope" or (scaling.factor == 1 and not scaling.short_factor):
        return None
    return scaling.rope_type


def original_length(model: ModelSpec) -> int:
    """Tokens of the sequences that the model was trained on before its positions were stretched; 0 if nothing says."""
    scaling = model.rope_scaling
    return (scaling.original_max_position_embeddings or 0) if scaling is not None else 0


def every_nth(flags: Sequence[bool]) -> int | None:
    """n where every n-th flag is set and no other; None for any other pattern, and where none is."""
    n = list(flags).index(True) + 1 if True in flags else 0
    return n if n and list(flags) == [(i + 1) % n == 0 for i in range(len(flags))] else None
