"""Fields of a ModelSpec that a Hugging Face config states in a roundabout way.

Each function takes the config of one `model_type` and returns fields of a ModelSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

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
    given = next((config[key] for key in ("hidden_activation", "hidden_act") if config.get(key) is not None), None)
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


def llama4_shared(config: Config) -> Derived:
    """One expert that every token visits, as wide as the others."""
    return {"shared_expert_intermediate_size": config.get("intermediate_size")}


def _times(count: Any, size: Any) -> Any:
    """count · size; a value that is no integer is left for ModelSpec to complain of."""
    return count * size if isinstance(count, int) and isinstance(size, int) else size


def shared_experts(count: str, width_key: str = "moe_intermediate_size") -> Callable[[Config], Derived]:
    """Shared experts are one MLP as wide as all of them, whose number stands under `count`."""

    def derive(config: Config) -> Derived:
        width = _times(config.get(count) or 0, config.get(width_key))
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


def parallel(kind: str, key: str = "use_parallel_residual", default: bool = True) -> Callable[[Config], Derived]:
    """A function that says whether attention and MLP run side by side, by a switch."""

    def derive(config: Config) -> Derived:
        return {"parallel_residual": kind if config.get(key, default) else None}

    return derive


def gpt_rotary(config: Config) -> Derived:
    """GPT-J rotates the first rotary_dim features of a head."""
    hidden, heads, rotated = (config.get(key) for key in ("n_embd", "n_head", "rotary_dim"))
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(rotated, int) and heads > 0):
        return {}
    return {"partial_rotary_factor": min(1.0, rotated * heads / max(hidden, 1))}


def four_times(config: Config) -> Derived:
    """An MLP four times as wide as the model."""
    return {"intermediate_size": _times(4, config.get("hidden_size"))}


def one_key_head(config: Config) -> Derived:
    """All queries share one head of keys and values, unless multi_query is off (GPT-BigCode)."""
    return {"num_key_value_heads": 1 if config.get("multi_query", True) else None}


def falcon(config: Config) -> Derived:
    """Falcon's generations: RW (sequential, ALiBi), 7B (one key-value head, one norm), 40B and later (two norms)."""
    new, bias = bool(config.get("new_decoder_architecture")), bool(config.get("bias"))
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_kv_heads") if new else 1 if config.get("multi_query", True) else heads
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    beside = new or config.get("parallel_attn", True)
    ffn = config.get("ffn_hidden_size")
    return {
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": _times(4, config.get("hidden_size")) if ffn is None else ffn,
        "bias": bias,
        "parallel_residual": None if not beside else "two_norms" if norms == 2 else "one_norm",
        "position_embedding": "alibi" if config.get("alibi") else "rope",
        **activation({"hidden_act": config.get("activation", "gelu")}),
    }


def mpt(config: Config) -> Derived:
    """MPT: no biases unless no_bias is off; ALiBi, else learned positions."""
    ratio, hidden = config.get("expansion_ratio"), config.get("d_model")
    alibi, has_bias = config.get("alibi", True), config.get("no_bias") is False
    norms: Derived = {}
    if config.get("qk_ln"):
        width, heads = whole(config, "d_model"), whole(config, "n_heads")
        normed = width + width // heads * whole(config, "kv_n_heads", heads)
        norms = {"qk_norm": True, "qk_norm_over": "hidden", "vector_parameters": normed * has_bias}
    return {
        **norms,
        "intermediate_size": _times(ratio, hidden),
        "num_key_value_heads": config.get("kv_n_heads"),
        "bias": has_bias,
        "norm_bias": has_bias,
        "position_embedding": "alibi" if alibi else "learned",
        **({} if alibi else {"max_position_embeddings": config.get("max_seq_len")}),
    }


def baichuan(config: Config) -> Derived:
    """Baichuan 13B has ALiBi, and says so by naming no largest position."""
    return {"position_embedding": "rope" if config.get("max_position_embeddings") else "alibi"}


def qwen1(config: Config) -> Derived:
    """The first Qwen: intermediate_size counts gate and up together."""
    both = config.get("intermediate_size")
    return {"intermediate_size": both // 2 if isinstance(both, int) else both, "attention_bias": "qkv"}


def chatglm(config: Config) -> Derived:
    """ChatGLM 2 to 4: grouped queries by a switch, biases on queries, keys and values."""
    grouped = config.get("multi_query_attention")
    bias = bool(config.get("add_bias_linear"))
    return {
        "num_key_value_heads": config.get("multi_query_group_num") if grouped else None,
        "attention_bias": "all" if bias else "qkv" if config.get("add_qkv_bias") else "none",
        "mlp_bias": bias,
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
    hidden = config.get("hidden_size")
    return {"embedding_multiplier": hidden**0.5} if isinstance(hidden, int) and hidden > 0 else {}


def grok_scales(config: Config) -> Derived:
    """Grok's scales of embedding, attention and logits, and the cap of the attention's logits."""
    output = config.get("output_multiplier_scale")
    return {
        "embedding_multiplier": config.get("embedding_multiplier_scale"),
        "attention_multiplier": config.get("attn_output_multiplier"),
        "attn_logit_softcapping": config.get("max_attn_value"),
        "logits_scaling": 1 / output if isinstance(output, int | float) and output > 0 else 1.0,
    }


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


def shared_width(key: str) -> Callable[[Config], Derived]:
    """A function that reads the width of the shared expert; 0 where there is none."""

    def derive(config: Config) -> Derived:
        return {"shared_expert_intermediate_size": config.get(key) or 0}

    return derive


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


def longcat(config: Config) -> Derived:
    """LongCat's layers are two each: one whose MLP has the experts beside it, one without them."""
    layers = config.get("num_layers", config.get("num_hidden_layers"))
    if isinstance(layers, bool) or not isinstance(layers, int):
        raise InexpressibleError(f"num_layers: {layers!r:.60} is {kind_of(layers)}, expected an integer")
    return {
        "num_hidden_layers": 2 * layers,
        "mlp_layer_types": ("moe", "dense"),
        "shared_expert_intermediate_size": config.get("ffn_hidden_size"),
        **latent_heads(config),
    }


def afmoe(config: Config) -> Derived:
    """Trinity's scale of the embedding, which is a choice."""
    return root_of_hidden(config) if config.get("mup_enabled") else {}


def layer_norms_of_heads(config: Config) -> Derived:
    """LayerNorms of queries and keys, whose biases are vectors (Phi, Persimmon)."""
    if not config.get("qk_layernorm"):
        return {}
    return {
        "qk_norm": True,
        "vector_parameters": 2 * whole(config, "hidden_size") // whole(config, "num_attention_heads"),
    }


def vectors(field: str, *terms: list[int | str]) -> Callable[[Config], Derived]:
    """A function that adds up products of numbers and of sizes under keys: the length of vectors beside."""

    def derive(config: Config) -> Derived:
        return {
            field: sum(prod(whole(config, one, 0) if isinstance(one, str) else one for one in term) for term in terms)
        }

    return derive


def reciprocal(field: str, key: str) -> Callable[[Config], Derived]:
    """A function that reads a factor on the logits, by which ours are divided."""

    def derive(config: Config) -> Derived:
        scale = config.get(key)
        return {field: 1 / scale} if isinstance(scale, int | float) and scale > 0 else {}

    return derive


def neo_sizes(config: Config) -> Derived:
    """GPT-Neo's MLP is four times as wide as the model unless intermediate_size says otherwise."""
    stated = config.get("intermediate_size")
    width = _times(4, config.get("hidden_size")) if stated is None else stated
    return {"intermediate_size": width, **activation({"hidden_act": config.get("activation_function")})}


def doge(config: Config) -> Derived:
    """Doge has dense layers here: its mixture of single rows is none that the planner knows."""
    if config.get("is_moe"):
        raise InexpressibleError("is_moe: experts that are rows of two tables")
    hidden, heads = whole(config, "hidden_size"), max(whole(config, "num_attention_heads"), 1)
    keys = whole(config, "num_key_value_heads", heads)
    fields: Derived = {"vector_parameters": 2 * hidden + keys + keys * keys * hidden // heads}
    return fields | ({"moe": None} if config.get("num_experts_per_tok") and config.get("keep_window_size", 1) else {})


def one_bias(config: Config) -> Derived:
    """InternLM: biases on all four projections of attention by one switch, on by default."""
    return {"attention_bias": "all" if config.get("bias", True) else "none"}


def internlm3(config: Config) -> Derived:
    """InternLM 3: biases of queries, keys and values by one switch, all others by another."""
    qkv, others = config.get("qkv_bias", config.get("attention_bias")), bool(config.get("bias"))
    everywhere = qkv and (others or config.get("attention_bias"))
    return {"attention_bias": "all" if everywhere else "qkv" if qkv else "output" if others else "none",
            "mlp_bias": others or bool(config.get("mlp_bias"))}  # fmt: skip


def minimax_rotary(config: Config) -> Derived:
    """MiniMax states the number of rotated features of a head."""
    rotated, width = config.get("rotary_dim"), config.get("head_dim")
    if not (isinstance(rotated, int) and isinstance(width, int) and 0 < rotated <= width):
        return {}
    return {"partial_rotary_factor": rotated / width}


def mimo_rotary(config: Config) -> Derived:
    """MiMo-V2's base of rotary frequencies on sliding layers."""
    return {"rope_local_base_freq": config["swa_rope_theta"]} if config.get("swa_rope_theta") else {}


def nemotron_activation(config: Config) -> Derived:
    """Nemotron-H's activation has a name of its own."""
    return activation({"hidden_act": config.get("mlp_hidden_act", "relu2")})
