"""The names that a model has at Hugging Face: its repository, and the class of its layers in transformers."""

from __future__ import annotations

import re

from planner.specs.model import ModelSpec

_REPOSITORY = re.compile(r"config(?:\.json)? of ([\w.-]+/[\w.-]*\w)")
_LAYER_CLASSES = (
    (r"Llama-[23]", "LlamaDecoderLayer"),
    (r"Llama-4", "Llama4TextDecoderLayer"),
    (r"Qwen2\.5", "Qwen2DecoderLayer"),
    (r"Qwen3-Next", "Qwen3NextDecoderLayer"),
    (r"Qwen3-\d+B-A", "Qwen3MoeDecoderLayer"),
    (r"Qwen3", "Qwen3DecoderLayer"),
    (r"Mixtral", "MixtralDecoderLayer"),
    (r"gpt-oss", "GptOssDecoderLayer"),
    (r"gemma-3", "Gemma3DecoderLayer"),
    (r"DeepSeek-V2", "DeepseekV2DecoderLayer"),
    (r"DeepSeek-V3$", "DeepseekV3DecoderLayer"),
    (r"GLM-4\.5", "Glm4MoeDecoderLayer"),
    (r"Olmo-3", "Olmo3DecoderLayer"),
    (r"Seed-OSS", "SeedOssDecoderLayer"),
    (r"Falcon-H1", "FalconH1DecoderLayer"),
    (r"granite-4\.0-h", "GraniteMoeHybridDecoderLayer"),
    (r"gpt-neox", "GPTNeoXLayer"),
    (r"bloom", "BloomBlock"),
)
"""Parts of a repository's name, and the layers that its models have in transformers (`_no_split_modules`)."""


def repository_of(model: ModelSpec) -> str | None:
    """The repository whose configuration the model was read from; None where its source names none."""
    found = _REPOSITORY.search(" ".join(model.source.split()))
    return None if found is None else found[1]


def layer_class_of(model: ModelSpec) -> str | None:
    """The class of the model's decoder layers; None where only transformers knows it, which then says it itself."""
    repository = repository_of(model) or ""
    return next((name for part, name in _LAYER_CLASSES if re.search(part, repository)), None)
