"""Models that configurations say by name: in the header of our own exports, or as trainers and the hub name them."""

from __future__ import annotations

import re
from typing import Any

from planner.export.keyed_settings import table
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


def vocabulary_of(kind: str, name: str) -> int | None:
    """Tokens of the vocabulary of a tokenizer of a kind, loaded from a name or a path; None where it is not known.

    The published model of that name decides, then the table of names, then the kind.
    """
    short = name.rstrip("/").rpartition("/")[2].lower()
    for model, aliases in model_names().items():
        if short and (short == model or short in aliases or name.lower() in aliases):
            return load_model(model).vocab_size
    for pattern, tokens in table()["tokenizers"].items():
        if name and re.search(pattern, name, re.IGNORECASE):
            return int(tokens)
    known: dict[str, int] = table()["tokenizers_of_a_kind"]
    return known.get(kind)
