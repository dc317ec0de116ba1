"""What each Hugging Face architecture calls things: one row of a table per `model_type`.

A row says which key holds which field, what transformers 5.23 assumes for absent keys, what is the same for every model
of the architecture, and what has to be worked out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
Derived = dict[str, Any]

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_new": "gelu",
    "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
}  # fmt: skip
_MAX_LAYERS = 10_000
"""What ModelSpec allows; keeps a nonsense layer count from becoming a list of that length here."""


class InexpressibleError(Exception):
    """A pattern of layers that ModelSpec has no field for."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one `model_type` spells a ModelSpec."""

    keys: dict[str, tuple[str, ...]]
    """Our field: the config keys that may hold it, first choice first."""
    defaults: dict[str, Any]
    """By config key, what transformers assumes."""
    derive: tuple[Callable[[Config], Derived], ...]
    fixed: dict[str, Any] = field(default_factory=dict)


def _num_layers(config: Config) -> int:
    layers = config.get("num_hidden_layers")
    return min(layers, _MAX_LAYERS) if isinstance(layers, int) else 0


def _activation(config: Config) -> Derived:
    given = next((config[key] for key in ("hidden_activation", "hidden_act") if config.get(key) is not None), None)
    return {"activation": _ACTIVATIONS.get(given, given) if isinstance(given, str) else given}


def _attention_bias(config: Config) -> Derived:
    """One switch for all four projections."""
    return {"attention_bias": "all" if config.get("attention_bias") else "none"}


def _qkv_bias(config: Config) -> Derived:
    """Queries, keys and values only (Qwen2)."""
    return {"attention_bias": "qkv" if config.get("qkv_bias", True) else "none"}


def _no_output_bias(config: Config) -> Derived:
    """Queries, keys and values only, unless a switch of its own says otherwise (GLM-4, Seed-OSS)."""
    inner, output = config.get("attention_bias"), config.get("attention_out_bias")
    return {"attention_bias": "all" if inner and output else "qkv" if inner else "none"}


def _whole_heads(config: Config) -> Derived:
    """Heads as wide as hidden_size holds whole ones, where they are given no width."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    known = config.get("head_dim") is not None or not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0)
    return {} if known else {"head_dim": hidden // heads}  # type: ignore[operator]


def _window(is_full: Callable[[Config, int], bool]) -> Callable[[Config], Derived]:
    """Which layers slide, by `layer_types` where the config lists them and else by the architecture's rule."""

    def derive(config: Config) -> Derived:
        window, types = config.get("sliding_window"), config.get("layer_types")
        if not window:
            return {}
        if isinstance(types, list):
            if len(types) != config.get("num_hidden_layers"):
                raise InexpressibleError(
                    f"layer_types: {len(types)} entries for {config.get('num_hidden_layers')} layers"
                )
            full = [kind == "full_attention" for kind in types[:_MAX_LAYERS]]
        else:
            full = [is_full(config, layer) for layer in range(_num_layers(config))]
        if full and all(full):
            return {}
        every = full.index(True) + 1 if True in full else None
        if every is not None and full != [(layer + 1) % every == 0 for layer in range(len(full))]:
            raise InexpressibleError("layer_types: full attention on layers that are not every n-th")
        return {"sliding_window": window, "sliding_window_pattern": every}

    return derive


def _never(config: Config, layer: int) -> bool:
    """Every layer slides."""
    return False


def _every(key: str, default: int) -> Callable[[Config, int], bool]:
    """Every n-th layer attends to everything, n given under `key`."""

    def is_full(config: Config, layer: int) -> bool:
        every = config.get(key, config.get(f"_{key}", default))
        return isinstance(every, int) and every > 0 and (layer + 1) % every == 0

    return is_full


def _qwen_full(config: Config, layer: int) -> bool:
    """Layers from max_window_layers on slide, and none does unless use_sliding_window says so."""
    first = config.get("max_window_layers")
    return not config.get("use_sliding_window") or not isinstance(first, int) or layer < first


def _moe_layers(is_moe: Callable[[Config, int], bool]) -> Callable[[Config], Derived]:
    """Which layers are MoE, as first_k_dense_replace and moe_layer_freq."""

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


def _qwen_moe(config: Config, layer: int) -> bool:
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    is_dense = isinstance(dense, list) and layer in dense
    return isinstance(step, int) and step > 0 and (layer + 1) % step == 0 and not is_dense


def _deepseek_moe(config: Config, layer: int) -> bool:
    first, freq = config.get("first_k_dense_replace"), config.get("moe_layer_freq", 1)
    return isinstance(first, int) and isinstance(freq, int) and freq > 0 and layer >= first and layer % freq == 0


def _ernie_moe(config: Config, layer: int) -> bool:
    first, last, step = (config.get(f"moe_layer_{key}") for key in ("start_index", "end_index", "interval"))
    if not (isinstance(first, int) and isinstance(last, int) and isinstance(step, int) and step > 0):
        return False
    return first <= layer and (last < 0 or layer <= last) and (layer + 1) % step == 0


def _times(count: Any, size: Any) -> Any:
    """Their product; what is no integer is left for ModelSpec to complain of."""
    return count * size if isinstance(count, int) and isinstance(size, int) else size


def _shared_experts(count: str) -> Callable[[Config], Derived]:
    """Shared experts are one MLP as wide as all of them, whose number stands under `count`."""

    def derive(config: Config) -> Derived:
        width = _times(config.get(count) or 0, config.get("moe_intermediate_size"))
        return {"shared_expert_intermediate_size": width}

    return derive


def _latent_heads(config: Config) -> Derived:
    """Heads are as wide as their values."""
    return {"head_dim": config.get("v_head_dim")}


def _opt_sizes(config: Config) -> Derived:
    """Positions count from 2."""
    if config.get("do_layer_norm_before") is False:
        raise InexpressibleError("do_layer_norm_before: norms after attention and MLP alone")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise InexpressibleError("word_embed_proj_dim: a projection between embedding and layers")
    positions = config.get("max_position_embeddings")
    rows = positions + 2 if isinstance(positions, int) else positions
    return {"max_position_embeddings": rows, **_activation({"hidden_act": config.get("activation_function")})}


def _stablelm_norms(config: Config) -> Derived:
    if config.get("qk_layernorm"):
        raise InexpressibleError("qk_layernorm: a norm of its own for each head")
    return {"attention_bias": "qkv" if config.get("use_qkv_bias") else "none"}


def _gpt2_sizes(config: Config) -> Derived:
    """The MLP is four times as wide as the model unless n_inner says otherwise."""
    inner = config.get("n_inner")
    width = _times(4, config.get("n_embd")) if inner is None else inner
    return {"intermediate_size": width, **_activation({"hidden_act": config.get("activation_function")})}


def _keys(*same: str, **other: str | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    named = {ours: (theirs,) if isinstance(theirs, str) else theirs for ours, theirs in other.items()}
    return {key: (key,) for key in same} | named


_BLOCK = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "tie_word_embeddings", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
_DENSE = _keys(*_BLOCK, "intermediate_size")
_MOE = _keys("num_experts_per_tok", "moe_intermediate_size", num_experts=("num_experts", "num_local_experts"))
_MLA = _keys("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK = {key: name for key, name in _DENSE.items() if key != "head_dim"} | _MLA | _MOE
_DEEPSEEK |= _keys("num_nextn_predict_layers", num_experts=("n_routed_experts", "num_local_experts"))
_ROTARY = {"position_embedding": "rope"}
_GEMMA = {"post_norms": True, **_ROTARY}
_LAYERNORM = {"gated_mlp": False, "norm": "layernorm", "norm_bias": True}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int | None, vocab: int, **other: Any) -> dict[str, Any]:
    """Defaults of the keys that nearly every architecture has."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": False, "hidden_act": "silu", **other,
    }  # fmt: skip


_DEEPSEEK_RANKS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "intermediate_size": 9216, "head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip
_SHARED = _shared_experts("n_shared_experts")
_ERNIE_DEFAULTS = {"rope_theta": 5e5, "use_bias": False, "tie_word_embeddings": True}
_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_LLAMA = Architecture(
    keys=_DENSE | _keys("mlp_bias"),
    defaults=_sizes(32, 4096, 32, None, 32000, intermediate_size=11008),
    derive=(_activation, _attention_bias),
    fixed=_ROTARY,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, sliding_window=4096),
        derive=(_activation, _window(_never)),
        fixed=_ROTARY,
    ),
    "mixtral": Architecture(
        keys=_keys(*_BLOCK) | _MOE | _keys(moe_intermediate_size="intermediate_size"),
        defaults=_sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2),
        derive=(_activation, _window(_never)),
        fixed=_ROTARY,
    ),
    "qwen2": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 32, 151936, intermediate_size=22016, **_QWEN_WINDOW),
        derive=(_activation, _qkv_bias, _window(_qwen_full)),
        fixed=_ROTARY,
    ),
    "qwen2_moe": Architecture(
        keys=_DENSE | _MOE | _keys("shared_expert_intermediate_size"),
        defaults=_sizes(24, 2048, 16, 16, 151936, intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
                        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1,
                        **_QWEN_WINDOW),
        derive=(_activation, _qkv_bias, _window(_qwen_full), _moe_layers(_qwen_moe)),
        fixed={"shared_expert_gate": True, **_ROTARY},
    ),
    "qwen3": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 32, 151936, intermediate_size=22016, head_dim=128, **_QWEN_WINDOW),
        derive=(_activation, _attention_bias, _window(_qwen_full)),
        fixed={"qk_norm": True, **_ROTARY},
    ),
    "qwen3_moe": Architecture(
        keys=_DENSE | _MOE,
        defaults=_sizes(24, 2048, 32, 4, 151936, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
                        moe_intermediate_size=768, decoder_sparse_step=1, **_QWEN_WINDOW),
        derive=(_activation, _attention_bias, _window(_qwen_full), _moe_layers(_qwen_moe)),
        fixed={"qk_norm": True, **_ROTARY},
    ),
    "deepseek_v2": Architecture(
        keys=_DEEPSEEK,
        defaults=_sizes(32, 4096, 32, None, 102400, intermediate_size=11008, moe_intermediate_size=1407,
                        n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=0, **_DEEPSEEK_RANKS),
        derive=(_activation, _attention_bias, _SHARED, _latent_heads, _moe_layers(_deepseek_moe)),
        fixed=_ROTARY,
    ),
    "deepseek_v3": Architecture(
        keys=_DEEPSEEK,
        defaults=_sizes(61, 7168, 128, None, 129280, intermediate_size=18432, moe_intermediate_size=2048,
                        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
                        **_DEEPSEEK_RANKS),
        derive=(_activation, _attention_bias, _SHARED, _latent_heads, _moe_layers(_deepseek_moe)),
        fixed={"router_bias": True, **_ROTARY},
    ),
    "gpt2": Architecture(
        keys=_keys("vocab_size", "tie_word_embeddings", num_hidden_layers="n_layer", hidden_size="n_embd",
                   num_attention_heads="n_head", max_position_embeddings="n_positions"),
        defaults={"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
                  "activation_function": "gelu_new", "tie_word_embeddings": True},
        derive=(_gpt2_sizes,),
        fixed={"bias": True, "position_embedding": "learned", **_LAYERNORM},
    ),
    "gpt_neox": Architecture(
        keys=_keys("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
                   "tie_word_embeddings", rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
        defaults=_sizes(44, 6144, 64, None, 50432, intermediate_size=24576, hidden_act="gelu", attention_bias=True,
                        rotary_pct=0.25),
        derive=(_activation, _attention_bias),
        fixed={"bias": True, **_LAYERNORM, **_ROTARY},
    ),
    "gpt_oss": Architecture(
        keys=_keys(*_BLOCK, num_experts=("num_local_experts", "num_experts"), moe_intermediate_size="intermediate_size",
                   num_experts_per_tok=("num_experts_per_tok", "experts_per_token")),
        defaults=_sizes(36, 2880, 64, 8, 201088, intermediate_size=2880, head_dim=64, num_local_experts=128,
                        num_experts_per_tok=4, sliding_window=128, attention_bias=True),
        derive=(_activation, _attention_bias, _window(_every("sliding_window_pattern", 2))),
        fixed={"mlp_bias": True, "router_bias": True, "attention_sinks": True, **_ROTARY},
    ),
    "gemma2": Architecture(
        keys=_DENSE,
        defaults=_sizes(26, 2304, 8, 4, 256000, **_GEMMA_DEFAULTS),
        derive=(_activation, _attention_bias, _window(_every("sliding_window_pattern", 2))),
        fixed=_GEMMA,
    ),
    "gemma3_text": Architecture(
        keys=_DENSE,
        defaults=_sizes(26, 2304, 8, 4, 262208, rope_theta=1e6, **_GEMMA_DEFAULTS),
        derive=(_activation, _attention_bias, _window(_every("sliding_window_pattern", 6))),
        fixed={"qk_norm": True, **_GEMMA},
    ),
    "phi3": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 3072, 32, None, 32064, intermediate_size=8192),
        derive=(_activation, _window(_never)),
        fixed=_ROTARY,
    ),
    "nemotron": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(32, 6144, 48, None, 256000, intermediate_size=24576, hidden_act="relu2", mlp_bias=False,
                        partial_rotary_factor=0.5),
        derive=(_activation, _attention_bias),
        fixed={**_LAYERNORM, **_ROTARY},
    ),
    "gemma": Architecture(
        keys=_DENSE,
        defaults=_sizes(28, 3072, 16, 16, 256000, intermediate_size=24576, head_dim=256, tie_word_embeddings=True,
                        hidden_act="gelu_pytorch_tanh"),
        derive=(_activation, _attention_bias),
        fixed=_ROTARY,
    ),
    "glm4": Architecture(
        keys=_DENSE,
        defaults=_sizes(40, 4096, 32, 2, 151552, intermediate_size=13696, head_dim=128, attention_bias=True,
                        partial_rotary_factor=0.5),
        derive=(_activation, _no_output_bias),
        fixed={"post_norms": True, **_ROTARY},
    ),
    "glm4_moe": Architecture(
        keys=_DENSE | _MOE | _keys("num_nextn_predict_layers", "first_k_dense_replace", num_experts="n_routed_experts",
                                   qk_norm="use_qk_norm"),
        defaults=_sizes(46, 4096, 96, 8, 151552, intermediate_size=10944, moe_intermediate_size=1408,
                        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1,
                        num_nextn_predict_layers=1, use_qk_norm=False, partial_rotary_factor=0.5),
        derive=(_activation, _no_output_bias, _whole_heads, _SHARED),
        fixed={"router_bias": True, **_ROTARY},
    ),
    "seed_oss": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(64, 4096, 80, 8, 155136, intermediate_size=27648, head_dim=128, attention_bias=True),
        derive=(_activation, _no_output_bias),
        fixed=_ROTARY,
    ),
    "ernie4_5": Architecture(
        keys=_DENSE | _keys(bias="use_bias"),
        defaults=_sizes(18, 1024, 16, 2, 103424, intermediate_size=3072, head_dim=128) | _ERNIE_DEFAULTS,
        derive=(_activation,),
        fixed={"norm_bias": False, **_ROTARY},
    ),
    "ernie4_5_moe": Architecture(
        keys=_DENSE | _keys("moe_intermediate_size", bias="use_bias", num_experts="moe_num_experts",
                            num_experts_per_tok="moe_k"),
        defaults=_sizes(28, 2560, 20, 4, 103424, intermediate_size=12288, moe_intermediate_size=1536, moe_k=6,
                        moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
                        moe_layer_interval=1) | _ERNIE_DEFAULTS,
        derive=(_activation, _shared_experts("moe_num_shared_experts"), _moe_layers(_ernie_moe)),
        fixed={"router_bias": True, "norm_bias": False, **_ROTARY},
    ),
    "smollm3": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(36, 2048, 16, 4, 128256, intermediate_size=11008, tie_word_embeddings=True, rope_theta=2e6,
                        use_sliding_window=False),
        derive=(_activation, _attention_bias, _window(_qwen_full)),
        fixed=_ROTARY,
    ),
    "granite": _LLAMA,
    "granitemoe": Architecture(
        keys=_keys(*_BLOCK) | _MOE | _keys(moe_intermediate_size="intermediate_size"),
        defaults=_sizes(32, 4096, 32, None, 32000, intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2),
        derive=(_activation, _attention_bias),
        fixed=_ROTARY,
    ),
    "exaone4": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 4096, 32, 32, 102400, intermediate_size=16384, sliding_window=4096),
        derive=(_activation, _window(_every("sliding_window_pattern", 4))),
        fixed={"qk_norm": True, **_ROTARY},
    ),
    "arcee": Architecture(
        keys=_DENSE | _keys("mlp_bias"),
        defaults=_sizes(32, 2560, 32, None, 32000, intermediate_size=18432, hidden_act="relu2"),
        derive=(_activation, _attention_bias),
        fixed={"gated_mlp": False, **_ROTARY},
    ),
    "starcoder2": Architecture(
        keys=_DENSE | _keys(bias="use_bias"),
        defaults=_sizes(30, 3072, 24, 2, 49152, intermediate_size=12288, hidden_act="gelu_pytorch_tanh", use_bias=True,
                        tie_word_embeddings=True),
        derive=(_activation, _window(_never)),
        fixed={**_LAYERNORM, **_ROTARY},
    ),
    "stablelm": Architecture(
        keys=_DENSE,
        defaults=_sizes(32, 2560, 32, 32, 50304, intermediate_size=6912, partial_rotary_factor=0.25),
        derive=(_activation, _stablelm_norms),
        fixed={**_LAYERNORM, "gated_mlp": True, **_ROTARY},
    ),
    "opt": Architecture(
        keys=_keys("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings",
                   intermediate_size="ffn_dim", bias="enable_bias"),
        defaults={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50272,
                  "ffn_dim": 3072, "max_position_embeddings": 2048, "activation_function": "relu", "enable_bias": True,
                  "tie_word_embeddings": True},
        derive=(_opt_sizes,),
        fixed={"position_embedding": "learned", **_LAYERNORM},
    ),
}  # fmt: skip
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Models that call a known architecture by their own name."""
WRAPPERS = {
    "gemma3": "gemma3_text", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
}  # fmt: skip
"""Multimodal configs whose language model stands under text_config."""
