"""Fields of a model that Megatron-Bridge's configuration has and Megatron-LM's options say otherwise or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.export.bridge.model import RECIPES, TANH
from planner.trainers.rules.facts import every_nth

_YARN = {
    "rotary_scaling_factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_NAMES = (
    "activation_func", "layernorm_zero_centered_gamma", "softmax_scale", "query_pre_attn_scalar", "no_rope_freq",
    "window_attn_skip_freq", "interleaved_attn_pattern", "rope_scaling", "rope_scaling_factor",
    "seq_len_interpolation_factor", "yarn_correction_range_round_to_int", *_YARN, *(f"yarn_{n}" for n in _YARN), *_CAPS,
)  # fmt: skip
MODEL_FIELDS = frozenset(f"model.{name}" for name in _NAMES)
"""Paths that are read here."""


def model_fields(fields: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """Fields of a ModelSpec, as far as the configuration says them."""
    given = {name: fields[f"model.{name}"] for name in _NAMES if f"model.{name}" in fields}
    found: dict[str, Any] = {}
    if "activation_func" in given:
        found["activation"] = _activation(str(given["activation_func"]), fields)
    if isinstance(centred := given.get("layernorm_zero_centered_gamma"), bool):
        found["zero_centered_norm"] = centred
    if isinstance(scale := given.get("softmax_scale"), float):
        found["attention_multiplier"] = scale
    found |= {name: given[name] for name in _CAPS if isinstance(given.get(name), float)}
    found |= _layers(given, fields) | _scaling(given, bool(fields.get("model.multi_latent_attention")))
    return found | _of_gemma(given, fields, recipe)


def _activation(name: str, fields: Mapping[str, Any]) -> str:
    """A GELU that is fused with a bias is the tanh's."""
    fused = fields.get("model.bias_activation_fusion") is True
    if name == "gelu":
        return "gelu_tanh" if fused else "gelu"
    return {"squared_relu": "relu2", TANH: "gelu_tanh"}.get(name, name)


def _layers(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with a window, and those without rotary positions."""
    found: dict[str, Any] = {}
    skipped, unrotated = given.get("window_attn_skip_freq"), given.get("no_rope_freq")
    if isinstance(skipped, int) and fields.get("model.window_size"):
        found["sliding_window_pattern"] = skipped
    elif isinstance(skipped, list):
        found |= {"layer_types": ["sliding" if slides else "full" for slides in skipped]}
    if isinstance(unrotated, int):
        found["no_rope_layer_interval"] = unrotated
    elif isinstance(unrotated, list):
        found["no_rope_layer_interval"] = every_nth([bool(flag) for flag in unrotated])
    return found


def _scaling(given: Mapping[str, Any], is_latent: bool) -> dict[str, Any]:
    """How rotary frequencies are stretched; a factor of 1 stretches nothing."""
    prefix = "" if is_latent else "yarn_"
    yarn = {name: given.get(f"{prefix}{field}") for field, name in _YARN.items()}
    if yarn["factor"] not in (None, 1, 1.0):
        rounded = given.get("yarn_correction_range_round_to_int", True)
        return {"rope_scaling": {"rope_type": "yarn", **yarn, "truncate": None if rounded else False}}
    if given.get("rope_scaling") is True:
        return {"rope_scaling": {"rope_type": "llama3", "factor": given.get("rope_scaling_factor"), **_LLAMA3}}
    if (factor := given.get("seq_len_interpolation_factor")) not in (None, 1, 1.0):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {"rope_scaling": None} if is_latent else {}


def _of_gemma(given: Mapping[str, Any], fields: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """The parts that recipes of Gemma 2 and 3 build, whatever is overridden."""
    if recipe not in (RECIPES["gemma2"], RECIPES["gemma3"]):
        return {}
    hidden = fields.get("model.hidden_size")
    found: dict[str, Any] = {"post_norms": True}
    if isinstance(hidden, int):
        found["embedding_multiplier"] = hidden**0.5
    if recipe == RECIPES["gemma2"]:
        scalar = given.get("query_pre_attn_scalar")
        scaled = {"attention_multiplier": scalar**-0.5} if isinstance(scalar, (int, float)) and scalar > 0 else {}
        return found | scaled | {"sliding_window_pattern": 2}
    if isinstance(bases := fields.get("model.rotary_base"), list) and len(bases) == 2:
        found |= {"rope_local_base_freq": float(bases[0]), "rope_theta": float(bases[1])}
    if isinstance(window := fields.get("model.window_size"), int):
        found["sliding_window"] = window
    if isinstance(pattern := given.get("interleaved_attn_pattern"), list) and len(pattern) == 2:
        found["sliding_window_pattern"] = sum(pattern)
    if (factor := given.get("rope_scaling_factor")) not in (None, 1, 1.0):
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found
