"""Models that configurations say by name: in the header of our own exports, or as trainers and the hub name them."""

from __future__ import annotations

import re
from typing import Any

from planner.export.followed.python_values import CallRecord
from planner.export.keyed_settings import readings, table
from planner.specs import shipped
from planner.specs.base import Fields
from planner.specs.registry import load_model, model_names

Model = str | Fields
"""A model of a run: a shipped one's name, or the fields of a ModelSpec."""

_HEADER = re.compile(r"^# (\S+) on ([\d,]+) of [\d,]+ GPUs", re.MULTILINE)


def _header_of(text: str) -> re.Match[str] | None:
    return _HEADER.search(text) if "exported by planner" in text else None


def exported_model(text: str) -> str | None:
    """The name of the model in the header that our exports begin with; None where it is no shipped model."""
    match = _header_of(text)
    return match[1] if match is not None and match[1] in model_names() else None


def exported_gpus(text: str) -> int | None:
    """The GPUs of the layout in the header that our exports begin with; None in a text of another's."""
    match = _header_of(text)
    return int(match[2].replace(",", "")) if match is not None else None


_TOWERS = re.compile(r"-(vl|omni|vision)\b", re.IGNORECASE)


def has_towers(name: str) -> bool:
    """The name is of a model that also sees or hears."""
    return _TOWERS.search(name) is not None


def model_called(name: str) -> str | None:
    """The shipped model that a repository of the hub, a class or a flavor names, or its language model; else None."""
    return shipped.model_called(name) or (shipped.model_called(_TOWERS.sub("", name)) if has_towers(name) else None)


FLAVORS = {
    (module, flavor): name
    for module, flavors in table()["torchtitan"]["flavors"].items()
    for flavor, name in flavors.items()
}
"""(module, flavor) of torchtitan to the model's name here."""

_PREFIXES = table()["torchtitan"]["prefixes"]


def model_of_flavor(name: str, flavor: str) -> Model | None:
    """The published model of a registry's flavor; None where it is of another size than any."""
    return FLAVORS.get((name, flavor)) or model_called(f"{_PREFIXES.get(name, f'{name}-')}{flavor}")


def flavor_of(module: str, function: str) -> tuple[str, str] | None:
    """The (module, flavor) that a registered function configures: `llama3_405b` of llama3 is its 405B."""
    size = function.removeprefix(f"{module}_").removeprefix(f"{module.replace('_', '')}_").lower()
    flavor = re.sub(r"(\d)_(?=\d)", r"\1.", size).replace("_", "-")
    found = next((names for names in FLAVORS if (names[0], names[1].lower()) == (module, flavor)), (module, flavor))
    return found if model_of_flavor(*found) else None


_REGISTRY = table()["torchtitan"]["registry"]


def registered_model(spec: Any) -> Fields | None:
    """Fields of the model that a registry of torchtitan builds; None where a layer has parts that are not known."""
    model = spec.fields.get("model") if isinstance(spec, CallRecord) else None
    while isinstance(model, CallRecord) and "layers" not in model.fields:  # what a converter makes of a model
        model = next(iter(model.arguments), None)
    if not isinstance(model, CallRecord):
        return None
    layers = model.fields["layers"]
    blocks = [layer for layer in layers if isinstance(layer, CallRecord)] if isinstance(layers, list) else []
    attention = blocks[-1].get("attention") if blocks and blocks == layers else None
    known, parts = ({*_REGISTRY[name].split()} for name in ("block", "parts"))
    if not isinstance(attention, CallRecord) or any(block.fields.keys() - known for block in blocks):
        return None
    found = {**_placed(model, "sizes"), **_placed(attention, "attention")}
    if attention.fields.keys() - parts - _REGISTRY["latent"].keys() or not found.keys() >= {
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
    }:
        return None
    latent = _placed(attention, "latent") if attention.get("kv_lora_rank") else {}
    names = {"spec": spec, "model": model, "attention": attention, "blocks": blocks, "latent": latent, "placed": found}
    found |= readings("torchtitan-registry", {}, **names)["model"]
    return found | _mixture([block.get("moe") for block in blocks])


def _mixture(mixtures: list[Any]) -> Fields:
    """Fields of a model by the mixtures of its layers."""
    first = next((mixture for mixture in mixtures if isinstance(mixture, CallRecord)), None)
    if first is None:
        return {}
    leading = mixtures.index(first)
    found: Fields = {"moe": {**_placed(first, "mixture"), "first_k_dense_replace": leading}}
    if None in mixtures[leading:]:
        found["mlp_layer_types"] = ["dense" if mixture is None else "moe" for mixture in mixtures]
    limit = first.get("routed_experts.inner_experts.swiglu_limit")
    return found if limit is None else {**found, **_REGISTRY["clamped"], "swiglu_limit": limit}


def _placed(record: Any, part: str) -> Fields:
    """The fields of a part of the registry that a record has at their places."""
    values = {name: record.get(place) for name, place in _REGISTRY[part].items()}
    return {name: value for name, value in values.items() if isinstance(value, (str, int, float))}


def model_fields(model: Model | None) -> Fields:
    """The fields of a run's model; empty where there is none."""
    return load_model(model).model_dump() if isinstance(model, str) else model or {}


def num_layers_of(model: Model | None) -> int | None:
    """Decoder layers of a model; None where there is none."""
    layers = model_fields(model).get("num_hidden_layers")
    return None if layers is None else int(layers)


def has_plain_attention(model: Model | None) -> bool:
    """Attention that torch's own kernel does not compute: capped scores, or learned sinks."""
    fields = model_fields(model)
    return bool(fields.get("attention_sinks") or fields.get("attn_logit_softcapping"))


def moe_of(model: Model | None) -> Fields | None:
    """Fields of a model's mixture of experts; None where it has none."""
    mixture: Fields | None = model_fields(model).get("moe")
    return mixture


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
