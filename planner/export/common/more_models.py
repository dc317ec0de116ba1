"""Sizes of published models that trainers have recipes for and that no spec ships for: from their config.json."""

from __future__ import annotations

from typing import Any

_QWEN2: dict[str, Any] = {"attention_bias": "qkv", "rope_theta": 1_000_000}
_QWEN3: dict[str, Any] = {"qk_norm": True, "rope_theta": 1_000_000}
_GPT: dict[str, Any] = {
    "gated_mlp": False, "activation": "gelu", "norm": "layernorm", "bias": True, "position_embedding": "rope",
    "rope_theta": 100_000,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "gated_mlp": False, "activation": "relu2", "norm": "layernorm", "norm_bias": True, "position_embedding": "rope",
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_ROWS: tuple[tuple[str, tuple[int, ...], bool, dict[str, Any]], ...] = (
    # layers, hidden, MLP, heads, key-value heads, head, vocabulary; tied; others
    ("llama-3.2-3b", (28, 3072, 8192, 24, 8, 128, 128256), True, {"rope_theta": 500_000}),
    ("qwen2-0.5b", (24, 896, 4864, 14, 2, 64, 151936), True, _QWEN2),
    ("qwen2.5-0.5b", (24, 896, 4864, 14, 2, 64, 151936), True, _QWEN2),
    ("qwen2-1.5b", (28, 1536, 8960, 12, 2, 128, 151936), True, _QWEN2),
    ("qwen2.5-1.5b", (28, 1536, 8960, 12, 2, 128, 151936), True, _QWEN2),
    ("qwen2.5-3b", (36, 2048, 11008, 16, 2, 128, 151936), True, _QWEN2),
    ("qwen2-7b", (28, 3584, 18944, 28, 4, 128, 152064), False, _QWEN2),
    ("qwen2.5-7b", (28, 3584, 18944, 28, 4, 128, 152064), False, _QWEN2),
    ("qwen2.5-14b", (48, 5120, 13824, 40, 8, 128, 152064), False, _QWEN2),
    ("qwen2-72b", (80, 8192, 29568, 64, 8, 128, 152064), False, _QWEN2),
    ("qwen3-0.6b", (28, 1024, 3072, 16, 8, 128, 151936), True, _QWEN3),
    ("qwen3-1.7b", (28, 2048, 6144, 16, 8, 128, 151936), True, _QWEN3),
    ("qwen3-4b", (36, 2560, 9728, 32, 8, 128, 151936), True, _QWEN3),
    ("qwen3-14b", (40, 5120, 17408, 40, 8, 128, 151936), False, _QWEN3),
    ("mistral-7b", (32, 4096, 14336, 32, 8, 128, 32000), False, {"rope_theta": 10_000}),
    ("mistral-nemo-12b", (40, 5120, 14336, 32, 8, 128, 131072), False, {"rope_theta": 1_000_000}),
    ("starcoder2-3b", (30, 3072, 12288, 24, 2, 128, 49152), True, _GPT),
    ("starcoder2-7b", (32, 4608, 18432, 36, 4, 128, 49152), True, _GPT),
    ("starcoder2-15b", (40, 6144, 24576, 48, 4, 128, 49152), True, _GPT),
    ("phi-3-mini", (32, 3072, 8192, 32, 32, 96, 32064), False, {"rope_theta": 10_000}),
    ("nemotron-3-4b", (32, 3072, 9216, 24, 8, 128, 256000), False, _NEMOTRON),
    ("nemotron-3-8b", (32, 4096, 16384, 32, 32, 128, 256000), False, _NEMOTRON),
    ("nemotron-3-22b", (40, 6144, 24576, 48, 48, 128, 256000), False, _NEMOTRON),
    ("nemotron-4-15b", (32, 6144, 24576, 48, 8, 128, 256000), False, _NEMOTRON),
)
_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
MORE_MODELS: dict[str, dict[str, Any]] = {
    name: {"name": name, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": tied, **others}
    for name, sizes, tied, others in _ROWS
}
"""Name to the fields of a ModelSpec."""
