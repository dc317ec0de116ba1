"""Adapters and packed weights in the words of peft's LoraConfig and of transformers' BitsAndBytesConfig, both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from planner.errors import SpecError
from planner.specs.finetuning import ATTENTION, GROUPS, LATENT, TARGETS, AdapterSpec
from planner.specs.model import ModelSpec

ADAPTER_FILE, QUANTIZATION_FILE = "adapter_config.json", "quantization_config.json"
EVERY_LINEAR = "all-linear"
ALPHA_OVER_RANK = 2
"""lora_alpha over r that TRL's own defaults have (32 and 16); it scales what adapters add, and costs nothing."""
_RANK, _DROPOUT, _TARGETS = ("r", "lora_r", "lora_rank"), ("lora_dropout",), ("target_modules", "lora_target_modules")
_EXPERTS = "experts."


def lora_config(adapters: AdapterSpec, model: ModelSpec) -> dict[str, Any]:
    """Fields of peft's LoraConfig."""
    modules = [name for name in _modules(adapters, model) if not name.startswith(_EXPERTS)]
    tensors = [name for name in _modules(adapters, model) if name.startswith(_EXPERTS)]
    every = adapters.targets == (EVERY_LINEAR,)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapters.rank,
        "lora_alpha": ALPHA_OVER_RANK * adapters.rank,
        "lora_dropout": adapters.dropout,
        "bias": "none",
        "target_modules": EVERY_LINEAR if every else modules,
        # the experts of a layer are one tensor, and no module
        **({"target_parameters": tensors} if tensors else {}),
    }


def _modules(adapters: AdapterSpec, model: ModelSpec) -> list[str]:
    """The names of the targets, in peft's order, without those of the other kind of attention."""
    absent = ATTENTION[:3] if model.mla is not None else LATENT
    named = [name for name in TARGETS if name in adapters.modules]
    return [name for name in named if name not in absent or name in adapters.targets]


def quantization_config(adapters: AdapterSpec, is_sharded: bool) -> dict[str, Any] | None:
    """Fields of BitsAndBytesConfig for the frozen weights; None where they stay in 16 bits.

    Sharded weights of 4 bits are stored as bf16, whose tensors can be split as all others are.
    """
    if adapters.base_bits == 8:
        return {"load_in_8bit": True}
    if adapters.base_bits == 4:
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "bfloat16" if is_sharded else "uint8",
        }
    return None


def read_adapters(settings: Mapping[str, Any], bits: int | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of AdapterSpec that settings of peft, or of a trainer around it, say; and what it cannot say.

    Raises SpecError for a rank or a dropout that is no number.
    """
    adapters: dict[str, Any] = {"base_bits": bits or bits_of(settings)}
    unknown: dict[str, str] = {}
    rank, dropout = (_first(settings, names) for names in (_RANK, _DROPOUT))
    if rank is not None:
        adapters["rank"] = int(_number("r", rank))
    if dropout is not None:
        adapters["dropout"] = _number("lora_dropout", dropout)
    adapters["targets"], others = _targets(settings)
    if others:
        unknown["target_modules"] = ", ".join(others)
    for name in ("use_dora", "modules_to_save", "lora_modules_to_save", "layers_to_transform", "rank_pattern"):
        if settings.get(name) not in (None, False, [], {}, ""):
            unknown[name] = str(settings[name])[:200]
    kind = str(settings.get("peft_type") or "LORA").upper()
    if kind != "LORA":
        unknown["peft_type"] = kind
    return adapters, unknown


def bits_of(settings: Mapping[str, Any]) -> int:
    """Bits of the frozen weights, by the flags of bitsandbytes and of the trainers around it."""
    named = settings.get("quantization_bit") or settings.get("load_in_bits")
    if settings.get("load_in_4bit") in (True, "true", "True") or str(named) == "4":
        return 4
    if settings.get("load_in_8bit") in (True, "true", "True") or str(named) == "8":
        return 8
    return 16


def _targets(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Targets that the planner knows, and names that it does not."""
    given = _first(settings, _TARGETS)
    if given is None:
        given = settings.get("lora_target")
    named = [*_listed(given), *_listed(settings.get("target_parameters"))]
    short = [name for name in map(_short, map(str, named)) if name]
    if "all" in short or EVERY_LINEAR in short or settings.get("lora_target_linear") in (True, "true"):
        return [EVERY_LINEAR, *(name for name in short if name in TARGETS and name not in GROUPS[EVERY_LINEAR])], []
    known = [name for name in dict.fromkeys(short) if name in TARGETS]
    # peft adapts the projections of queries and values where nothing is named
    return known or (["q_proj", "v_proj"] if not named else [EVERY_LINEAR]), [n for n in short if n not in TARGETS]


def _listed(given: Any) -> list[Any]:
    """Names as a list of them, or as a text that holds several; what is neither is one name, which nobody knows."""
    if isinstance(given, str):
        return re.split(r"[\s,|()]+", given)
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _short(name: str) -> str:
    """The end of a module's path, by which peft finds it."""
    tail = name.strip(" .*\\^$").rpartition(".")[2]
    return f"{_EXPERTS}{tail}" if f"{_EXPERTS}{tail}" in name else tail


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((settings[name] for name in names if settings.get(name) not in (None, "")), None)


def _number(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = inf
    if not isfinite(found):
        raise SpecError(f"{name}: {value!r:.60} is no number", "write a number")
    return found
