"""A model of a few kilobytes; no conftest, of which there are several."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "name": "tiny",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
