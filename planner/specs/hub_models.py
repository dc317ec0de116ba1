"""Models by the names of repositories of the Hugging Face hub, of classes and of flavors: their sizes, no file."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from planner.specs.shipped import model_names

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
    ("qwen2.5-math-72b", (80, 8192, 29568, 64, 8, 128, 152064), False, _QWEN2),
    ("mistral-small-24b", (40, 5120, 32768, 32, 8, 128, 131072), False, {"rope_theta": 100_000_000}),
    ("mistral-large-123b", (88, 12288, 28672, 96, 8, 128, 32768), False, {"rope_theta": 1_000_000}),
    ("phi-4", (40, 5120, 17920, 40, 10, 128, 100352), False, {"rope_theta": 250_000}),
    ("tinyllama-1.1b", (22, 2048, 5632, 32, 4, 64, 32000), False, {"rope_theta": 10_000}),
    ("smollm2-135m", (30, 576, 1536, 9, 3, 64, 49152), True, {"rope_theta": 100_000}),
    ("smollm2-1.7b", (24, 2048, 8192, 32, 32, 64, 49152), True, {"rope_theta": 130_000}),
    ("smollm3-3b", (36, 2048, 11008, 16, 4, 128, 128256), True, {"rope_theta": 5_000_000}),
    ("yi-1.5-6b", (32, 4096, 11008, 32, 4, 128, 64000), False, {"rope_theta": 5_000_000}),
    ("yi-1.5-34b", (60, 7168, 20480, 56, 8, 128, 64000), False, {"rope_theta": 5_000_000}),
    ("codellama-34b", (48, 8192, 22016, 64, 8, 128, 32000), False, {"rope_theta": 1_000_000}),
    ("deepseek-llm-7b", (30, 4096, 11008, 32, 32, 128, 102400), False, {"rope_theta": 10_000}),
    ("mimo-7b", (36, 4096, 11008, 32, 8, 128, 151680), False, _QWEN2),
    (
        "qwen3-coder-480b-a35b",
        (62, 6144, 8192, 96, 8, 128, 151936),
        False,
        {**_QWEN3, "moe": {"num_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}},
    ),
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


Model = str | dict[str, Any]
"""A model of a run: a shipped one's name, or the fields of a ModelSpec."""

_LEFT_OUT = re.compile(
    r"config|provider|model(?!opt)|instruct|base|chat|thinking|\bhf\b|meta(?=-?llama)|bf16|fp8|-\d{4}$|v0\.\d|-it\b|preview"
    r"|pretrain|coder(?!-480)|math(?!-72)|hermes-?\d*|openr1|unsloth|bnb|[48]bit|int[48]|awq|gptq|gguf|\bsft\b|\bdpo\b|\brl\b"
    r"|mcore|torch_dist|tulu-?\d*|distill|vl(?=-)|omni(?=-)|vision(?=-)|-1m\b|_iter_\d+|-hf$|dynamic|captioner|nvfp4"
)
"""Parts of names that do not change a model's sizes."""
_OTHERS = {
    "gpt175b": "gpt3-175b", "gpt3175b": "gpt3-175b", "llama38b": "llama-3.1-8b", "llama370b": "llama-3.1-70b",
    "deepseekr1": "deepseek-v3", "deepseekv31": "deepseek-v3", "mistralai8x7b": "mixtral-8x7b", "bloom": "bloom-176b",
    "gptneox": "gpt-neox-20b", "llama417b16e": "llama-4-scout", "llama417b128e": "llama-4-maverick",
    "llama417bx16e": "llama-4-scout", "llama417bx128e": "llama-4-maverick", "llama4scout17b16e": "llama-4-scout",
    "llama4maverick17b128e": "llama-4-maverick", "llama4e16": "llama-4-scout", "llama4e128": "llama-4-maverick",
    "llama4experts16": "llama-4-scout", "llama4experts128": "llama-4-maverick", "kimik2": "kimi-k2",
    "moonlight16ba3b": "moonlight-16b", "deepseekv2236b": "deepseek-v2", "deepseekv3671b": "deepseek-v3",
    "deepseekv316b": "deepseek-v2-lite", "llama33370b": "llama-3.1-70b", "llama3370b": "llama-3.1-70b",
    "deepseekr1qwen15b": "qwen2.5-1.5b", "deepseekr1qwen7b": "qwen2.5-7b", "deepseekr1qwen14b": "qwen2.5-14b",
    "deepseekr1qwen32b": "qwen2.5-32b", "deepseekr1llama8b": "llama-3.1-8b", "deepseekr1llama70b": "llama-3.1-70b",
    "deepseekr10528qwen38b": "qwen3-8b", "deepseekr1zero": "deepseek-v3", "qwq32b": "qwen2.5-32b", "phi4": "phi-4",
    "llama31nemotron70b": "llama-3.1-70b", "qwen2572bmath": "qwen2.5-72b", "mistralsmall24b2501": "mistral-small-24b",
    "tinyllama11bv10": "tinyllama-1.1b", "tinyllama11b": "tinyllama-1.1b", "mimo7brl": "mimo-7b",
    "qwen3coder480ba35b": "qwen3-coder-480b-a35b", "deepseekv32exp": "deepseek-v3.2", "moonlight": "moonlight-16b",
}  # fmt: skip
"""Names that others give to models, without signs: Llama 3 has the sizes of 3.1."""


def model_called(name: str) -> Model | None:
    """The model that a repository of the hub, a class or a flavor names; None where there is none."""
    if name in model_names():
        return name
    short = _plain(name.rstrip("/").rpartition("/")[2])
    known = _OTHERS.get(short) or _plain_names().get(short)
    if known in model_names():
        return known
    found = next((fields for other, fields in MORE_MODELS.items() if other == known or _plain(other) == short), None)
    return None if found is None else dict(found)


def has_towers(name: str) -> bool:
    """The name is of a model that also sees or hears, of which the language model alone is planned."""
    return re.search(r"-(vl|omni|vision)\b", name.lower()) is not None


@cache
def _plain_names() -> dict[str, str]:
    return {
        _plain(alias): name for name, aliases in model_names().items() for alias in (name, *aliases) if _plain(alias)
    }


def _plain(name: str) -> str:
    """A name in lower case without signs and without the parts that say nothing of sizes."""
    return re.sub(r"[^a-z0-9]", "", _LEFT_OUT.sub("", name.lower()))
