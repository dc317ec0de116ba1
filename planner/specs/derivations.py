"""Fields of a ModelSpec that a Hugging Face config states in a roundabout way.

Each function takes the config of one `model_type` and returns fields of a ModelSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.specs.reading import kind_of

Config = Mapping[str, Any]
Derived = dict[str, Any]

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu",
}  # fmt: skip
_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")
_SWITCHES = (
    "attention_bias", "attention_out_bias", "do_layer_norm_before", "enable_bias", "mlp_bias", "qk_layernorm",
    "qkv_bias", "tie_word_embeddings", "use_bias", "use_qk_norm", "use_qkv_bias", "use_sliding_window",
)  # fmt: skip
_MAX_LAYERS = 10_000
"""The most layers that ModelSpec allows; keeps a nonsense count from becoming a list of that length here."""


class InexpressibleError(Exception):
    """A pattern of layers that ModelSpec has no field for."""


def _num_layers(config: Config) -> int:
    layers = config.get("num_hidden_layers")
    return min(layers, _MAX_LAYERS) if isinstance(layers, int) else 0


def check_switches(config: Config) -> None:
    """Raise InexpressibleError where a switch is neither on nor off: any text would read as on."""
    for key in _SWITCHES:
        if not isinstance(value := config.get(key), bool | None):
            raise InexpressibleError(f"{key}: {value!r:.60} is {kind_of(value)}, expected true or false")


def _whole(config: Config, key: str, default: int | None = None) -> int:
    """The integer under `key`; InexpressibleError for anything else, which would read as no layers."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise InexpressibleError(f"{key}: {value!r:.60} is {kind_of(value)}, expected an integer")
    return value


def activation(config: Config) -> Derived:
    given = next((config[key] for key in ("hidden_activation", "hidden_act") if config.get(key) is not None), None)
    return {"activation": _ACTIVATIONS.get(given, given) if isinstance(given, str) else given}


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


def window(is_full: Callable[[Config, int], bool], key: str = "sliding_window") -> Callable[[Config], Derived]:
    """A function that finds the layers which slide (or attend in chunks), by `layer_types` or the architecture's rule.

    The width of the window, or of a chunk, stands under `key`.
    """

    def derive(config: Config) -> Derived:
        span, types = config.get(key), config.get("layer_types")
        if types is not None:
            _check_types(types)
        if not span:
            return {}
        if types is not None:
            if len(types) != config.get("num_hidden_layers"):
                raise InexpressibleError(
                    f"layer_types: {len(types)} entries for {config.get('num_hidden_layers')} layers"
                )
            full = [kind == "full_attention" for kind in types[:_MAX_LAYERS]]
        else:
            full = [is_full(config, layer) for layer in range(_num_layers(config))]
        if full and all(full):
            return {}
        pattern = full.index(True) + 1 if True in full else None
        if pattern is not None and full != [(layer + 1) % pattern == 0 for layer in range(len(full))]:
            raise InexpressibleError("layer_types: full attention on layers that are not every n-th")
        return {key: span, "sliding_window_pattern": pattern}

    return derive


def _check_types(types: Any) -> None:
    if not isinstance(types, list):
        raise InexpressibleError(f"layer_types: {types!r:.60} is {kind_of(types)}, expected a list")
    for kind in types:
        if kind not in _ATTENTIONS:
            raise InexpressibleError(f"layer_types: {kind!r:.60} is none of {', '.join(_ATTENTIONS)}")


def never(config: Config, layer: int) -> bool:
    """Every layer slides."""
    return False


def every(key: str, default: int) -> Callable[[Config, int], bool]:
    """Every n-th layer attends to everything, or has experts: n given under `key`."""

    def is_nth(config: Config, layer: int) -> bool:
        period = _whole(config, key, config.get(f"_{key}", default))
        return period > 0 and (layer + 1) % period == 0

    return is_nth


def unrotated(config: Config, layer: int) -> bool:
    """Layers without rotary embeddings attend to everything, every fourth one where no others are listed (Llama 4)."""
    rotates = config.get("no_rope_layers")
    if isinstance(rotates, list) and len(rotates) == config.get("num_hidden_layers"):
        return not rotates[layer]
    return every("no_rope_layer_interval", 4)(config, layer)


def llama4_moe(config: Config, layer: int) -> bool:
    listed = config.get("moe_layers")
    return layer in listed if isinstance(listed, list) else every("interleave_moe_layer_step", 0)(config, layer)


def llama4_shared(config: Config) -> Derived:
    """One expert that every token visits, as wide as the others."""
    return {"shared_expert_intermediate_size": config.get("intermediate_size")}


def qwen_full(config: Config, layer: int) -> bool:
    """Layers from max_window_layers on slide, and none does unless use_sliding_window says so."""
    first = config.get("max_window_layers")
    return not config.get("use_sliding_window") or not isinstance(first, int) or layer < first


def moe_layers(is_moe: Callable[[Config, int], bool]) -> Callable[[Config], Derived]:
    """A function that writes the layers with experts as first_k_dense_replace and moe_layer_freq."""

    def derive(config: Config) -> Derived:
        layers = [layer for layer in range(_num_layers(config)) if is_moe(config, layer)]
        if not layers:
            return {"first_k_dense_replace": _num_layers(config)}
        freq = layers[1] - layers[0] if len(layers) > 1 else 1
        first = layers[0] - freq + 1
        if first < 0 or layers != list(range(layers[0], _num_layers(config), freq)):
            raise InexpressibleError("the MoE layers are not every n-th after the first few")
        return {"first_k_dense_replace": first, "moe_layer_freq": freq}

    return derive


def qwen_moe(config: Config, layer: int) -> bool:
    dense = config.get("mlp_only_layers")
    return every("decoder_sparse_step", 0)(config, layer) and not (isinstance(dense, list) and layer in dense)


def deepseek_moe(config: Config, layer: int) -> bool:
    """Every n-th layer from first_k_dense_replace on has experts, or those for which moe_layer_freq lists a 1."""
    freq = config.get("moe_layer_freq")
    if isinstance(freq, list) and len(freq) == config.get("num_hidden_layers"):
        listed = bool(freq[layer])
    else:
        step = _whole(config, "moe_layer_freq", 1)
        listed = step > 0 and layer % step == 0
    return listed and layer >= _whole(config, "first_k_dense_replace")


def sparse_mlp(config: Config, layer: int) -> bool:
    """Layers that mlp_layer_types calls sparse have experts, else all after the first few (GLM-4.7-Flash)."""
    types = config.get("mlp_layer_types")
    if types is None:
        return layer >= _whole(config, "first_k_dense_replace")
    if not isinstance(types, list) or len(types) != config.get("num_hidden_layers"):
        raise InexpressibleError(f"mlp_layer_types: {types!r:.60} is no list of dense or sparse for each layer")
    if types[layer] not in ("dense", "sparse"):
        raise InexpressibleError(f"mlp_layer_types: {types[layer]!r:.60} is neither dense nor sparse")
    return bool(types[layer] == "sparse")


def ernie_moe(config: Config, layer: int) -> bool:
    first, last, step = (_whole(config, f"moe_layer_{key}") for key in ("start_index", "end_index", "interval"))
    return first <= layer and (last < 0 or layer <= last) and step > 0 and (layer + 1) % step == 0


def _times(count: Any, size: Any) -> Any:
    """count · size; a value that is no integer is left for ModelSpec to complain of."""
    return count * size if isinstance(count, int) and isinstance(size, int) else size


def shared_experts(count: str) -> Callable[[Config], Derived]:
    """Shared experts are one MLP as wide as all of them, whose number stands under `count`."""

    def derive(config: Config) -> Derived:
        width = _times(config.get(count) or 0, config.get("moe_intermediate_size"))
        return {"shared_expert_intermediate_size": width}

    return derive


def latent_heads(config: Config) -> Derived:
    """Heads are as wide as their values."""
    return {"head_dim": config.get("v_head_dim")}


def opt_sizes(config: Config) -> Derived:
    """A position table of two rows more than positions, since positions count from 2."""
    if config.get("do_layer_norm_before") is False:
        raise InexpressibleError("do_layer_norm_before: norms after attention and MLP alone")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise InexpressibleError("word_embed_proj_dim: a projection between embedding and layers")
    positions = config.get("max_position_embeddings")
    rows = positions + 2 if isinstance(positions, int) else positions
    return {"max_position_embeddings": rows, **activation({"hidden_act": config.get("activation_function")})}


def stablelm_norms(config: Config) -> Derived:
    if config.get("qk_layernorm"):
        raise InexpressibleError("qk_layernorm: a norm of its own for each head")
    return {"attention_bias": "qkv" if config.get("use_qkv_bias") else "none"}


def gpt2_sizes(config: Config) -> Derived:
    """The MLP is four times as wide as the model unless n_inner says otherwise."""
    inner = config.get("n_inner")
    width = _times(4, config.get("n_embd")) if inner is None else inner
    return {"intermediate_size": width, **activation({"hidden_act": config.get("activation_function")})}
