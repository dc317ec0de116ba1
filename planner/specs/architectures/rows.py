"""A row of the table of architectures, and the keys and defaults that most rows share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from planner.specs.architectures.derivations import Config, Derived

Keys = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The spelling of a ModelSpec under one `model_type`."""

    keys: Keys
    """The config keys that may hold each of our fields, first choice first."""
    defaults: dict[str, Any]
    """The values that transformers assumes, by config key."""
    derive: tuple[Callable[[Config], Derived], ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    """Keys under which a mapping holds further keys of the config."""

    def like(
        self, *derive: Callable[[Config], Derived], keys: Keys | None = None, defaults: dict[str, Any] | None = None,
        **fixed: Any,
    ) -> Architecture:  # fmt: skip
        """This row with further functions, keys, defaults and fixed fields."""
        return replace(
            self, keys=self.keys | (keys or {}), defaults=self.defaults | (defaults or {}),
            derive=(*self.derive, *derive), fixed=self.fixed | fixed,
        )  # fmt: skip

    def inside(self, *sections: str) -> Architecture:
        """This row for configs that hold some of its keys in mappings under `sections`."""
        return replace(self, sections=sections)

    def less(self, *fields: str) -> Architecture:
        """This row without the keys of some fields."""
        return replace(self, keys=without(self.keys, *fields))


def keys(*same: str, **other: str | tuple[str, ...]) -> Keys:
    """Config keys by field: `same` are spelled alike, `other` are fields with the keys that hold them."""
    renamed = {name: (keys,) if isinstance(keys, str) else keys for name, keys in other.items()}
    return {key: (key,) for key in same} | renamed


def without(names: Keys, *fields: str) -> Keys:
    """`names` less the keys of some fields."""
    return {name: spelled for name, spelled in names.items() if name not in fields}


def sizes(layers: int, hidden: int, heads: int, kv_heads: int | None, vocab: int, **other: Any) -> dict[str, Any]:
    """Defaults of the keys that nearly every architecture has."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        **other,
    }  # fmt: skip


BLOCK = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "tie_word_embeddings", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
DENSE = keys(*BLOCK, "intermediate_size")
MOE = keys("num_experts_per_tok", "moe_intermediate_size", num_experts=("num_experts", "num_local_experts"))
MLA = keys("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = without(DENSE, "head_dim") | MLA | MOE
DEEPSEEK |= keys("num_nextn_predict_layers", num_experts=("n_routed_experts", "num_local_experts", "num_experts"))
MULTIPLIERS = keys("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
GPT = keys(
    "vocab_size", "tie_word_embeddings", num_hidden_layers=("n_layer", "num_hidden_layers"),
    hidden_size=("n_embd", "hidden_size", "n_embed"), num_attention_heads=("n_head", "num_attention_heads"),
)  # fmt: skip
"""Keys as GPT-2 has them."""
ROTARY = {"position_embedding": "rope"}
LAYERNORM = {"gated_mlp": False, "norm": "layernorm", "norm_bias": True}
DEEPSEEK_RANKS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
ROUTED = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
"""Defaults of a router in the way of DeepSeek-V3."""
NORMED = {"norm_topk_prob": True}
"""The scores of the chosen experts are normed whatever the config says: a softmax over them alone."""
