"""Hugging Face architectures: a row per `model_type` that says how its `config.json` spells a ModelSpec.

A row holds the config key of each field, the values that transformers 5.23 assumes for absent keys, the fields that are
the same for every model of the architecture, and the functions that work out the others (`derivations`, `layer_lists`,
`sections`). `planner.specs.huggingface` reads what all configs say alike.
"""

from __future__ import annotations

from planner.specs.architectures.dense import DENSE_ARCHITECTURES
from planner.specs.architectures.hybrids import HYBRID_ARCHITECTURES
from planner.specs.architectures.mixtures import MIXTURE_ARCHITECTURES
from planner.specs.architectures.rows import Architecture as Architecture

ARCHITECTURES: dict[str, Architecture] = DENSE_ARCHITECTURES | MIXTURE_ARCHITECTURES | HYBRID_ARCHITECTURES

SAME_AS = {
    "kimi_k2": "deepseek_v3", "bailing_moe_v2": "bailing_moe", "hunyuan": "hunyuan_v1_moe", "grok_1": "grok-1",
    "hunyuan_moe": "hunyuan_v1_moe", "hunyuan_dense": "hunyuan_v1_dense", "minimax_text_01": "minimax",
    "minimax_m1": "minimax", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text", "yi": "llama", "aquila": "llama", "skywork": "llama", "xverse": "llama",
    "telechat3": "llama", "iquestcoder": "llama", "apertus1p5_text": "apertus",
    "rwforcausallm": "falcon", "refinedweb": "falcon",
    "refinedwebmodel": "falcon", "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2", "qwen3_omni_moe_text": "qwen3_moe", "qwen2_5_omni_text": "qwen2", "mimo": "qwen2",
    "mimo_v2": "mimo_v2_flash", "step3p7": "step3p5", "longcat": "longcat_flash", "stablelm_epoch": "stablelm",
    "phi3_v": "phi3", "phi4mm": "phi3", "phi4_multimodal": "phi3",
}  # fmt: skip
"""Models that call a known architecture by a name of their own, in lower case with underscores."""

INNER = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
"""Keys under which a multimodal config holds that of its language model, whose `model_type` decides."""

WRAPPERS = {
    "mistral3": "mistral", "llama4": "llama4_text", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "kimi_k25": "deepseek_v3", "kimi_k3": "kimi_linear",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2", "aria": "aria_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "llava": "llama", "llava_next": "llama", "step3_vl": "step3_text", "step3p7": "step3p5",
    "glm4v": "glm4", "glm4v_moe": "glm4_moe", "minimax_m3_vl": "minimax_m3_vl_text",
}  # fmt: skip
"""Language models of multimodal configs whose inner config names none."""

REFUSED = {
    "bailing_hybrid": "latent attention with gates of heads beside Kimi delta attention",
    "bailing_moe_linear": "linear attention of Ring-linear",
    "bitnet": "weights of three values, with norms inside attention and MLP",
    "blt": "bytes that are gathered into patches before the layers",
    "diffllama": "attention as the difference of two softmaxes",
    "ernie4_5_vl_moe": "experts of their own for text and for images",
    "gemma3n": "layers with embeddings of their own, and alternating streams",
    "gemma3n_text": "layers with embeddings of their own, and alternating streams",
    "jetmoe": "a mixture of attention heads",
    "mllama": "layers that attend to images",
    "nemotron-nas": "sizes of its own for every layer",
    "deci": "sizes of its own for every layer",
    "openelm": "sizes of its own for every layer",
    "persimmon": "LayerNorms with biases over queries and keys",
    "recurrent_gemma": "gated linear recurrences of Griffin",
    "rwkv": "time mixing of RWKV",
    "xlstm": "cells of xLSTM",
    "zamba": "one block of attention that several layers share",
    "zamba2": "one block of attention that several layers share",
}
"""Decoder-only architectures that the planner has no operators for, and what it lacks; names in lower case."""
