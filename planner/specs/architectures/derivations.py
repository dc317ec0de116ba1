"""Fields of a ModelSpec that a Hugging Face config states in a roundabout way.

Each function takes the config of one `model_type` and returns fields of a ModelSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from planner.specs.base import filled
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


def mapping_in(config: Config, key: str) -> Config:
    """The mapping under a key; an empty one where none stands there."""
    stated = config.get(key)
    return stated if isinstance(stated, Mapping) else {}


def list_in(config: Config, key: str) -> list[Any]:
    """The list under a key; an empty one where none stands there."""
    stated = config.get(key)
    return stated if isinstance(stated, list) else []


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


def sum_of(text: str | int, size: Callable[[str], int]) -> int:
    """An expression of numbers and sizes, such as `4*hidden_size + inner/16`, whose quotients are rounded down."""
    whole_text = str(text).replace("/", "//")
    names = {name: size(name) for name in names_in(whole_text) - _CALLED}
    try:
        return int(value_of(whole_text, names))
    except ZeroDivisionError:
        return 0


_CALLED = {"max", "min", "bool"}
"""Functions that expressions call."""


def size_of(config: Config, texts: str | list[str], needed: bool = False) -> int | None:
    """The first of these sums whose sizes the config gives (`auto` gives none); the last one if a size is needed."""
    sums = [texts] if isinstance(texts, str) else texts
    given = [text for text in sums if not any(config.get(key) in (None, "auto") for key in names_in(text) - _CALLED)]
    return sum_of((given or sums[-1:])[0], partial(whole, config)) if given or needed else None


def sizes(fields: Mapping[str, str | list[str]]) -> Callable[[Config], Derived]:
    """A function that derives each field by `size_of`, and leaves out those whose sizes the config does not give."""

    def derive(config: Config) -> Derived:
        found = {name: size_of(config, texts) for name, texts in fields.items()}
        return filled(found.items())

    return derive


def first_of(config: Config, keys: str | Iterable[str]) -> Any:
    """The value under the first key that has one."""
    names = (keys,) if isinstance(keys, str) else keys
    return next((config[key] for key in names if config.get(key) is not None), None)


def section(
    name: str, fields: Mapping[str, str | list[str]], others: Mapping[str, str | list[str]] = MappingProxyType({})
) -> Callable[[Config], Derived]:
    """A function that fills a section with sizes, and with other values as they stand."""

    def derive(config: Config) -> Derived:
        counted = {field: size_of(config, texts, needed=True) for field, texts in fields.items()}
        stated = {field: first_of(config, keys) for field, keys in others.items()}
        return {name: counted | filled(stated.items())}

    return derive


def switch(field: str, key: str, on: Any, off: Any = None, default: Any = None) -> Callable[[Config], Derived]:
    """A function that gives a field one of two values."""
    return lambda config: {field: on if config.get(key, default) else off}


def chosen(field: str, text: str) -> Callable[[Config], Derived]:
    """A function that works a field out by an expression over what the config states; what it does not is None."""
    return lambda config: {field: value_of(text, {key: config.get(key) for key in names_in(text) - _CALLED})}


attention_bias = switch("attention_bias", "attention_bias", "all", "none")
"""Biases on all four projections or on none, by one switch."""


def ratio(field: str, above: str, below: str) -> Callable[[Config], Derived]:
    """A function that works out a share of one size of another, at most 1."""

    def derive(config: Config) -> Derived:
        part, total = size_of(config, above), size_of(config, below)
        return {field: min(1.0, part / total)} if part is not None and total else {}

    return derive


def activation(config: Config) -> Derived:
    given = first_of(config, ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function"))
    return {"activation": ACTIVATIONS.get(given, given) if isinstance(given, str) else given}


def opt_sizes(config: Config) -> Derived:
    """A position table of two rows more than positions, since positions count from 2."""
    if config.get("do_layer_norm_before") is False:
        raise InexpressibleError("do_layer_norm_before: norms after attention and MLP alone")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise InexpressibleError("word_embed_proj_dim: a projection between embedding and layers")
    positions = config.get("max_position_embeddings")
    rows = positions + 2 if isinstance(positions, int) else positions
    return {"max_position_embeddings": rows}


def falcon(config: Config) -> Derived:
    """Falcon's generations: RW (sequential, ALiBi), 7B (one key-value head, one norm), 40B and later (two norms)."""
    new, bias = bool(config.get("new_decoder_architecture")), bool(config.get("bias"))
    heads, stated = config.get("num_attention_heads"), config.get("num_kv_heads")
    kv_heads = stated if new else 1 if config.get("multi_query", True) else heads
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    beside = config.get("parallel_attn", True) or new
    return {
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": size_of(config, ["ffn_hidden_size", "4*hidden_size"]),
        "bias": bias,
        "parallel_residual": None if not beside else "two_norms" if norms == 2 else "one_norm",
        "position_embedding": "alibi" if config.get("alibi") else "rope",
        **activation({"hidden_act": config.get("activation", "gelu")}),
    }


def mpt(config: Config) -> Derived:
    """MPT: no biases unless no_bias is off; ALiBi, else learned positions."""
    alibi, has_bias = config.get("alibi", True), config.get("no_bias") is False
    norms: Derived = {}
    if config.get("qk_ln"):
        width, heads = whole(config, "d_model"), whole(config, "n_heads")
        normed = width + width // heads * whole(config, "kv_n_heads", heads)
        norms = {"qk_norm": True, "qk_norm_over": "hidden", "vector_parameters": normed * has_bias}
    return {
        **norms,
        "intermediate_size": size_of(config, "expansion_ratio*d_model"),
        "num_key_value_heads": config.get("kv_n_heads"),
        "bias": has_bias,
        "norm_bias": has_bias,
        "position_embedding": "alibi" if alibi else "learned",
        **({} if alibi else {"max_position_embeddings": config.get("max_seq_len")}),
    }


def minicpm(config: Config) -> Derived:
    """MiniCPM's scales: of the embedding, of what a layer adds (over the root of their number), of the logits."""
    layers, depth, base, hidden = (
        config.get(key) for key in ("num_hidden_layers", "scale_depth", "dim_model_base", "hidden_size")
    )
    fields: Derived = {"embedding_multiplier": config.get("scale_emb", 1.0)}
    if isinstance(layers, int) and layers > 0 and isinstance(depth, int | float):
        fields["residual_multiplier"] = depth / layers**0.5
    if isinstance(base, int) and isinstance(hidden, int) and base > 0:
        fields["logits_scaling"] = hidden / base
    return fields


def root_of_hidden(config: Config) -> Derived:
    """The embedding is multiplied by the root of its width (Gemma)."""
    hidden = config.get("hidden_size") if config.get("mup_enabled", True) else None
    return {"embedding_multiplier": hidden**0.5} if isinstance(hidden, int) and hidden > 0 else {}


def one_for_all(*pairs: tuple[str, str]) -> Callable[[Config], Derived]:
    """A function that reads keys which hold one number, or a list of it for each layer (Hunyuan)."""

    def derive(config: Config) -> Derived:
        found = {}
        for name, key in pairs:
            value = config.get(key)
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
    followers = whole(config, "cla_share_factor", 2) - 1 if config.get("use_cla") else 0
    return {
        "layer_sizes": ({}, *({"shares_keys": True},) * followers) if followers else None,
        "moe_intermediate_size": width,
        "num_experts_per_tok": stated["num_experts_per_tok"],
        "num_experts": stated["num_experts"],
        "shared_expert_intermediate_size": whole(stated, "shared", 1) * whole(config, "intermediate_size"),
        "qk_norm": bool(config.get("use_qk_norm", True)),
    }


def longcat(config: Config) -> Derived:
    """Each layer of LongCat's config is two here: one whose MLP has the experts beside it, one without them."""
    layers = config.get("num_layers", config.get("num_hidden_layers"))
    if isinstance(layers, bool) or not isinstance(layers, int):
        raise InexpressibleError(f"num_layers: {layers!r:.60} is {kind_of(layers)}, expected an integer")
    return {
        "num_hidden_layers": 2 * layers,
        "mlp_layer_types": ("moe", "dense"),
        "shared_expert_intermediate_size": config.get("ffn_hidden_size"),
    }


def layer_norms_of_heads(config: Config) -> Derived:
    """LayerNorms of queries and keys, whose biases are vectors (Phi, Persimmon)."""
    if not config.get("qk_layernorm"):
        return {}
    return {
        "qk_norm": True,
        "vector_parameters": 2 * whole(config, "hidden_size") // whole(config, "num_attention_heads"),
    }


def reciprocal(field: str, key: str) -> Callable[[Config], Derived]:
    """A function that reads a factor on the logits, by which ours are divided."""

    def derive(config: Config) -> Derived:
        scale = config.get(key)
        return {field: 1 / scale} if isinstance(scale, int | float) and scale > 0 else {}

    return derive


def doge(config: Config) -> Derived:
    """Doge has dense layers here: its mixture of single rows is none that the planner knows."""
    if config.get("is_moe"):
        raise InexpressibleError("is_moe: experts that are rows of two tables")
    hidden, heads = whole(config, "hidden_size"), max(whole(config, "num_attention_heads"), 1)
    keys = whole(config, "num_key_value_heads", heads)
    fields: Derived = {"vector_parameters": 2 * hidden + keys + keys * keys * hidden // heads}
    return fields | ({"moe": None} if config.get("num_experts_per_tok") and config.get("keep_window_size", 1) else {})


def ernie_vl(config: Config) -> Derived:
    """ERNIE-4.5-VL's experts for text and for images, whose widths are a list."""
    widths = config.get("moe_intermediate_size")
    if not (isinstance(widths, list) and len(widths) == 2 and all(type(one) is int for one in widths)):
        raise InexpressibleError(f"moe_intermediate_size: {widths!r:.60}, expected two integers")
    shared = whole(config, "moe_num_shared_experts") * widths[0]
    return {
        **one_for_all(("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k"))(config),
        "moe_intermediate_size": widths[0], "image_expert_intermediate_size": widths[1],
        "shared_expert_intermediate_size": shared,
    }  # fmt: skip


def gated_latents(config: Config) -> Derived:
    """A.X-K2's latent attention, whose queries and gates read latents and their norm."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"mla": {name: whole(config, name) for name in names} | {"gates_by_latents": True}}


def internlm3(config: Config) -> Derived:
    """InternLM 3: biases of queries, keys and values by one switch, all others by another."""
    qkv, others = config.get("qkv_bias", config.get("attention_bias")), bool(config.get("bias"))
    everywhere = qkv and (others or config.get("attention_bias"))
    return {"attention_bias": "all" if everywhere else "qkv" if qkv else "output" if others else "none",
            "mlp_bias": others or bool(config.get("mlp_bias"))}  # fmt: skip
