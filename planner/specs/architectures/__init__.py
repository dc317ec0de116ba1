"""Hugging Face architectures: a row per `model_type` that says how its `config.json` spells a ModelSpec.

A row of `rows.yaml` holds the config key of each field, the values that transformers 5.23 assumes for absent keys, the
fields that are the same for every model of the architecture, and the names of the functions that work out the others
(`derivations`, `layer_lists`, `sections`). `planner.specs.huggingface` reads what all configs say alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.specs.architectures import derivations, layer_lists, sections
from planner.specs.architectures.derivations import Config, Derived
from planner.specs.reading import load_yaml

Keys = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The spelling of a ModelSpec under one `model_type`."""

    keys: Keys
    """The config keys that may hold each of our fields, first choice first."""
    defaults: dict[str, Any]
    """The values that transformers assumes, by config key."""
    derive: tuple[Callable[[Config], Derived], ...]
    fixed: dict[str, Any]
    sections: tuple[str, ...]
    """Keys under which a mapping holds further keys of the config."""


def _alike(*names: str) -> Keys:
    return {name: (name,) for name in names}


_BLOCK = _alike(
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "tie_word_embeddings", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
_DENSE = _BLOCK | _alike("intermediate_size")
_MOE = _alike("num_experts_per_tok", "moe_intermediate_size") | {"num_experts": ("num_experts", "num_local_experts")}
_MLA = _alike("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK = {name: keys for name, keys in _DENSE.items() if name != "head_dim"} | _MLA | _MOE
_DEEPSEEK |= _alike("num_nextn_predict_layers")
_DEEPSEEK["num_experts"] = ("n_routed_experts", "num_local_experts", "num_experts")
_GPT = _alike("vocab_size", "tie_word_embeddings")
_GPT |= {"num_hidden_layers": ("n_layer", "num_hidden_layers"), "hidden_size": ("n_embd", "hidden_size", "n_embed"),
         "num_attention_heads": ("n_head", "num_attention_heads")}  # fmt: skip
GROUPS = {
    "BLOCK": _BLOCK, "DENSE": _DENSE, "MOE": _MOE, "MLA": _MLA, "DEEPSEEK": _DEEPSEEK, "GPT": _GPT,
    "MULTIPLIERS": _alike("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"),
}  # fmt: skip
"""Keys that most rows share, by the name that a row calls them."""
_FUNCTIONS: dict[str, Any] = {
    name: value for module in (derivations, layer_lists, sections) for name, value in vars(module).items()
}


def _architectures(rows: Mapping[str, dict[str, Any]]) -> dict[str, Architecture]:
    """The rows of the table; one goes on from another that stands before it."""
    built: dict[str, Architecture] = {}
    for name, row in rows.items():
        like = built.get(row.get("like", ""), Architecture({}, {}, (), {}, ()))
        built[name] = Architecture(
            keys=_keys(like.keys, row.get("keys", ())),
            defaults=like.defaults | row.get("defaults", {}),
            derive=(*like.derive, *map(_function, row.get("derive", ()))),
            fixed=like.fixed | row.get("fixed", {}),
            sections=tuple(row.get("inside", like.sections)),
        )
    return {name: row for name, row in built.items() if not name.startswith("_")}


def _keys(own: Keys, items: list[Any]) -> Keys:
    """The keys of a row: groups, fields that are spelled alike, `-field` to leave one out, other spellings."""
    keys = dict(own)
    for item in items:
        if isinstance(item, dict):
            keys |= {name: (spelt,) if isinstance(spelt, str) else tuple(spelt) for name, spelt in item.items()}
        elif item.startswith("-"):
            keys.pop(item[1:])
        else:
            keys |= GROUPS.get(item) or _alike(item)
    return keys


def _function(entry: Any) -> Any:
    """A function by its name, or the one that `{name: arguments}` makes; without arguments the function itself."""
    if not isinstance(entry, dict):
        return _FUNCTIONS[entry]
    ((name, arguments),) = entry.items()
    if arguments is None:
        return _FUNCTIONS[name]
    return _FUNCTIONS[name](*(_function(each) if isinstance(each, dict) else each for each in arguments))


_HERE = Path(__file__).parent
ARCHITECTURES = _architectures(load_yaml(_HERE / "rows.yaml"))
_NAMES = load_yaml(_HERE / "names.yaml")
SAME_AS: dict[str, str] = _NAMES["same_as"]
"""Models that call a known architecture by a name of their own, in lower case with underscores."""
INNER: tuple[str, ...] = tuple(_NAMES["inner"])
"""Keys under which a multimodal config holds that of its language model, whose `model_type` decides."""
WRAPPERS: dict[str, str] = _NAMES["wrappers"]
"""Language models of multimodal configs whose inner config names none."""
REFUSED: dict[str, str] = _NAMES["refused"]
"""Decoder-only architectures that the planner has no operators for, and what it lacks; names in lower case."""
