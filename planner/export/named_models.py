"""Models that configurations say by name: in the header of our own exports, or as trainers and the hub name them."""

from __future__ import annotations

import re
from typing import Any

from planner.specs import shipped
from planner.specs.registry import load_model, model_names

Model = str | dict[str, Any]
"""A model of a run: a shipped one's name, or the fields of a ModelSpec."""

_HEADER = re.compile(r"^# (\S+) on ([\d,]+) of [\d,]+ GPUs", re.MULTILINE)


def exported_model(text: str) -> str | None:
    """The name of the model in the header that our exports begin with; None where it is no shipped model."""
    match = _HEADER.search(text) if "exported by planner" in text else None
    return match[1] if match is not None and match[1] in model_names() else None


def exported_gpus(text: str) -> int | None:
    """The GPUs of the layout in the header that our exports begin with; None in a text of another's."""
    match = _HEADER.search(text) if "exported by planner" in text else None
    return int(match[2].replace(",", "")) if match is not None else None


_TOWERS = re.compile(r"-(vl|omni|vision)\b", re.IGNORECASE)


def has_towers(name: str) -> bool:
    """The name is of a model that also sees or hears, of which the language model alone is planned."""
    return _TOWERS.search(name) is not None


def model_called(name: str) -> str | None:
    """The shipped model that a repository of the hub, a class or a flavor names, or its language model; else None."""
    return shipped.model_called(name) or (shipped.model_called(_TOWERS.sub("", name)) if has_towers(name) else None)


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
