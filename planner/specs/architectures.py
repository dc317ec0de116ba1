"""Hugging Face architectures: a row per `model_type` that says how its `config.json` spells a ModelSpec.

A row holds the config key of each field, the values that transformers 5.23 assumes for absent keys, the fields that are
the same for every model of the architecture, and the functions that work out the others (`derivations`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.specs import derivations as d
from planner.specs.derivations import Config, Derived


@dataclass(frozen=True, slots=True)
class Architecture:
    """The spelling of a ModelSpec under one `model_type`."""

    keys: dict[str, tuple[str, ...]]
    """The config keys that may hold each of our fields, first choice first."""
    defaults: dict[str, Any]
    """The values that transformers assumes, by config key."""
    derive: tuple[Callable[[Config], Derived], ...]
    fixed: dict[str, Any] = field(default_factory=dict)


def _keys(*same: str, **other: str | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Config keys by field: `same` are spelled alike, `other` are fields with the keys that hold them."""
    renamed = {name: (keys,) if isinstance(keys, str) else keys for name, keys in other.items()}
    return {key: (key,) for key in same} | renamed


_BLOCK = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "tie_word_embeddings", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
_DENSE = _keys(*_BLOCK, "intermediate_size")
_MOE = _keys("num_experts_per_tok", "moe_intermediate_size", num_experts=("num_experts", "num_local_experts"))
_MLA = _keys("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK = {key: name for key, name in _DENSE.items() if key != "head_dim"} | _MLA | _MOE
_DEEPSEEK |= _keys("num_nextn_predict_layers", num_experts=("n_routed_experts", "num_local_experts"))
_ROTARY = {"position_embedding": "rope"}
_GEMMA = {"post_norms": True, **_ROTARY}
_LAYERNORM = {"gated_mlp": False, "norm": "layernorm", "norm_bias": True}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int | None, vocab: int, **other: Any) -> dict[str, Any]:
    """Defaults of the keys that nearly every architecture has."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": False, "hidden_act": "silu", **other,
    }  # fmt: skip


_DEEPSEEK_RANKS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "intermediate_size": 9216, "head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip
_SHARED = d.shared_experts("n_shared_experts")
_ERNIE_DEFAULTS = {"rope_theta": 5e5, "use_bias": False, "tie_word_embeddings": True}
_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_LLAMA = Architecture(
    keys=_DENSE | _keys("mlp_bias"),
    defaults=_sizes(32, 4096, 32, None, 32000, intermediate_size=11008),
    derive=(d.activation, d.attention_bias),
    fixed=_ROTARY,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "llama4_text": Architecture(
        keys=_keys(*_BLOCK, intermediate_size="intermediate_size_mlp") | _MOE
        | _keys(moe_intermediate_size="intermediate_size"),
        defaults=_sizes(48, 5120, 40, 8, 202048, intermediate_size=8192, intermediate_size_mlp=16384, head_dim=128,
                        num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
                        attention_chunk_size=8192),
        derive=(d.activation, d.attention_bias, d.window(d.unrotated, "attention_chunk_size"), d.llama4_shared,
                d.moe_layers(d.llama4_moe)),
        fixed=_ROTARY,
    ),
    "mistral": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, sliding_window=4096),
        derive=(d.activation, d.window(d.never)),
        fixed=_ROTARY,
    ),
    "mixtral": Architecture(
        keys=_keys(*_BLOCK) | _MOE | _keys(moe_intermediate_size="intermediate_size"),
        defaults=_sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2),
        derive=(d.activation, d.window(d.never)),
        fixed=_ROTARY,
    ),
    "qwen2": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 32, 151936, intermediate_size=22016, **_QWEN_WINDOW),
        derive=(d.activation, d.qkv_bias, d.window(d.qwen_full)),
        fixed=_ROTARY,
    ),
    "qwen2_moe": Architecture(
        keys=_DENSE | _MOE | _keys("shared_expert_intermediate_size"),
        defaults=_sizes(24, 2048, 16, 16, 151936, intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
                        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1,
                        **_QWEN_WINDOW),
        derive=(d.activation, d.qkv_bias, d.window(d.qwen_full), d.moe_layers(d.qwen_moe)),
        fixed={"shared_expert_gate": True, **_ROTARY},
    ),
    "qwen3": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 32, 151936, intermediate_size=22016, head_dim=128, **_QWEN_WINDOW),
        derive=(d.activation, d.attention_bias, d.window(d.qwen_full)),
        fixed={"qk_norm": True, **_ROTARY},
    ),
    "qwen3_moe": Architecture(
        keys=_DENSE | _MOE,
        defaults=_sizes(24, 2048, 32, 4, 151936, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
                        moe_intermediate_size=768, decoder_sparse_step=1, **_QWEN_WINDOW),
        derive=(d.activation, d.attention_bias, d.window(d.qwen_full), d.moe_layers(d.qwen_moe)),
        fixed={"qk_norm": True, **_ROTARY},
    ),
    "deepseek_v2": Architecture(
        keys=_DEEPSEEK,
        defaults=_sizes(32, 4096, 32, None, 102400, intermediate_size=11008, moe_intermediate_size=1407,
                        n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=0, **_DEEPSEEK_RANKS),
        derive=(d.activation, d.attention_bias, _SHARED, d.latent_heads, d.moe_layers(d.deepseek_moe)),
        fixed=_ROTARY,
    ),
    "deepseek_v3": Architecture(
        keys=_DEEPSEEK,
        defaults=_sizes(61, 7168, 128, None, 129280, intermediate_size=18432, moe_intermediate_size=2048,
                        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
                        **_DEEPSEEK_RANKS),
        derive=(d.activation, d.attention_bias, _SHARED, d.latent_heads, d.moe_layers(d.deepseek_moe)),
        fixed={"router_bias": True, **_ROTARY},
    ),
    "gpt2": Architecture(
        keys=_keys("vocab_size", "tie_word_embeddings", num_hidden_layers="n_layer", hidden_size="n_embd",
                   num_attention_heads="n_head", max_position_embeddings="n_positions"),
        defaults={"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
                  "activation_function": "gelu_new", "tie_word_embeddings": True},
        derive=(d.gpt2_sizes,),
        fixed={"bias": True, "position_embedding": "learned", **_LAYERNORM},
    ),
    "gpt_neox": Architecture(
        keys=_keys("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
                   "tie_word_embeddings", rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
        defaults=_sizes(44, 6144, 64, None, 50432, intermediate_size=24576, hidden_act="gelu", attention_bias=True,
                        rotary_pct=0.25),
        derive=(d.activation, d.attention_bias),
        fixed={"bias": True, **_LAYERNORM, **_ROTARY},
    ),
    "gpt_oss": Architecture(
        keys=_keys(*_BLOCK, num_experts=("num_local_experts", "num_experts"), moe_intermediate_size="intermediate_size",
                   num_experts_per_tok=("num_experts_per_tok", "experts_per_token")),
        defaults=_sizes(36, 2880, 64, 8, 201088, intermediate_size=2880, head_dim=64, num_local_experts=128,
                        num_experts_per_tok=4, sliding_window=128, attention_bias=True),
        derive=(d.activation, d.attention_bias, d.window(d.every("sliding_window_pattern", 2))),
        fixed={"mlp_bias": True, "router_bias": True, "attention_sinks": True, **_ROTARY},
    ),
    "gemma2": Architecture(
        keys=_DENSE,
        defaults=_sizes(26, 2304, 8, 4, 256000, **_GEMMA_DEFAULTS),
        derive=(d.activation, d.attention_bias, d.window(d.every("sliding_window_pattern", 2))),
        fixed=_GEMMA,
    ),
    "gemma3_text": Architecture(
        keys=_DENSE,
        defaults=_sizes(26, 2304, 8, 4, 262208, rope_theta=1e6, **_GEMMA_DEFAULTS),
        derive=(d.activation, d.attention_bias, d.window(d.every("sliding_window_pattern", 6))),
        fixed={"qk_norm": True, **_GEMMA},
    ),
    "phi3": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 3072, 32, None, 32064, intermediate_size=8192),
        derive=(d.activation, d.window(d.never)),
        fixed=_ROTARY,
    ),
    "nemotron": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(32, 6144, 48, None, 256000, intermediate_size=24576, hidden_act="relu2", mlp_bias=False,
                        partial_rotary_factor=0.5),
        derive=(d.activation, d.attention_bias),
        fixed={**_LAYERNORM, **_ROTARY},
    ),
    "gemma": Architecture(
        keys=_DENSE,
        defaults=_sizes(28, 3072, 16, 16, 256000, intermediate_size=24576, head_dim=256, tie_word_embeddings=True,
                        hidden_act="gelu_pytorch_tanh"),
        derive=(d.activation, d.attention_bias),
        fixed=_ROTARY,
    ),
    "glm4": Architecture(
        keys=_DENSE,
        defaults=_sizes(40, 4096, 32, 2, 151552, intermediate_size=13696, head_dim=128, attention_bias=True,
                        partial_rotary_factor=0.5),
        derive=(d.activation, d.no_output_bias),
        fixed={"post_norms": True, **_ROTARY},
    ),
    "glm4_moe": Architecture(
        keys=_DENSE | _MOE | _keys("num_nextn_predict_layers", "first_k_dense_replace", num_experts="n_routed_experts",
                                   qk_norm="use_qk_norm"),
        defaults=_sizes(46, 4096, 96, 8, 151552, intermediate_size=10944, moe_intermediate_size=1408,
                        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1,
                        num_nextn_predict_layers=1, use_qk_norm=False, partial_rotary_factor=0.5),
        derive=(d.activation, d.no_output_bias, d.whole_heads, _SHARED),
        fixed={"router_bias": True, **_ROTARY},
    ),
    "glm4_moe_lite": Architecture(
        keys=_DEEPSEEK,
        defaults=_sizes(47, 2048, 20, 20, 154880, intermediate_size=10240, moe_intermediate_size=1536,
                        n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1,
                        q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
        derive=(d.activation, d.attention_bias, _SHARED, d.latent_heads, d.moe_layers(d.sparse_mlp)),
        fixed={"router_bias": True, **_ROTARY},
    ),
    "seed_oss": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(64, 4096, 80, 8, 155136, intermediate_size=27648, head_dim=128, attention_bias=True),
        derive=(d.activation, d.no_output_bias),
        fixed=_ROTARY,
    ),
    "ernie4_5": Architecture(
        keys=_DENSE | _keys(bias="use_bias"),
        defaults=_sizes(18, 1024, 16, 2, 103424, intermediate_size=3072, head_dim=128) | _ERNIE_DEFAULTS,
        derive=(d.activation,),
        fixed={"norm_bias": False, **_ROTARY},
    ),
    "ernie4_5_moe": Architecture(
        keys=_DENSE | _keys("moe_intermediate_size", bias="use_bias", num_experts="moe_num_experts",
                            num_experts_per_tok="moe_k"),
        defaults=_sizes(28, 2560, 20, 4, 103424, intermediate_size=12288, moe_intermediate_size=1536, moe_k=6,
                        moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
                        moe_layer_interval=1) | _ERNIE_DEFAULTS,
        derive=(d.activation, d.shared_experts("moe_num_shared_experts"), d.moe_layers(d.ernie_moe)),
        fixed={"router_bias": True, "norm_bias": False, **_ROTARY},
    ),
    "smollm3": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(36, 2048, 16, 4, 128256, intermediate_size=11008, tie_word_embeddings=True, rope_theta=2e6,
                        use_sliding_window=False),
        derive=(d.activation, d.attention_bias, d.window(d.qwen_full)),
        fixed=_ROTARY,
    ),
    "granite": _LLAMA,
    "granitemoe": Architecture(
        keys=_keys(*_BLOCK) | _MOE | _keys(moe_intermediate_size="intermediate_size"),
        defaults=_sizes(32, 4096, 32, None, 32000, intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2),
        derive=(d.activation, d.attention_bias),
        fixed=_ROTARY,
    ),
    "exaone4": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 32, 102400, intermediate_size=16384, sliding_window=4096),
        derive=(d.activation, d.window(d.every("sliding_window_pattern", 4))),
        fixed={"qk_norm": True, **_ROTARY},
    ),
    "arcee": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(32, 2560, 32, None, 32000, intermediate_size=18432, hidden_act="relu2"),
        derive=(d.activation, d.attention_bias),
        fixed={"gated_mlp": False, **_ROTARY},
    ),
    "starcoder2": Architecture(
        keys=_DENSE | _keys(bias="use_bias"),
        defaults=_sizes(30, 3072, 24, 2, 49152, intermediate_size=12288, hidden_act="gelu_pytorch_tanh", use_bias=True,
                        tie_word_embeddings=True),
        derive=(d.activation, d.window(d.never)),
        fixed={**_LAYERNORM, **_ROTARY},
    ),
    "stablelm": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 2560, 32, 32, 50304, intermediate_size=6912, partial_rotary_factor=0.25),
        derive=(d.activation, d.stablelm_norms),
        fixed={**_LAYERNORM, "gated_mlp": True, **_ROTARY},
    ),
    "opt": Architecture(
        keys=_keys("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings",
                   intermediate_size="ffn_dim", bias="enable_bias"),
        defaults={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50272,
                  "ffn_dim": 3072, "max_position_embeddings": 2048, "activation_function": "relu", "enable_bias": True,
                  "tie_word_embeddings": True},
        derive=(d.opt_sizes,),
        fixed={"position_embedding": "learned", **_LAYERNORM},
    ),
}  # fmt: skip
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Models that call a known architecture by their own name."""
WRAPPERS = {
    "gemma3": "gemma3_text", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "kimi_k25": "deepseek_v3",
    "mistral3": "mistral", "llama4": "llama4_text", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2",
}  # fmt: skip
"""Multimodal configs whose language model stands under text_config, or (Qwen2-VL's checkpoints) at the top."""
