"""Fields of a ModelSpec that a Hugging Face config states in a roundabout way.

Each function takes the config of one `model_type` and returns fields of a ModelSpec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from planner.specs.expressions import names_in, value_of
from planner.specs.reading import kind_of

Config = Mapping[str, Any]
Derived = dict[str, Any]

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "xielu": "xielu",
    "situ": "situ", "relu_squared": "relu2", "squared_relu": "relu2",
}  # fmt: skip
_SWITCHES = (
    "attention_bias", "attention_out_bias", "do_layer_norm_before", "enable_bias", "mlp_bias", "qk_layernorm",
    "qkv_bias", "tie_word_embeddings", "use_bias", "use_qk_norm", "use_qkv_bias", "use_sliding_window",
)  # fmt: skip
MAX_LAYERS = 10_000
"""The most layers that ModelSpec allows; keeps a nonsense count from becoming a list of that length here."""


class InexpressibleError(Exception):
    """A pattern of layers that ModelSpec has no field for."""


def num_layers(config: Config) -> int:
    layers = config.get("num_hidden_layers")
    return min(layers, MAX_LAYERS) if isinstance(layers, int) else 0


def check_switches(config: Config) -> None:
    """Raise InexpressibleError where a switch is neither on nor off: any text would read as on."""
    for key in _SWITCHES:
        if not isinstance(value := config.get(key), bool | None):
            raise InexpressibleError(f"{key}: {value!r:.60} is {kind_of(value)}, expected true or false")


def whole(config: Config, key: str, default: int | None = None) -> int:
    """The integer under `key`; InexpressibleError for anything else, which would read as no layers."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise InexpressibleError(f"{key}: {value!r:.60} is {kind_of(value)}, expected an integer")
    return value


def activation(config: Config) -> Derived:
    keys = ("mlp_hidden_act", "hidden_activation", "activation_function", "hidden_act", "activation")
    given = next((config[key] for key in keys if config.get(key) is not None), None)
    return {"activation": ACTIVATIONS.get(given, given) if isinstance(given, str) else given}


def attention_bias(config: Config) -> Derived:
    """Biases on all four projections or on none, by one switch."""
    return {"attention_bias": "all" if config.get("attention_bias") else "none"}


def qkv_bias(config: Config) -> Derived:
    """Biases on queries, keys and values only (Qwen2)."""
    return {"attention_bias": "qkv" if config.get("qkv_bias", True) else "none"}


def no_output_bias(config: Config) -> Derived:
    """Biases on queries, keys and values only, unless the output's own switch is on (GLM-4, Seed-OSS)."""
    inner, output = config.get("attention_bias"), config.get("attention_out_bias")
    return {"attention_bias": "all" if inner and output else "qkv" if inner else "none"}


def whole_heads(config: Config) -> Derived:
    """Heads that are given no width: hidden_size // num_attention_heads."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    known = config.get("head_dim") is not None or not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0)
    return {} if known else {"head_dim": hidden // heads}  # type: ignore[operator]


def _times(count: Any, size: Any) -> Any:
    """count · size; a value that is no integer is left for ModelSpec to complain of."""
    return count * size if isinstance(count, int) and isinstance(size, int) else size


def sizes(texts: Mapping[str, Any]) -> Callable[[Config], Derived]:
    """A function that works out fields, and those of sections, by expressions of a config's numbers.

    A field whose expression is None is left out.
    """

    def derive(config: Config) -> Derived:
        fields = {
            name: sizes(text)(config) if isinstance(text, Mapping) else _size(str(text), config)
            for name, text in texts.items()
        }
        return {name: value for name, value in fields.items() if value is not None}

    return derive


def _size(text: str, config: Config) -> Any:
    known = {name: config.get(name) for name in names_in(text) - _CALLED}
    for name, value in known.items():
        if not isinstance(value, int | float | None):
            raise InexpressibleError(f"{name}: {value!r:.60} is {kind_of(value)}, expected an integer")
    try:
        return value_of(text, known)
    except (ArithmeticError, TypeError, ValueError):
        name, value = max(known.items(), key=lambda item: abs(item[1]) if item[1] else math.inf)
        raise InexpressibleError(f"{name}: {value!r:.60} is no size") from None


_CALLED = {"bool", "int", "max", "min"}
"""Functions that expressions of sizes call."""


def opt_sizes(config: Config) -> Derived:
    """A position table of two rows more than positions, since positions count from 2."""
    if config.get("do_layer_norm_before") is False:
        raise InexpressibleError("do_layer_norm_before: norms after attention and MLP alone")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise InexpressibleError("word_embed_proj_dim: a projection between embedding and layers")
    positions = config.get("max_position_embeddings")
    rows = positions + 2 if isinstance(positions, int) else positions
    return {"max_position_embeddings": rows, **activation({"hidden_act": config.get("activation_function")})}


def parallel(kind: str, key: str = "use_parallel_residual", default: bool = True) -> Callable[[Config], Derived]:
    """A function that says whether attention and MLP run side by side, by a switch."""

    def derive(config: Config) -> Derived:
        return {"parallel_residual": kind if config.get(key, default) else None}

    return derive


def one_for_all(*pairs: tuple[str, str], default: Any = None) -> Callable[[Config], Derived]:
    """A function that reads keys which hold one number, or a list of it for each layer (Hunyuan)."""

    def derive(config: Config) -> Derived:
        found = {}
        for name, key in pairs:
            value = config.get(key, default)
            if isinstance(value, list):
                if not value or any(entry != value[0] for entry in value):
                    raise InexpressibleError(f"{key}: layers of different sizes, {str(value)[:60]}")
                value = value[0]
            found[name] = value
        return found

    return derive


def hunyuan_experts(config: Config) -> Derived:
    """Hunyuan's experts: all as wide as moe_intermediate_size, else as the MLP; the shared ones one MLP."""
    stated = one_for_all(
        ("width", "moe_intermediate_size"), ("shared", "num_shared_expert"), ("num_experts_per_tok", "moe_topk"),
        ("num_experts", "num_experts"),
    )(config)  # fmt: skip
    width = stated["width"] or config.get("intermediate_size")
    shared = 1 if stated["shared"] is None else stated["shared"]
    followers = whole(config, "cla_share_factor", 2) - 1 if config.get("use_cla") else 0
    return {
        "layer_sizes": ({}, *({"shares_keys": True},) * followers) if followers else None,
        "moe_intermediate_size": width,
        "num_experts_per_tok": stated["num_experts_per_tok"],
        "num_experts": stated["num_experts"],
        "shared_expert_intermediate_size": _times(shared, config.get("intermediate_size")),
        "qk_norm": bool(config.get("use_qk_norm", True)),
    }


def bailing(config: Config) -> Derived:
    """Ling's switches: biases, norms of queries and keys, the balancing bias, the width of the shared experts."""
    bias = "all" if config.get("use_bias") else "qkv" if config.get("use_qkv_bias") else "none"
    width = config.get("moe_shared_expert_intermediate_size")
    shared = config.get("num_shared_experts") or 0
    return {
        "attention_bias": bias,
        "qk_norm": bool(config.get("use_qk_norm")),
        "router_bias": bool(config.get("moe_router_enable_expert_bias")),
        "shared_expert_intermediate_size": _times(shared, width or config.get("moe_intermediate_size")),
        "embedding_norm": False,
    }


def doge(config: Config) -> Derived:
    """Doge has dense layers here: its mixture of single rows is none that the planner knows."""
    if config.get("is_moe"):
        raise InexpressibleError("is_moe: experts that are rows of two tables")
    hidden, heads = whole(config, "hidden_size"), max(whole(config, "num_attention_heads"), 1)
    keys = whole(config, "num_key_value_heads", heads)
    fields: Derived = {"vector_parameters": 2 * hidden + keys + keys * keys * hidden // heads}
    return fields | ({"moe": None} if config.get("num_experts_per_tok") and config.get("keep_window_size", 1) else {})
