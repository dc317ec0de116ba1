"""Sections of a ModelSpec that hybrid architectures fill: state-space mixers, linear attention, indexers, heads.

The vision tower of a multimodal config is one too: `vision_config`, by the table in vision.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

from planner.specs.architectures import layer_lists as lists
from planner.specs.architectures.derivations import (
    ACTIVATIONS,
    Config,
    Derived,
    InexpressibleError,
    list_in,
    mapping_in,
    num_layers,
    sum_of,
    whole,
)
from planner.specs.reading import load_yaml
from planner.specs.units import is_count


def kimi_delta(config: Config) -> Derived:
    """Kimi delta attention: sizes at the top, or in linear_attn_config as its checkpoints have them."""
    inner = mapping_in(config, "linear_attn_config")
    dim = inner.get("head_dim", config.get("linear_head_dim"))
    heads = inner.get("num_heads", config.get("linear_num_heads"))
    conv = inner.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim"))
    return {
        "linear_attention": {
            "num_key_heads": heads, "num_value_heads": heads, "key_head_dim": dim, "value_head_dim": dim,
            "conv_kernel": conv, "gate_rank": dim, "full_output_gate": bool(inner.get("use_full_rank_gate", False)),
        }
    }  # fmt: skip


def ling_delta(config: Config) -> Derived:
    """Ling 3's Kimi delta attention, its gates full projections unless `no_kda_lora` is off; Ling 2.5's lightning."""
    heads, width = whole(config, "num_attention_heads"), whole(config, "head_dim", 128)
    if _is_lightning(config):
        sizes = {"key_head_dim": width, "value_head_dim": width, "chunk_size": 256}
    else:
        section = kimi_delta({**config, "linear_head_dim": width})["linear_attention"]
        kernel = whole(config, "short_conv_kernel_size", whole(config, "linear_conv_kernel_dim", 4))
        sizes = section | {"conv_kernel": kernel} | ({"gate_rank": None} if config.get("no_kda_lora", True) else {})
    return {
        "linear_attention": sizes | {"num_key_heads": heads, "num_value_heads": heads},
        "attn_head_gate": not _is_lightning(config),
    }


def _is_lightning(config: Config) -> bool:
    """Ling's linear layers are lightning attention: without latent attention, or where they have no convolution."""
    grouped = config.get("group_norm_size") and not config.get("short_conv_kernel_size")
    return bool(grouped or not config.get("kv_lora_rank"))


def ling_layers(config: Config) -> Derived:
    """Ling's groups of layers, the last of each with full attention, as are those that fill no group."""
    linear = "lightning" if _is_lightning(config) else "kimi_delta"
    types = lists.listed(config, {"full_attention": "full", "linear_attention": linear})
    size, layers = max(whole(config, "layer_group_size"), 1), num_layers(config)
    rest = layers // size * size
    kinds = types or ["full" if (i + 1) % size == 0 or i >= rest else linear for i in range(layers)]
    return _with_norms(kinds, bool(config.get("use_qk_norm")) * 2 * whole(config, "head_dim", 0))


def _with_norms(kinds: list[str], num_weights: int) -> Derived:
    """Layers of which those with lightning attention norm queries and keys by `num_weights` weights."""
    sizes = tuple({"vector_parameters": num_weights} if kind == "lightning" and num_weights else {} for kind in kinds)
    return {"layer_types": lists.shortest(kinds), "layer_sizes": sizes if any(sizes) else None}


def sala(config: Config) -> Derived:
    """MiniCPM-SALA: listed layers of lightning attention among those of gated grouped attention."""
    names = {"minicpm4": "full"} | dict.fromkeys(("lightning", "lightning-attn", "lightning_attn"), "lightning")
    width = whole(config, "lightning_head_dim", 128)
    other = {"use_output_gate": True, "use_output_norm": True, "lightning_nkv": config.get("lightning_nh")}
    for key, value in other.items():
        if config.get(key, value) != value:
            raise InexpressibleError(f"{key}: lightning attention is read with {value} alone, not {config[key]!r:.60}")
    normed = _with_norms(lists.listed(config, names, "mixer_types") or [], bool(config.get("qk_norm")) * 2 * width)
    return normed | {"position_embedding": "rope" if config.get("attn_use_rope", True) else "none"}


def glm5_next(config: Config) -> Derived:
    """GLM-5 Next: Kimi delta attention but on every fourth layer, whose indexer scores pooled keys."""
    mixer = lists.mixers("kimi_delta", lists.every("full_attention_interval", 4))(config)
    kinds = ["indexed" if kind == "full" else kind for kind in mixer["layer_types"]]
    pooled = whole(config, "index_head_dim") * (whole(config, "index_kpool") + whole(config, "hidden_size"))
    sizes = [{"vector_parameters": pooled} if kind == "indexed" else {} for kind in kinds]
    return {"layer_types": tuple(kinds), "layer_sizes": tuple(sizes)}


def qwen4(config: Config) -> Derived:
    """Qwen4: full attention is to chosen keys; listed layers, from 1 on, add embeddings of n-grams."""
    found = lists.mixers("gated_delta", lists.every("full_attention_interval", 4))(config)
    fields: Derived = {}
    if config.get("indexer_n_heads") is not None:
        names = {
            "index_n_heads": "n_heads",
            "index_head_dim": "head_dim",
            "index_topk": "budget",
            "tokens_per_key": "compress_ratio",
        }
        fields["indexer"] = {name: whole(config, f"indexer_{key}") for name, key in names.items()} | {
            "weighs_heads": False
        }
        fields["layer_types"] = tuple("indexed" if kind == "full" else kind for kind in found["layer_types"])
    layers = sorted({each for each in list_in(config, "ple_layer_ids") if isinstance(each, int)})
    if not layers:
        return fields
    hidden, heads = whole(config, "hidden_size"), (whole(config, "ngram_size") - 1) * whole(config, "heads_per_ngram")
    size, streams = whole(config, "ple_embed_dim", hidden), whole(config, "hc_count") * hidden
    first, multiple = whole(config, "ngram_vocab_size_base"), whole(config, "make_ngram_vocab_size_divisible_by")
    if not (0 < heads * len(layers) <= 1000 and 0 < first <= 10**9 and size % heads == 0 and multiple > 0):
        raise InexpressibleError(
            f"ple_layer_ids, heads_per_ngram, ngram_vocab_size_base: {len(layers)}, {heads}, {first}"
        )
    primes = (number for number in count(first) if all(number % each for each in range(2, math.isqrt(number) + 1)))
    own = {}
    for layer in layers:
        rows = -(-sum(islice(primes, heads)) // multiple) * multiple
        own[layer] = {
            "ngram_size": size,
            "ngram_parameters": rows * (size // heads),
            "vector_parameters": streams * whole(config, "ple_conv_kernel_size"),
        }
    return fields | {"layer_sizes": tuple(own.get(layer + 1, {}) for layer in range(num_layers(config)))}


def dots3(config: Config) -> Derived:
    """Dots 3: latent attention of other sizes on sliding layers; the others, and the first two, choose keys."""
    names = {"sliding_attention": "sliding", "indexed_attention": "indexed", "full_attention": "indexed"}
    kinds = lists.listed(config, names)
    if kinds is None:
        kinds = ["indexed" if layer == 0 or layer % 4 == 1 else "sliding" for layer in range(num_layers(config))]
    stated = {int(layer): own for layer, own in mapping_in(config, "per_layer_config").items() if is_count(layer)}
    own: Config = next(
        (stated[i] for i, kind in enumerate(kinds) if kind == "sliding" and isinstance(stated.get(i), dict)), {}
    )
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = {name: whole(own, name, whole(config, f"swa_{name}")) for name in sizes}
    heads = whole(own, "num_attention_heads", whole(config, "swa_num_attention_heads"))
    return {
        "layer_types": lists.shortest(kinds),
        "sliding_heads": {"num_attention_heads": heads, "num_key_value_heads": heads, "mla": latent},
    }


_COMPRESSED = {
    "sliding_attention": "sliding", "compressed_sparse_attention": "compressed_sparse",
    "heavily_compressed_attention": "heavily_compressed",
}  # fmt: skip
"""Names of transformers for DeepSeek-V4's layers."""


def compressed_attention(config: Config) -> Derived:
    """DeepSeek-V4's attention: kinds of layers by name, or by the tokens of a compressed key (0 for none)."""
    named = mapping_in(config, "compress_rates")
    sparse = whole({**named, **config}, "compress_rate_csa", named.get("compressed_sparse_attention", 4))
    heavy = whole({**named, **config}, "compress_rate_hca", named.get("heavily_compressed_attention", 128))
    layers, stated = num_layers(config), config.get("compress_ratios")
    kinds = lists.listed(config, _COMPRESSED)
    if kinds is None and isinstance(stated, list):
        by_rate = {0: "sliding", 1: "sliding", sparse: "compressed_sparse", heavy: "heavily_compressed"}
        if len(stated) < layers or any(rate not in by_rate for rate in stated):
            raise InexpressibleError(f"compress_ratios: {stated!r:.60}, expected 0, {sparse} or {heavy} for each layer")
        kinds = [by_rate[rate] for rate in stated[:layers]]
    if kinds is None:
        kinds = ["compressed_sparse" if i > 1 and i % 2 else "heavily_compressed" for i in range(layers)]
    rotated = config.get("partial_rotary_factor") or whole(config, "qk_rope_head_dim") / whole(config, "head_dim")
    return {
        "layer_types": lists.shortest(kinds), "partial_rotary_factor": rotated, "mlp_layer_types": ("moe",),
        "compressed_attention": {
            "q_lora_rank": whole(config, "q_lora_rank"), "o_groups": whole(config, "o_groups"),
            "o_lora_rank": whole(config, "o_lora_rank"), "sparse_rate": sparse, "heavy_rate": heavy,
        },
    }  # fmt: skip


def shared_compression(config: Config) -> Derived:
    """DeepSeek-V4.1: listed layers compress keys and choose among them for those behind; some add n-grams."""
    layers = num_layers(config)
    rates, makers, choosers, adders, rows = (
        stated if all(type(one) is int for one in stated) else []
        for stated in (
            list_in(config, key)
            for key in (
                "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids",
                "engram_num_embeddings",
            )
        )
    )  # fmt: skip
    if len(rates) < layers or min(rates, default=0) < 0 or len(rows) < len(adders):
        raise InexpressibleError(f"compress_ratios, engram_num_embeddings: {rates!r:.60}, {rows!r:.60}")
    names = ("engram_max_ngram_size", "engram_n_heads", "engram_head_dim")
    orders, heads, width = (max(whole(config, name), 1) for name in names)
    sizes = list[Derived]()
    for layer, rate in enumerate(rates[:layers]):
        own: Derived = {"makes_keys": layer in makers, "chooses_keys": layer in choosers, "compress_rate": rate}
        sizes.append(own if rate else {})
        if layer in adders:
            table = rows[adders.index(layer)] * width
            sizes[-1] |= {"ngram_size": (orders - 1) * heads * width, "ngram_parameters": table}
    has_candidates = whole(config, "candidate_source_layer_id") >= 0
    blocks = whole(config, "candidate_topk_blocks") * whole(config, "candidate_block_size")
    return {
        "layer_types": lists.shortest(["shared_compressed" if rate else "sliding" for rate in rates[:layers]]),
        "layer_sizes": tuple(sizes),
        "partial_rotary_factor": whole(config, "qk_rope_head_dim") / max(whole(config, "head_dim"), 1),
        "compressed_attention": {
            "q_lora_rank": whole(config, "q_lora_rank"), "o_groups": whole(config, "o_groups"), "norms_queries": False,
            "o_lora_rank": whole(config, "o_lora_rank"), "candidates": blocks if has_candidates else None,
        },
    }  # fmt: skip


_MINIMAX_M3_OLD = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
}  # fmt: skip
"""Names of checkpoints before transformers had the model."""


def minimax_m3(config: Config) -> Derived:
    """MiniMax-M3's sparse layers attend to chosen blocks of keys, which heads without weights of their own score."""
    stated = mapping_in(config, "sparse_attention_config")
    kinds = lists.listed(config, {"full_attention": "full", "minimax_m3_sparse": "indexed"})
    if kinds is None:
        chosen = lists.marked("sparse_attention_freq", 1, lists.never)
        sizes = {**stated, "num_hidden_layers": config.get("num_hidden_layers")}
        kinds = ["indexed" if chosen(sizes, layer) else "full" for layer in range(num_layers(config))]
    fields: Derived = {
        # a checkpoint's config says `swigluoai`, whose gate is clamped and passed through a sigmoid
        "activation": "silu", "layer_types": lists.shortest(kinds),
        "partial_rotary_factor": whole(config, "rotary_dim") / whole(config, "head_dim"),
    }  # fmt: skip
    if "indexed" not in kinds:
        return fields
    sizes = {name: whole(stated, old, whole(config, name)) for name, old in _MINIMAX_M3_OLD.items()}
    keys = sizes.pop("index_topk_blocks") * sizes.pop("index_block_size")
    return fields | {"indexer": {**sizes, "index_topk": keys, "weighs_heads": False}}


def gemma4_heads(config: Config) -> Derived:
    """Gemma 4: wide heads on layers of full attention, whose values may be their keys; experts beside the MLP."""
    width, full = whole(config, "head_dim"), whole(config, "global_head_dim", 512)
    kv_heads, k_eq_v = config.get("num_key_value_heads"), bool(config.get("attention_k_eq_v", False))
    global_kv = (config.get("num_global_key_value_heads") if k_eq_v else None) or kv_heads
    overrides = config.get("per_layer_config")
    if isinstance(overrides, dict) and overrides:
        first = next(iter(overrides.values()))
        full, global_kv = first.get("head_dim", full), first.get("num_key_value_heads", global_kv)
    sliding = {"head_dim": width, "num_key_value_heads": kv_heads, "values_are_keys": False}
    fields: Derived = {
        "head_dim": full, "num_key_value_heads": global_kv, "values_are_keys": k_eq_v, "sliding_heads": sliding,
        "per_layer_input_size": config.get("hidden_size_per_layer_input") or None,
        "per_layer_vocab_size": config.get("vocab_size_per_layer_input"),
    }  # fmt: skip
    layers = num_layers(config)
    shared = min(whole(config, "num_kv_shared_layers", 0), layers)
    if shared > 0:
        is_wide = bool(config.get("use_double_wide_mlp"))
        wide = {"intermediate_size": 2 * whole(config, "intermediate_size")} if is_wide else {}
        fields["layer_sizes"] = ({},) * (layers - shared) + ({"shares_keys": True, **wide},) * shared
    if config.get("enable_moe_block"):
        return fields | {
            "num_experts": config.get("num_experts"), "num_experts_per_tok": config.get("top_k_experts"),
            "moe_intermediate_size": config.get("moe_intermediate_size"), "expert_norms": True,
            "shared_expert_intermediate_size": config.get("intermediate_size"),
        }  # fmt: skip
    return fields


def gemma3n(config: Config) -> Derived:
    """Gemma 3n: widths listed by layer, and last layers that take the keys of others."""
    listed, layers = config.get("intermediate_size"), num_layers(config)
    widths = listed if isinstance(listed, list) and listed else [listed]
    first = layers - whole(config, "num_kv_shared_layers", 15)
    own = [{"intermediate_size": widths[layer % len(widths)]} | ({"shares_keys": True} if layer >= first else {})
           for layer in range(layers)]  # fmt: skip
    return {"intermediate_size": widths[0], "layer_sizes": tuple(own)}


def mistral_large4(config: Config) -> Derived:
    """Mistral Large 4: every fourth layer has keys without positions, which are as wide."""
    names = ("kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
    latent = {name: whole(config, name) for name in names}
    latent["qk_nope_head_dim"] += latent.pop("qk_rope_head_dim")
    plain = {"mla": latent | {"qk_rope_head_dim": 0}}
    stated, every = config.get("no_rope_layers"), max(whole(config, "no_rope_layer_interval", 4), 1)
    turns = stated if isinstance(stated, list) and stated else [i % every for i in range(1, every + 1)]
    return {"layer_sizes": tuple({} if turns[i % len(turns)] else plain for i in range(num_layers(config)))}


def xlstm(config: Config) -> Derived:
    """xLSTM's matrix memory as linear attention, with gates of a number a head, which count as vectors."""
    hidden, heads = whole(config, "hidden_size"), max(whole(config, "num_heads"), 1)
    factors = [config.get(key) for key in ("qk_dim_factor", "v_dim_factor", "ffn_proj_factor")]
    if not all(isinstance(one, int | float) and 0 < one < 1000 for one in factors):
        raise InexpressibleError(f"qk_dim_factor, v_dim_factor, ffn_proj_factor: {factors!r:.60}, expected numbers")
    keys, values, wide = (int(one * hidden) for one in factors)  # type: ignore[operator]
    block = max(whole(config, "ffn_round_up_to_multiple_of"), 1)
    return {
        "num_attention_heads": heads, "head_dim": values // heads, "intermediate_size": -(-wide // block) * block,
        "linear_attention": {
            "num_key_heads": heads, "num_value_heads": heads, "key_head_dim": keys // heads,
            "value_head_dim": values // heads, "chunk_size": whole(config, "chunk_size"),
        },
    }  # fmt: skip


def zamba_adapters(config: Config) -> Derived:
    """Zamba 2's adapters of shared blocks: those of the MLP always, those of attention where it says so."""
    rank = whole(config, "adapter_rank")
    return {"block_adapter_ranks": (rank if config.get("use_shared_attention_adapter") else 0, rank)}


def nas_blocks(config: Config) -> Derived:
    """Nemotron-NAS: each block's attention and MLP have sizes of their own, are one matrix, or are left out.

    A block without both does nothing, and is no layer here.
    """
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    kinds = list[tuple[str, str, Derived]]()
    blocks = list_in(config, "block_configs")
    if (layers := whole(config, "num_hidden_layers", len(blocks))) != len(blocks):
        raise InexpressibleError(f"block_configs: {len(blocks)} entries for {layers} layers")
    for block in blocks:
        attention, mlp = (mapping_in(block, key) if isinstance(block, dict) else {} for key in ("attention", "ffn"))
        mixer, kind = (
            "none" if half.get("no_op") else "linear" if half.get("replace_with_linear") else ""
            for half in (attention, mlp)
        )
        sizes: Derived = {}
        if not mixer:
            sizes["num_key_value_heads"] = heads // max(whole(attention, "n_heads_in_group"), 1)
        if not kind:
            multiple = mlp.get("ffn_mult")
            if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < 10**6:
                raise InexpressibleError(f"block_configs: ffn_mult: {multiple!r:.60}, expected a number")
            sizes["intermediate_size"] = -(-int(2 * multiple * hidden / 3) // 256) * 256
        kinds.append((mixer or "full", kind or "dense", sizes))
    present = [kind for kind in kinds if kind[:2] != ("none", "none")]
    if not present:
        raise InexpressibleError(f"block_configs: {str(config.get('block_configs'))[:60]}, expected a list of blocks")
    return {
        "num_hidden_layers": len(present), "layer_types": lists.shortest([mixer for mixer, _, _ in present]),
        "mlp_layer_types": lists.shortest([mlp for _, mlp, _ in present]),
        "layer_sizes": tuple(sizes for _, _, sizes in present),
    }  # fmt: skip


def step_layers(config: Config) -> Derived:
    """Step-3.5: sliding layers with more heads, lists of layers that go on for prediction blocks, listed experts."""
    layers = whole(config, "num_hidden_layers")
    given = config.get("attention_other_setting")
    heads = given.get("num_attention_heads") if isinstance(given, dict) else config.get("num_sliding_attention_heads")
    fields: Derived = {"sliding_heads": {"num_attention_heads": heads} if heads is not None else None}
    for key in ("rope_theta", "partial_rotary_factors"):
        stated = config.get(key)
        if isinstance(stated, list) and stated:
            fields["rope_theta" if key == "rope_theta" else "partial_rotary_factor"] = stated[0]
    types = config.get("layer_types")
    if isinstance(types, list) and config.get("sliding_window"):
        short = {**config, "layer_types": types[:layers]}
        fields |= lists.window(lists.never)(short)
    listed = config.get("moe_layers_enum")
    if isinstance(listed, str):
        listed = [int(item) for item in listed.split(",") if is_count(item.strip())]
    has_experts = listed if isinstance(listed, list) else range(whole(config, "first_k_dense_replace", 3), layers)
    return fields | lists.moe_layers(lambda _, layer: layer in has_experts)({"num_hidden_layers": layers})


def granite_mlp(config: Config) -> Derived:
    """Granite 4's shared MLP: the whole MLP where there are no experts."""
    shared = config.get("shared_intermediate_size") or 0
    if not config.get("num_local_experts"):
        return {"intermediate_size": shared, "moe": None}
    return {
        "num_experts": config.get("num_local_experts"), "num_experts_per_tok": config.get("num_experts_per_tok"),
        "moe_intermediate_size": config.get("intermediate_size"), "shared_expert_intermediate_size": shared,
    }  # fmt: skip


def nemotron_experts(config: Config) -> Derived:
    """Nemotron 3's experts; none in Nemotron-H, whose layers have no E."""
    if "E" not in str(config.get("hybrid_override_pattern") or "E"):
        return {}
    if not config.get("n_routed_experts"):
        return {}
    return {
        "num_experts": config.get("n_routed_experts"), "num_experts_per_tok": config.get("num_experts_per_tok"),
        "moe_intermediate_size": config.get("moe_intermediate_size"), "latent_size": config.get("moe_latent_size"),
        "shared_expert_intermediate_size":
            whole(config, "moe_shared_expert_intermediate_size", 0),
        "router_bias": True,
    }  # fmt: skip


def lfm2_mlp(config: Config) -> Derived:
    """LFM2's MLP: two thirds of the stated width, rounded up to whole blocks, unless it is adjusted already."""
    stated = config.get("block_ff_dim") or config.get("intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True) or isinstance(stated, bool) or not isinstance(stated, int):
        return {"intermediate_size": stated}
    factor, block = config.get("block_ffn_dim_multiplier"), whole(config, "block_multiple_of", 256)
    width = int(2 * stated / 3)
    if isinstance(factor, int | float) and math.isfinite(factor):
        width = int(factor * width)
    return {"intermediate_size": -(-width // max(block, 1)) * block}


def laguna(config: Config) -> Derived:
    """Laguna: gates of heads, or of every feature, and heads that differ between full and sliding layers."""
    gates = "attn_output_gate" if config.get("gating") == "per-element" else "attn_head_gate"
    fields: Derived = {gates: bool(config.get("gating", True))}
    heads, kinds = config.get("num_attention_heads_per_layer"), lists.listed(config, lists.ATTENTIONS)
    if not isinstance(heads, list) or len(heads) != num_layers(config):
        return fields
    of = {kind: {n for n, one in zip(heads, kinds or ["full"] * len(heads), strict=True) if one == kind}
          for kind in ("full", "sliding")}  # fmt: skip
    if any(len(found) > 1 for found in of.values()) or not all(is_count(str(n)) for n in heads):
        raise InexpressibleError(f"num_attention_heads_per_layer: {heads!r:.60}: heads of one kind of layer differ")
    fields["num_attention_heads"] = next(iter(of["full"] or of["sliding"]))
    return fields | ({"sliding_heads": {"num_attention_heads": next(iter(of["sliding"]))}} if of["sliding"] else {})


_TABLE = Path(__file__).parent / "vision.yaml"
_NORMS = {"rms_norm": "rmsnorm", "layer_norm": "layernorm"}
_MOST, _MOST_LAYERS = 10**9, 1000
"""The largest size that is believed, and the largest number of layers or projectors."""
_SIDE = 896
"""Pixels along the side of an image, where a tower sees images as large as they are."""
_PATCHES = 8192
"""The largest number of patches along an image's side that is believed."""


@cache
def _vision_table() -> dict[str, Any]:
    return load_yaml(_TABLE)


def _vision_row(part: str, name: str) -> dict[str, Any]:
    """A row of the table, with what it takes over from another."""
    row: dict[str, Any] = _vision_table()[part].get(name, {})
    like = _vision_row(part, row["like"]) if "like" in row else {}
    return {**like, **row, "defaults": like.get("defaults", {}) | row.get("defaults", {})}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a tower by short names, or by the keys of its config."""

    vision: Config
    config: Config
    row: Mapping[str, Any]
    text_hidden: int

    def __getitem__(self, name: str) -> int:
        if name == "t":
            return self.text_hidden
        if name == "n":
            return (self["i"] // self["k"]) ** 2
        if name == "q":
            return self["n"] // self["m"] ** 2
        keys = self.row.get("keys", {}).get(name) or _vision_table()["sizes"].get(name, [name])
        # the language model's sizes stand in the whole config under the same keys
        places = (self.vision,) if name in _vision_table()["sizes"] and name != "m" else (self.vision, self.config)
        found = [(key, place[key]) for place in places for key in keys if place.get(key) is not None]
        default = self.row["defaults"].get(name)
        if not found and isinstance(default, str):
            return self.sum_of(default)
        key, value = found[0] if found else (keys[0], default)
        if isinstance(value, (list, tuple)) and value:
            value = len(value) if name == self.row.get("again") else value[0]
        size = int(value) if isinstance(value, bool) else whole({key: value}, key)
        most = _MOST_LAYERS if name in ("l", self.row.get("again")) else _MOST
        if not 0 <= size <= most or (size == 0 and name in "hlaftkmi"):
            raise InexpressibleError(f"vision_config: {key}: {size} is no size")
        if name == "i" and size > _PATCHES * self["k"]:
            raise InexpressibleError(f"vision_config: {key}: {size} is no side of an image")
        return size

    def sum_of(self, text: str | int) -> int:
        """A sum of products of sizes."""
        return sum_of(text, self.__getitem__)


def vision_of(config: Config, text_hidden: int) -> Derived | None:
    """Fields of the VisionSpec of a config's tower; None where there is none, or none that the table knows."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return None
    kind, inner = str(config.get("model_type")), str(vision.get("model_type") or "")
    kind = kind.removesuffix("_thinker")
    same, between = _vision_table()["same_as"], _vision_table()["between_same_as"].get(kind, kind)
    behind, rows = (
        _vision_row("between", between),
        [_vision_row("encoders", same.get(name, name)) for name in (inner, kind)],
    )
    row = next((one for one in rows if "patch" in one and ("projector" in one or "projector" in behind)), None)
    if row is None:
        return None
    sizes = _Sizes(vision, config, {**row, "defaults": row["defaults"] | behind["defaults"]}, text_hidden)
    projector = [*row.get("projector", ()), *behind.get("projector", ())]
    again = sizes[row["again"]] if "again" in row else 0
    tokens = None if row.get("native") else behind.get("tokens", row.get("tokens"))
    has_merges = "m" in sizes.row["defaults"]
    side = _SIDE // max(sizes["k"] * (sizes["m"] if has_merges else 1), 1)
    image_tokens = max(side**2 if tokens is None else sizes.sum_of(tokens), 1)
    merged = sizes["m"] ** 2 if has_merges else 1 if tokens is None else sizes["n"] // image_tokens
    return {
        "encoder": _encoder(sizes, vision, row),
        "patch_values": sizes.sum_of(row["patch"]),
        "patches_per_token": max(merged, 1),
        "num_extra_patches": row.get("extra", 0),
        "projector": [[*map(sizes.sum_of, each), 1][:3] for each in projector * (1 + again)],
        "other_parameters": sizes.sum_of(row["other"]) + sizes.sum_of(behind.get("other", 0)),
        "image_tokens": image_tokens * behind.get("tiles", row.get("tiles", 1)),
        "tile_tokens": image_tokens if {"tiles"} & {*behind, *row} else None,
        "in_sequence": row.get("in_sequence", True),
    }


def _encoder(sizes: _Sizes, vision: Config, row: Mapping[str, Any]) -> Derived:
    """Fields of the ModelSpec of a tower's layers."""
    fields: Derived = {
        "name": "vision", "vocab_size": 1, "causal": False, "num_hidden_layers": sizes["l"], "hidden_size": sizes["h"],
        "num_attention_heads": sizes["a"], "intermediate_size": sizes["f"], "gated_mlp": False,
        "position_embedding": "none", **row["fields"],
    }  # fmt: skip
    fields |= {key: vision[key] for key in ("head_dim", "num_key_value_heads") if vision.get(key) is not None}
    if vision.get("qkv_hidden_size"):
        fields["head_dim"] = sizes["qkv_hidden_size"] // sizes["a"]
    if isinstance(act := vision.get("hidden_act"), str) and act in ACTIVATIONS:
        fields["activation"] = ACTIVATIONS[act]
    if isinstance(kind := vision.get("norm_type"), str) and kind in _NORMS:
        fields["norm"] = _NORMS[kind]
    if vision.get("use_qk_norm") or vision.get("qk_normalization"):
        fields |= {"qk_norm": True, "qk_norm_over": "hidden"}
    if "biases" in row:
        fields["attention_bias"] = row["biases"][bool(vision.get("attention_bias", vision.get("qkv_bias")))]
    if "windows" in row:
        stated = vision.get("fullatt_block_indexes")
        given = stated if isinstance(stated, (list, tuple)) else row["windows"]
        fields["attention_chunk_size"] = max(sizes["window_size"] // sizes["k"], 1) ** 2
        layers = min(fields["num_hidden_layers"], 1000)
        fields["layer_types"] = ["full" if layer in given else "chunked" for layer in range(layers)]
    return fields
