"""A model of a few kilobytes, and what older versions of torch cannot run; no conftest, of which there are several."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "name": "tiny", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GPT: dict[str, Any] = {
    "gated_mlp": False, "activation": "gelu", "norm": "layernorm", "bias": True, "position_embedding": "learned",
    "max_position_embeddings": 8,
}  # fmt: skip
