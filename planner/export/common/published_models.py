"""The published model that sizes read from a configuration belong to."""

from __future__ import annotations

from functools import cache
from typing import Any

from planner.specs.model import ModelSpec
from planner.specs.registry import load_model, model_names

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def published_name(model: dict[str, Any]) -> str | None:
    """The shipped model with the same layers, widths, heads, vocabulary and experts, or None."""
    for name, spec in _shipped():
        num_experts = None if spec.moe is None else spec.moe.num_experts
        same_sizes = all(model.get(field) == getattr(spec, field) for field in _SIZES)
        same_sizes &= (spec.indexer is None) == (model.get("indexer") is None)
        if same_sizes and (model.get("moe") or {}).get("num_experts") == num_experts:
            return name
    return None


@cache
def _shipped() -> tuple[tuple[str, ModelSpec], ...]:
    """Every model that ships; to look up each file for each question is a fifth of an import's time."""
    return tuple((name, load_model(name)) for name in model_names())
