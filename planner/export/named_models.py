"""Models that configurations say by name: in the header of our own exports, or as trainers and the hub name them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from planner.specs.registry import load_model, model_names

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


Model = str | dict[str, Any]
"""A model of a run: a shipped one's name, or the fields of a ModelSpec."""

_HEADER = re.compile(r"^# (\S+) on ([\d,]+) of [\d,]+ GPUs", re.MULTILINE)
_LEFT_OUT = re.compile(
    r"config|provider|model(?!opt)|instruct|base|chat|thinking|\bhf\b|meta(?=-?llama)|bf16|fp8|-\d{4}$|v0\.\d|-it\b|preview|pretrain"
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
    "deepseekv316b": "deepseek-v2-lite", "qwen25vl": "", "llama33370b": "llama-3.1-70b", "llama3370b": "llama-3.1-70b",
}  # fmt: skip
"""Names that others give to models, without signs: Llama 3 has the sizes of 3.1."""


def exported_model(text: str) -> str | None:
    """The name of the model in the header that our exports begin with; None where it is no shipped model."""
    match = _HEADER.search(text) if "exported by planner" in text else None
    return match[1] if match is not None and match[1] in model_names() else None


def exported_gpus(text: str) -> int | None:
    """The GPUs of the layout in the header that our exports begin with; None in a text of another's."""
    match = _HEADER.search(text) if "exported by planner" in text else None
    return int(match[2].replace(",", "")) if match is not None else None


def model_called(name: str) -> Model | None:
    """The model that a repository of the hub, a class or a flavor names; None where there is none."""
    if name in model_names():
        return name
    short = _plain(name.rstrip("/").rpartition("/")[2])
    known = _OTHERS.get(short) or _plain_names().get(short)
    return known or next((dict(fields) for other, fields in MORE_MODELS.items() if _plain(other) == short), None)


def num_layers_of(model: Model | None) -> int | None:
    """Decoder layers of a model; None where there is none."""
    if isinstance(model, str):
        return load_model(model).num_hidden_layers
    return None if model is None else int(model["num_hidden_layers"])


def moe_of(model: Model | None) -> dict[str, Any] | None:
    """Fields of a model's mixture of experts; None where it has none."""
    if isinstance(model, str):
        mixture = load_model(model).moe
        return None if mixture is None else mixture.model_dump()
    return None if model is None else model.get("moe")


@cache
def _plain_names() -> dict[str, str]:
    return {
        _plain(alias): name for name, aliases in model_names().items() for alias in (name, *aliases) if _plain(alias)
    }


def _plain(name: str) -> str:
    """A name in lower case without signs and without the parts that say nothing of sizes."""
    return re.sub(r"[^a-z0-9]", "", _LEFT_OUT.sub("", name.lower()))


_BY_TYPE = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    # Megatron-LM's default for its own format: 2^17 tokens
    "TikTokenizer": 131072,
}
"""Tokenizers of Megatron-LM that stand for one vocabulary."""
_BY_NAME: tuple[tuple[str, int], ...] = (
    (r"multiMixV8.*128k", 131072),
    (r"nemotron_2_256k|nemotron[-_]?[34]|minitron", 256000),
    (r"nemotron[-_]?h|nemotron[-_]?nano|nemotron6", 131072),
    (r"bigscience/(tokenizer|bloom)|byte-level-bpe-tokenizer-no-norm-250k", 250680),
    (r"bigscience/oscar_13_languages", 250000),
    (r"test_150k_vocab", 150000),
    (r"google/mt5|mt0", 250100),
    (r"\bt5-(small|base|large|3b|11b)|google/(t5|flan)", 32100),
    (r"gpt[-_]?neox|pythia|20B_tokenizer|olmo", 50254),
    (r"gpt-oss|o200k", 201088),
    (r"\bgpt2|gpt-2|opt-", 50257),
    (r"starcoder2|starcoder", 49152),
    (r"(meta-)?llama[-_]?(3|guard-3)|Hermes-3", 128256),
    (r"llama[-_]?4", 202048),
    (r"(code)?llama[-_]?2?|vicuna|tinyllama|yi-6b-llama", 32000),
    (r"mixtral[-_]8x22b", 32768),
    (r"mixtral|mistral-7b.*v0\.[12]|mistral[-_]7b", 32000),
    (r"mistral[-_]?nemo|tekken|mistral-small|magistral|devstral", 131072),
    (r"qwen1?\.?5?-?moe|qwen3|qwen2\.5-(0\.5|1\.5|3)b|qwen2-(0\.5|1\.5)b|qwen1\.5-(0\.5|1\.8|4)b", 151936),
    (r"qwen", 152064),
    (r"deepseek[-_]v?2[-_]lite|deepseek[-_]v2|deepseek[-_]coder-v2|deepseek[-_]16b|deepseek-moe", 102400),
    (r"deepseek", 129280),
    (r"moonlight|kimi", 163840),
    (r"gemma[-_]?3", 262208),
    (r"gemma", 256000),
    (r"\blfm2", 65536),
    (r"minimax[-_]?(m2|text)", 200064),
    (r"phi-?3", 32064),
    (r"phi-?4", 100352),
    (r"\byi-", 64000),
    (r"internlm2?", 92544),
    (r"baichuan2", 125696),
    (r"chatglm|glm-4", 151552),
    (r"falcon-(7b|40b)", 65024),
    (r"command-r|aya", 256000),
)
"""Beginnings of the names of tokenizers on the Hugging Face hub and elsewhere, and the vocab_size of their models."""


def vocabulary_of(kind: str, name: str) -> int | None:
    """Tokens of the vocabulary of a tokenizer of a kind, loaded from a name or a path; None where it is not known.

    The published model of that name decides, then the table of names, then the kind.
    """
    short = name.rstrip("/").rpartition("/")[2].lower()
    for model, aliases in model_names().items():
        if short and (short == model or short in aliases or name.lower() in aliases):
            return load_model(model).vocab_size
    for pattern, vocab_size in _BY_NAME:
        if name and re.search(pattern, name, re.IGNORECASE):
            return vocab_size
    return _BY_TYPE.get(kind)
