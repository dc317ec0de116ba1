"""The model of a configuration that says it by name: in the header of our own exports, or as others name it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from planner.export.common.more_models import MORE_MODELS
from planner.specs.registry import load_model, model_names

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
