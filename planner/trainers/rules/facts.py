"""Facts of models and shapes that rules ask for, by the names that rules.yaml calls them by, and exporters too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from planner.shape import RANK_ORDERS, Number, maximum, where
from planner.specs.base import Named, Said, Texts, filled
from planner.specs.model import ModelSpec
from planner.specs.model_parts import SPARSE, MoESpec
from planner.specs.training import GROUPS, TrainingSpec, tokens_split
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SHARDED_STAGES

TORCH_CLASSES: Named = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""torch's name of each schedule that it has a class for."""
BEFORE_018 = ("0.14", "0.15", "0.16", "0.17")
"""Versions of Megatron core before 0.18; no other trainer here has versions."""
PRIMUS_CORE = "0.16"
"""Megatron core of the commit that Primus v26.5 pins (third_party/Megatron-LM at d3528a21)."""
NEW_QUERY_NORM_SINCE = "0.19"
"""`QKNormConfigResolver` gives the projection of queries that are not latent a norm of its own, beside the layer's."""
TUNING_TOKENS = 2**18
"""Tokens of a step up to which a run is likely fine-tuning: Megatron-Bridge's recipes of it have 65k to 262k, those of
pre-training 1M and more."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of Llama 3's scaling that are fixed there (RotaryEmbedding._apply_scaling), and Llama 3's own."""
_YARN_OF_LATENTS = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": True}
"""Numbers of yarn that have no option for latent attention: the defaults of MLATransformerConfig, DeepSeek's."""
_GPT_OSS = {24: 32, 36: 128}
"""Number of experts by number of layers of gpt-oss 20b and 120b, the two sizes that torchtitan's gpt_oss builds."""
_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}  # fmt: skip
"""Its rotary scaling."""


def release(version: str) -> tuple[int, ...]:
    """Major and minor of a version, to compare: 0.9 comes before 0.14."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def listed(items: Iterable[Any]) -> str:
    """Words in a row."""
    return ", ".join(map(str, items))


def isclose(value: float, other: float) -> bool:
    """Alike but for rounding."""
    return math.isclose(value, other, rel_tol=1e-6)


def has_groups(moe: MoESpec) -> bool:
    """True where tokens choose among groups of experts first."""
    return (moe.n_group or 1) > 1


def query_width(model: ModelSpec) -> int:
    """Width of a query head."""
    return model.head_dim if model.mla is None else model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim


def has_usual_scale(model: ModelSpec) -> bool:
    """Attention logits are divided by the root of a query head's width."""
    given = model.attention_multiplier
    return given is None or isclose(given, query_width(model) ** -0.5)


def has_local_base(model: ModelSpec) -> bool:
    """Sliding layers have rotary frequencies of their own."""
    given = model.rope_local_base_freq
    return given is not None and given != model.rope_theta and any(kind.attention == "sliding" for kind in model.kinds)


def rotary_method(model: ModelSpec) -> str | None:
    """How rotary frequencies are stretched; None where they are not, or by a factor of 1."""
    scaling = model.rope_scaling
    if scaling is None or model.position_embedding != "rope" or (scaling.factor == 1 and not scaling.short_factor):
        return None
    return scaling.rope_type


def original_length(model: ModelSpec) -> int:
    """Tokens of the sequences that the model was trained on before its positions were stretched; 0 if nothing says."""
    scaling = model.rope_scaling
    return (scaling.original_max_position_embeddings or 0) if scaling is not None else 0


def every_nth(flags: Sequence[bool]) -> int | None:
    """n where every n-th flag is set and no other; None for any other pattern, and where none is."""
    n = list(flags).index(True) + 1 if True in flags else 0
    return n if n and list(flags) == [(i + 1) % n == 0 for i in range(len(flags))] else None


def has_dense_layers(model: ModelSpec) -> bool:
    """True where any decoder layer has a dense MLP."""
    return any(kind.mlp == "dense" for kind in model.layers)


def expert_width(model: ModelSpec) -> int:
    """Width of a routed expert; 0 where there are none."""
    return 0 if model.moe is None else model.moe.moe_intermediate_size


def shared_expert_width(model: ModelSpec) -> int:
    """Width of the shared experts; 0 where there are none."""
    return 0 if model.moe is None else model.moe.shared_expert_intermediate_size


def kv_heads(model: ModelSpec) -> int:
    """Key-value heads; latent attention expands them to one per query head."""
    return model.num_attention_heads if model.mla is not None else model.num_key_value_heads


def instances(num_ranks: Number, shard_size: Number) -> Number:
    """Copies of the sharded optimizer; never none, for shapes that another rule refuses."""
    return maximum(num_ranks // shard_size, 1)


def isin(value: Number, known: Iterable[int]) -> Any:
    """True where a number is one of those known."""
    return np.isin(value, tuple(known))


def _state_widths(model: ModelSpec) -> dict[str, int]:
    """The numbers of heads or channels of layers with a state that tensor-parallel ranks share evenly, by name."""
    mamba, linear = model.mamba, model.linear_attention
    widths: dict[str, int | None] = {
        "mamba.num_heads": (mamba.num_heads or None) if mamba else None,
        "mamba.intermediate_size": mamba.intermediate_size if mamba and not mamba.num_heads else None,
        "linear_attention.num_key_heads": linear.num_key_heads if linear else None,
        "hidden_size": None if model.short_conv_kernel is None else model.hidden_size,
    }
    own = [("sliding_heads", sizes) for sizes in (model.sliding_heads,) if sizes]
    own += [(f"layer_sizes[{layer}]", sizes) for layer, sizes in enumerate(model.layer_sizes or ())]
    for whose, sizes in own:
        widths[f"{whose}.num_attention_heads"] = sizes.num_attention_heads
        widths[f"{whose}.intermediate_size"] = sizes.intermediate_size
    return filled(widths.items())


def splits_states(model: ModelSpec, tp: Number) -> Any:
    """True where tp splits the states of layers evenly; groups of B and C are split over it, or each copied."""
    groups = 1 if model.mamba is None else model.mamba.n_groups
    whole: Any = (np.asarray(groups) % tp == 0) | (np.asarray(tp) % groups == 0)
    for width in _state_widths(model).values():
        whole = whole & (width % np.asarray(tp) == 0)
    return whole


def unsplit_state(model: ModelSpec, tp: int) -> str:
    """The state of layers that tp does not split."""
    unsplit = (
        f"{name} {width} is no multiple of tp {tp}" for name, width in _state_widths(model).items() if width % tp
    )
    groups = 1 if model.mamba is None else model.mamba.n_groups
    return next(unsplit, f"mamba.n_groups {groups} and tp {tp}: neither is a multiple of the other")


def reads_before(model: ModelSpec) -> bool:
    """Layers read what the first stage has, or keys of a layer further back than the pairs of cross-layer attention."""
    shares = [bool(one.shares_keys or one.makes_keys is False) for one in model.layer_sizes or ()]
    is_looped = model.traced is not None and model.traced.is_looped
    is_looped = is_looped or any(one.shares_weights for one in model.layer_sizes or ())
    return is_looped or model.per_layer_input_size is not None or any(map(all, pairwise(shares)))


def has_sparse_kinds(model: ModelSpec) -> bool:
    """True where a layer's queries choose their keys."""
    return any(kind.attention in SPARSE for kind in model.kinds)


def unplain_kinds(model: ModelSpec) -> str:
    """Kinds of layers that are no plain layer: attention, full, sliding or in chunks, with an MLP behind it."""
    plain = ("full", "sliding", "chunked", "none")
    kinds = dict.fromkeys(kind.attention for kind in model.kinds if kind.attention not in plain)
    return listed(kinds) or ("a mixer or an MLP alone" if any("none" in kind for kind in model.kinds) else "")


HYBRID_LETTERS = {
    ("mamba2", "none"): "M", ("full", "none"): "*", ("none", "dense"): "-", ("none", "moe"): "E",
}  # fmt: skip
"""Megatron core's letter of a hybrid's layer, by its mixer and its MLP, one of which is none."""


def is_hybrid(model: ModelSpec) -> bool:
    """Megatron core builds it as a hybrid: each layer is a mixer or an MLP alone."""
    return all((kind.attention, kind.mlp) in HYBRID_LETTERS for kind in model.kinds)


def uncore_kinds(model: ModelSpec) -> str:
    """Kinds of layers that Megatron core does not build: gated delta nets beside attention, and hybrids, it does."""
    if is_hybrid(model):
        scan = model.mamba
        is_core = scan is None or (scan.conv_kernel, scan.chunk_size, scan.gated_norm) == (4, 128, True)
        return "" if is_core else "mamba2 with another convolution, chunk or gate"
    nets = {"gated_delta"} if {kind.attention for kind in model.kinds} <= {"gated_delta", "full"} else set()
    return ", ".join(kind for kind in unplain_kinds(model).split(", ") if kind not in nets)


def core_yarn_scale(model: ModelSpec) -> float:
    """Yarn's scale of rotated queries and keys as Megatron core computes it: of weights that are not told 1 and 0."""
    scaling = model.rope_scaling
    assert scaling is not None
    growth = 0.1 * math.log(max(scaling.factor or 1.0, 1.0))
    weight = 1.0 if scaling.mscale is None else scaling.mscale
    return (growth * weight + 1) / (growth * (scaling.mscale_all_dim or 0.0) + 1)


def _other_number(model: ModelSpec, method: str, usual: Mapping[str, float], of: str) -> str:
    """The first number of a model's stretched frequencies that is fixed at another value; empty where all are alike."""
    if rotary_method(model) != method:
        return ""
    given = ((name, there, getattr(model.rope_scaling, name)) for name, there in usual.items())
    unlike = (f"{name} of {of.format(there)}, not {it:g}" for name, there, it in given if it not in (None, there))
    return next(unlike, "")


def other_llama3(model: ModelSpec) -> str:
    """A number of llama3's scaling that Megatron core has fixed at another."""
    return _other_number(model, "llama3", _LLAMA3, "llama3 is {:g} there")


def other_yarn(model: ModelSpec) -> str:
    """A number of latent attention's yarn that no option of Megatron-LM says."""
    return _other_number(model, "yarn", _YARN_OF_LATENTS, "yarn is {:g} for latent attention")


def norms_queries_twice(model: ModelSpec, version: str) -> bool:
    """True where a version of Megatron core norms the input of queries once more than the model does."""
    is_older = bool(version) and release(version) < release(NEW_QUERY_NORM_SINCE)
    return model.mla is not None and model.mla.q_lora_rank is None and not is_older


def megatron_activations(model: ModelSpec) -> Texts:
    """The activations that an option asks for; GELU fused with a bias is the tanh's."""
    if model.gated_mlp:
        return ("silu", "quick_gelu")
    return ("gelu", "relu2", "gelu_tanh") if model.has_mlp_bias else ("gelu", "relu2")


Family = Literal["gpt", "mla", "gemma2", "gemma3"]
"""The recipe of Megatron-Bridge that a model starts from; those of Gemma build layers of their own."""


def family_of(model: ModelSpec) -> Family:
    """The recipe whose layers are the model's."""
    if model.mla is not None:
        return "mla"
    if not model.post_norms:
        return "gpt"
    return "gemma2" if model.attn_logit_softcapping is not None else "gemma3"


def is_gemma(model: ModelSpec) -> bool:
    """The recipe is one of Gemma's, which scale the embedding and cap logits."""
    return family_of(model) in ("gemma2", "gemma3")


def is_of_no_recipe(model: ModelSpec) -> bool:
    """True for second norms in layers that no recipe of Gemma has: those are dense, gated, without biases, with four
    norms and an embedding scaled by the root of its width.

    Gemma 3 has norms on queries and keys and every n-th layer without a window, Gemma 2 capped logits of attention and
    of the vocabulary, and a window on every other layer from the first.
    """
    if not is_gemma(model):
        return False
    slides = [kind.attention == "sliding" for kind in model.layers]
    if family_of(model) == "gemma3":
        whole = every_nth([kind.attention == "full" for kind in model.layers]) or 0
        windows = model.sliding_window is not None and whole > 1
    else:
        windows = slides == [i % 2 == 0 for i in range(len(slides))]
    is_third = family_of(model) == "gemma3"
    return not (
        windows
        and model.qk_norm == is_third
        and (model.final_logit_softcapping is None) == is_third
        and model.pre_norms
        and model.gated_mlp
        and model.moe is None
        and model.norm == "rmsnorm"
        and not (model.qkv_bias or model.output_bias or model.has_mlp_bias)
        and math.isclose(model.embedding_multiplier, model.hidden_size**0.5, rel_tol=1e-4)
    )


def is_gpt_oss(model: ModelSpec) -> bool:
    """True for the two models that torchtitan's gpt_oss builds."""
    moe, scaling = model.moe, model.rope_scaling
    if moe is None or scaling is None:
        return False
    given = {name: getattr(scaling, name) for name in _GPT_OSS_YARN}
    return (
        model.attention_sinks
        and _GPT_OSS.get(model.num_hidden_layers) == moe.num_experts
        and (model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (2880, 64, 8)
        and (model.vocab_size, moe.moe_intermediate_size, model.sliding_window) == (201_088, 2880, 128)
        and (model.activation, model.swiglu_limit, model.glu_linear_offset) == ("quick_gelu", 7.0, 1.0)
        and model.rope_theta == 150_000
        and model.norm_eps in (None, 1e-5)
        and all(it in (None, _GPT_OSS_YARN[name]) for name, it in given.items())
    )


def fsdp_ranks(zero_stage: Number, shard_size: Number, cp: Number) -> Any:
    """Ranks that torchtitan's FSDP shards over: of `shard_size` where weights are sharded, else those of cp, always."""
    return where(np.asarray(zero_stage) >= 2, shard_size, cp)


def shards_experts(model: ModelSpec, fsdp: Any, tp: Number, ep: Number, num_replicas: Number) -> Any:
    """True where FSDP cuts every routed expert evenly.

    Ranks beyond the number of experts cut inside each expert, intermediate and hidden size, and FSDP pads only its
    first dimension (torchtitan/distributed/fsdp.py; FSDP2's "uneven sharding on dim 1").
    """
    assert model.moe is not None
    has_ep = np.asarray(ep) > 1
    cut_by = np.where(has_ep, fsdp * tp // ep, fsdp)
    width = model.moe.moe_intermediate_size // np.where(has_ep, 1, tp)
    num_shards = np.where(has_ep, cut_by * ep, num_replicas)
    pieces = np.maximum(cut_by, 1)
    return (num_shards <= model.moe.num_experts) | ((width % pieces == 0) & (model.hidden_size % pieces == 0))


def is_tuning(training: TrainingSpec) -> bool:
    """True for a training of so few tokens a step that it is likely a fine-tuning."""
    return training.global_batch_size * training.seq_length <= TUNING_TOKENS


def has_more_experts(moe: MoESpec | None, tp: Number, ep: Number, etp: Number) -> bool:
    """True where tensor-parallel ranks hold copies of experts, since these are split less than attention is."""
    return moe is not None and bool(tp > etp * ep)


def is_recomputable(runtime: RuntimeSpec, recompute: str, modules: Iterable[str]) -> bool:
    """True if a layout recomputes nothing that the recipe keeps it from recomputing."""
    may = set(runtime.recomputable_modules)
    return (recompute != "full" or runtime.recomputes_layers) and set(modules) <= may


FACTS: Final[Said] = {
    "RANK_ORDERS": RANK_ORDERS, "SHARDED_STAGES": SHARDED_STAGES, "GROUPS": GROUPS, "BEFORE_018": BEFORE_018,
    "PRIMUS_CORE": PRIMUS_CORE,
} | {
    fact.__name__: fact
    for fact in (
        listed, isclose, isin, where, maximum, tokens_split, has_groups, has_usual_scale, has_local_base, rotary_method,
        has_dense_layers, expert_width, shared_expert_width, kv_heads, instances, splits_states, unsplit_state,
        has_sparse_kinds, reads_before, unplain_kinds, uncore_kinds, is_hybrid,
        core_yarn_scale, other_llama3, other_yarn, norms_queries_twice,
        megatron_activations, family_of, is_gemma, is_of_no_recipe, is_gpt_oss, fsdp_ranks, shards_experts,
        is_tuning, has_more_experts, is_recomputable,
    )
}  # fmt: skip
"""Names that expressions of rules.yaml know beside a job's own fields."""
