"""Rules of Megatron-LM (core 0.20.0) and Megatron-Bridge: shapes and models that they refuse by a first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from planner.shape import RANK_ORDERS, Shape
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import (
    DENSE_WIDTH,
    EXPERT_WIDTH,
    EXPERTS,
    HEAD_NORMS,
    HEADS,
    PLAIN,
    SHARED_EXPERT_WIDTH,
    UNWRITTEN_RULES,
    WHOLE_MODEL_RULES,
    Rule,
    every_nth,
    has_local_base,
    has_usual_scale,
    model_rule,
    no_multiple,
    release,
    rotary_method,
    stretch_rule,
)
from planner.trainers.spec import RuntimeSpec


def _kv_heads(model: ModelSpec) -> int:
    """Key-value heads; latent attention expands them to one per query head."""
    return model.num_attention_heads if model.mla is not None else model.num_key_value_heads


def _kv_heads_split(model: ModelSpec, training: TrainingSpec, shape: Shape) -> Any:
    """Key-value heads are split over tp, or each copied to tp / kv ranks."""
    heads = _kv_heads(model)
    return (heads % shape.tp == 0) | (shape.tp % heads == 0)


def _instances(shape: Shape) -> Any:
    """Copies of the sharded optimizer; never none, for shapes that another rule refuses."""
    return np.maximum(shape.dp * shape.cp // np.asarray(shape.shard_size), 1)


def _dense_or(model: ModelSpec, legal: Any) -> Any:
    """`legal` for models with experts; dense models obey."""
    return (model.moe is None) | legal


_SEQUENCE = Rule(
    "seq_length_not_divisible_by_2cp",
    lambda model, training, shape: (shape.cp == 1) | (shape.seq_length % (2 * shape.cp) == 0),
    lambda model, training, shape: no_multiple("seq_length", shape.seq_length, "2·cp", 2 * shape.cp),
)
_INTERLEAVED_MULTIPLE = Rule(
    "interleaving_microbatches_no_multiple_of_pp",
    lambda model, training, shape: (shape.vpp == 1) | (shape.num_microbatches % shape.pp == 0),
    lambda model, training, shape: (
        f"vpp {shape.vpp} interleaves: {no_multiple('num_microbatches', shape.num_microbatches, 'pp', shape.pp)}"
    ),
)

MEGATRON_RULES: tuple[Rule, ...] = (
    HEADS,
    Rule(
        "kv_heads_not_divisible_by_tp",
        _kv_heads_split,
        lambda model, training, shape: (
            f"num_key_value_heads {_kv_heads(model)} and tp {shape.tp}: neither is a multiple of the other"
        ),
    ),
    DENSE_WIDTH,
    SHARED_EXPERT_WIDTH,
    EXPERT_WIDTH,
    Rule(
        "mtp_hidden_size_not_divisible_by_tp",
        lambda model, training, shape: (model.num_nextn_predict_layers == 0) | (model.hidden_size % shape.tp == 0),
        lambda model, training, shape: no_multiple("hidden_size (mtp projection)", model.hidden_size, "tp", shape.tp),
    ),
    EXPERTS,
    Rule(
        "experts_do_not_divide_ranks",
        lambda model, training, shape: _dense_or(model, (shape.tp * shape.cp * shape.dp) % (shape.ep * shape.etp) == 0),
        lambda model, training, shape: no_multiple(
            "tp·cp·dp", shape.tp * shape.cp * shape.dp, "ep·etp", shape.ep * shape.etp
        ),
    ),
    Rule(
        "expert_bias_with_etp",
        lambda model, training, shape: _dense_or(model, (not model.has_mlp_bias) | (shape.etp == 1)),
        lambda model, training, shape: f"experts with biases need etp 1, not {shape.etp}",
    ),
    Rule(
        "moe_tp_without_sequence_parallel",
        lambda model, training, shape: _dense_or(model, (shape.tp == 1) | (shape.sequence_parallel > 0)),
        lambda model, training, shape: f"a MoE model at tp {shape.tp} needs sequence_parallel",
    ),
    _SEQUENCE,
    Rule(
        "seq_length_not_divisible_by_tp_cp",
        lambda model, training, shape: (shape.sequence_parallel == 0) | (shape.seq_length % (shape.tp * shape.cp) == 0),
        lambda model, training, shape: no_multiple("seq_length", shape.seq_length, "tp·cp", shape.tp * shape.cp),
    ),
    Rule(
        "seq_length_beyond_positions",
        lambda model, training, shape: (
            (model.position_embedding != "learned") | (shape.seq_length <= (model.max_position_embeddings or 0))
        ),
        lambda model, training, shape: (
            f"seq_length {shape.seq_length} exceeds the {model.max_position_embeddings} learned positions"
        ),
    ),
    Rule(
        "vpp_without_pp",
        lambda model, training, shape: (shape.vpp == 1) | (shape.pp > 1),
        lambda model, training, shape: f"vpp {shape.vpp} needs pp of at least 2, not {shape.pp}",
    ),
    Rule(
        "interleaving_too_few_microbatches",
        lambda model, training, shape: (shape.vpp == 1) | (shape.num_microbatches >= shape.pp),
        lambda model, training, shape: (
            f"vpp {shape.vpp} interleaves: num_microbatches {shape.num_microbatches} is below pp {shape.pp}"
        ),
    ),
    _INTERLEAVED_MULTIPLE,
    Rule(
        "shard_size_not_dividing_dp_cp",
        lambda model, training, shape: (shape.dp * shape.cp) % shape.shard_size == 0,
        lambda model, training, shape: no_multiple("dp·cp", shape.dp * shape.cp, "shard_size", shape.shard_size),
    ),
    Rule(
        "expert_ranks_not_divisible_by_instances",
        # each instance of the distributed optimizer has its share of an expert's replicas, too
        lambda model, training, shape: _dense_or(
            model, (shape.zero_stage == 0) | (shape.expert_dp % _instances(shape) == 0)
        ),
        lambda model, training, shape: no_multiple(
            "tp·cp·dp / ep·etp", f"{shape.expert_dp:g}", "dp·cp / shard_size", _instances(shape)
        ),
    ),
    Rule(
        "rank_order_with_experts",
        # "the data parallel size of the attention and moe layers must be the same" (core/parallel_state.py)
        lambda model, training, shape: _dense_or(
            model,
            (np.asarray(shape.dp_outermost) == 0) | (shape.pp == 1) | (shape.ep * shape.etp == shape.tp * shape.cp),
        ),
        lambda model, training, shape: (
            f"{RANK_ORDERS[1]} needs as many replicas of experts as of the rest: ep·etp {shape.ep * shape.etp} is not "
            f"tp·cp {shape.tp * shape.cp}"
        ),
    ),
    Rule(
        "rank_order_with_fsdp",
        lambda model, training, shape: (np.asarray(shape.dp_outermost) == 0) | (np.asarray(shape.zero_stage) < 2),
        lambda model, training, shape: f"Megatron-FSDP (zero_stage {shape.zero_stage}) knows no {RANK_ORDERS[1]}",
    ),
)
"""Constraints that hold for all values of the runtime's switches."""

_FULL_ATTENTION = Rule(
    "sliding_window_with_ring_cp",
    lambda model, training, shape: (shape.cp == 1) | (model.sliding_window is None),
    lambda model, training, shape: f"cp {shape.cp} as a ring (p2p) has no sliding window ({model.sliding_window})",
)
_NO_SINKS = Rule(
    "attention_sinks_with_cp",
    lambda model, training, shape: (shape.cp == 1) | (not model.attention_sinks),
    lambda model, training, shape: f"attention sinks at cp {shape.cp} need cp_comm_type a2a",
)

MEGATRON_CP_RULES: dict[str, tuple[Rule, ...]] = {
    "p2p": (_FULL_ATTENTION, _NO_SINKS),
    "all_gather": (_NO_SINKS,),
    "a2a": (
        Rule(
            "heads_not_divisible_by_tp_cp",
            lambda model, training, shape: (shape.cp == 1) | (model.num_attention_heads % (shape.tp * shape.cp) == 0),
            lambda model, training, shape: no_multiple(
                "num_attention_heads", model.num_attention_heads, "tp·cp", shape.tp * shape.cp
            ),
        ),
        Rule(
            "kv_heads_not_divisible_by_tp_cp",
            lambda model, training, shape: (shape.cp == 1) | (_kv_heads(model) % (shape.tp * shape.cp) == 0),
            lambda model, training, shape: no_multiple(
                "num_key_value_heads", _kv_heads(model), "tp·cp", shape.tp * shape.cp
            ),
        ),
    ),
}
"""Constraints by RuntimeSpec.cp_comm_type, on which Transformer Engine raises in the first forward."""


def megatron_rules(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """Constraints of Megatron-LM's layouts under the runtime's kind of context parallelism."""
    return MEGATRON_RULES + MEGATRON_CP_RULES[runtime.cp_comm_type]


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of Llama 3's scaling that are fixed there (RotaryEmbedding._apply_scaling), and Llama 3's own."""


def _has_two_scores(model: ModelSpec) -> bool:
    """Several sigmoid scores that are not divided by their sum."""
    moe = model.moe
    several = moe is not None and moe.num_experts_per_tok > 1 and not moe.norm_topk_prob
    return several and model.scoring_func != "softmax"


def _broken_scaling(model: ModelSpec) -> str | None:
    """The number or method of a model's rotary scaling that core does not have; None where it has all."""
    method, scaling = rotary_method(model), model.rope_scaling
    if method is None or scaling is None:
        return None
    if method in ("dynamic", "longrope"):
        return f"it has no {method} scaling"
    if method == "yarn" and not math.isclose(_core_yarn_scale(scaling), scaling.yarn_scale, rel_tol=1e-6):
        return f"yarn scales queries and keys by {_core_yarn_scale(scaling):.4g} there, not by {scaling.yarn_scale:.4g}"
    if model.mla is not None and method != "yarn":
        return f"latent attention has yarn there, not {method}"
    return next(_other_llama3(scaling), None) if method == "llama3" else None


def _core_yarn_scale(scaling: RopeScalingSpec) -> float:
    """Yarn's scale of rotated queries and keys as core computes it: of weights that are not told 1 and 0."""
    growth = 0.1 * math.log(max(scaling.factor or 1.0, 1.0))
    weight = 1.0 if scaling.mscale is None else scaling.mscale
    return (growth * weight + 1) / (growth * (scaling.mscale_all_dim or 0.0) + 1)


def _other_llama3(scaling: RopeScalingSpec) -> Iterator[str]:
    for name, there in _LLAMA3.items():
        given = getattr(scaling, name)
        if given is not None and given != there:
            yield f"{name} of llama3 is {there:g} there, not {given:g}"


CORE_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    model_rule("position_embedding", lambda m: m.position_embedding == "alibi", lambda m: "it has no ALiBi"),
    PLAIN["embedding_norm"],
    PLAIN["parallel_residual"],
    PLAIN["residual_multiplier"],
    model_rule(
        "norm_bias",
        lambda m: m.norm == "layernorm" and not m.has_norm_bias,
        lambda m: "its LayerNorm always has a bias",
    ),
    model_rule(
        "qk_norm",
        lambda m: m.qk_norm and m.norm == "layernorm",
        lambda m: "queries and keys have the layers' own kind of norm, a LayerNorm, not RMSNorm",
    ),
    model_rule(
        "qk_norm",
        lambda m: m.qk_norm and m.mla is not None,
        lambda m: "latent attention norms its latents there, not queries and keys",
    ),
    model_rule(
        "attention_bias",
        lambda m: m.has_mlp_bias and not (m.qkv_bias and m.output_bias),
        lambda m: "where the MLP has biases attention has them too",
    ),
    model_rule(
        "attention_bias",
        lambda m: m.output_bias and not m.has_mlp_bias,
        lambda m: "attention's output projection has a bias only where the MLP has one",
    ),
    model_rule(
        "attn_output_gate",
        lambda m: m.attn_output_gate and m.mla is not None,
        lambda m: "latent attention has no output gate there",
    ),
    model_rule(
        "router_bias",
        lambda m: m.moe is not None and m.has_mlp_bias and not m.moe.router_bias,
        lambda m: "its router has a bias where the linear layers have one",
    ),
    model_rule(
        "router_bias",
        lambda m: m.moe is not None and m.moe.router_bias and not m.balances_by_bias and not m.has_mlp_bias,
        lambda m: "its router learns a bias only where the linear layers have one",
    ),
    model_rule(
        "balancing_bias",
        lambda m: m.balances_by_bias and m.scoring_func == "softmax",
        lambda m: "a balancing bias needs sigmoid or sqrtsoftplus scores there, not softmax",
    ),
    model_rule(
        "norm_topk_prob",
        _has_two_scores,
        lambda m: f"it divides {m.scoring_func} scores of several experts by their sum",
    ),
    model_rule(
        "scores_on_input",
        lambda m: m.moe is not None and m.moe.scores_on_input and m.moe.num_experts_per_tok > 1,
        lambda m: "scores scale what goes into experts there where a token visits one alone",
    ),
    model_rule(
        "swiglu_limit",
        lambda m: m.swiglu_limit is not None and not (m.activation == "quick_gelu" or m.moe is not None),
        lambda m: "it clamps dense SwiGLU nowhere",
    ),
    stretch_rule(_broken_scaling),
    model_rule(
        "num_nextn_predict_layers",
        lambda m: m.num_nextn_predict_layers > 0 and m.position_embedding not in ("rope", "none"),
        lambda m: f"multi-token prediction needs rope or no positions, not {m.position_embedding}",
    ),
    Rule(
        "attention_chunk_size",
        lambda model, training, shape: training.seq_length <= (model.attention_chunk_size or training.seq_length),
        lambda model, training, shape: (
            f"it has no attention in chunks, the model's are of {model.attention_chunk_size} tokens and sequences of "
            f"{training.seq_length}"
        ),
    ),
)
"""Rules of Megatron core 0.20.0."""

NEW_QUERY_NORM_SINCE = "0.19"
"""`QKNormConfigResolver` gives the projection of queries that are not latent a norm of its own, beside the layer's."""


def norms_queries_twice(model: ModelSpec, version: str) -> bool:
    """True where a version of Megatron core norms the input of queries once more than the model does."""
    is_older = bool(version) and release(version) < release(NEW_QUERY_NORM_SINCE)
    return model.mla is not None and model.mla.q_lora_rank is None and not is_older


_YARN_OF_LATENTS = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": True}
"""Numbers of yarn that have no option for latent attention: the defaults of MLATransformerConfig, DeepSeek's."""


def _activations(model: ModelSpec) -> tuple[str, ...]:
    """The activations that an option asks for; GELU fused with a bias is the tanh's."""
    if model.gated_mlp:
        return ("silu", "quick_gelu")
    return ("gelu", "relu2", "gelu_tanh") if model.has_mlp_bias else ("gelu", "relu2")


def _other_yarn(model: ModelSpec) -> str | None:
    """A number of latent attention's yarn that no option says."""
    scaling = model.rope_scaling
    if scaling is None or model.mla is None or rotary_method(model) != "yarn":
        return None
    for name, there in _YARN_OF_LATENTS.items():
        given = getattr(scaling, name)
        if given is not None and given != there:
            return f"{name} of yarn is {there:g} for latent attention, not {given:g}"
    return None


def _other_factor(model: ModelSpec) -> str | None:
    """A factor that no option says: of llama3 the option is read and not used, of linear it is a whole number."""
    method, factor = rotary_method(model), (model.rope_scaling.factor if model.rope_scaling else None) or 1.0
    if method == "llama3" and factor != 8:
        return f"it scales as llama3 by 8 whatever --rope-scaling-factor says, the model by {factor:g}"
    if method == "linear" and factor != round(factor):
        return f"it stretches by whole factors, not {factor:g}"
    return None


_QUERY_NORM = model_rule(
    "q_lora_rank",
    lambda m: norms_queries_twice(m, ""),
    lambda m: (
        f"since core {NEW_QUERY_NORM_SINCE} it norms the layer's input once more before queries that are not latent"
    ),
)

MEGATRON_MODEL_RULES: tuple[Rule, ...] = (
    _QUERY_NORM,
    *CORE_MODEL_RULES,
    PLAIN["pre_norms"],
    PLAIN["post_norms"],
    HEAD_NORMS,
    model_rule(
        "activation",
        lambda m: m.activation not in _activations(m),
        lambda m: (
            f"{'gated' if m.gated_mlp else 'plain'} MLPs {'with' if m.has_mlp_bias else 'without'} biases are "
            f"{' or '.join(_activations(m))} there, the model's {m.activation}"
        ),
    ),
    model_rule(
        "glu_linear_offset",
        lambda m: m.glu_linear_offset != 0 and m.activation != "quick_gelu",
        lambda m: "it adds an offset to the linear half beside quick_gelu only",
    ),
    model_rule(
        "attention_multiplier",
        lambda m: not has_usual_scale(m),
        lambda m: f"no option scales attention logits, the model does by {m.attention_multiplier:.4g}",
    ),
    PLAIN["attn_logit_softcapping"],
    PLAIN["final_logit_softcapping"],
    PLAIN["embedding_multiplier"],
    PLAIN["logits_scaling"],
    model_rule(
        "rope_local_base_freq", has_local_base, lambda m: "sliding layers have the rotary base of the others there"
    ),
    stretch_rule(_other_yarn),
    stretch_rule(_other_factor),
)
"""Rules of the newest Megatron-LM, core 0.20.0."""


_CAME_WITH: tuple[tuple[str, str, Callable[[ModelSpec], bool], str], ...] = (
    ("0.15", "sliding_window", lambda m: m.sliding_window is not None, "sliding windows"),
    ("0.15", "attention_sinks", lambda m: m.attention_sinks, "attention sinks"),
    ("0.15", "activation", lambda m: m.activation == "quick_gelu", "gated quick_gelu"),
    ("0.16", "shared_expert_gate", lambda m: m.moe is not None and m.moe.shared_expert_gate, "gates of shared experts"),
    ("0.16", "attn_output_gate", lambda m: m.attn_output_gate, "gates of attention's output"),
    ("0.18", "scoring_func", lambda m: m.scoring_func == "sqrtsoftplus", "sqrtsoftplus scores"),
    ("0.20", "swiglu_limit", lambda m: m.swiglu_limit is not None and m.activation == "silu", "clamped SwiGLU"),
)
"""Versions of Megatron core, a name, the models that it is about, and the thing that came with the version."""


PRIMUS_CORE = "0.16"
"""Megatron core of the commit that Primus v26.5 pins (third_party/Megatron-LM at d3528a21)."""


def megatron_model_rules(version: str) -> tuple[Rule, ...]:
    """The rules on models of one version; of the newest where it is empty."""
    left = tuple(rule for rule in MEGATRON_MODEL_RULES if rule is not _QUERY_NORM)
    normed_twice = () if version and release(version) < release(NEW_QUERY_NORM_SINCE) else (_QUERY_NORM,)
    return (*left, *normed_twice, *came_later(version), *stretches_later(version))


def stretches_later(version: str) -> tuple[Rule, ...]:
    """The rules on stretched frequencies that a version of Megatron core sets and later ones do not."""
    came_with = (("0.19", "yarn", "options for yarn"), ("0.20", "linear", "linear scaling"))
    return tuple(
        stretch_rule(_unless(method, f"Megatron core {version} has no {thing}, which came with {since}"))
        for since, method, thing in came_with
        if version and release(version) < release(since)
    )


def _unless(method: str, says: str) -> Callable[[ModelSpec], str | None]:
    return lambda model: says if rotary_method(model) == method and model.mla is None else None


def came_later(version: str) -> tuple[Rule, ...]:
    """The rules that a version of Megatron core sets and later ones do not; none for the newest."""
    return tuple(
        model_rule(name, wrong, _says(f"Megatron core {version} has no {thing}, which came with {since}"))
        for since, name, wrong, thing in _CAME_WITH
        if version and release(version) < release(since)
    )


def _says(message: str) -> Callable[[ModelSpec], str]:
    """A rule's message that is the same for all models."""
    return lambda model: message


Family = Literal["gpt", "mla", "gemma2", "gemma3"]
"""The recipe that a model starts from; those of Gemma build layers of their own."""


def family_of(model: ModelSpec) -> Family:
    """The recipe whose layers are the model's."""
    if model.mla is not None:
        return "mla"
    if not model.post_norms:
        return "gpt"
    return "gemma2" if model.attn_logit_softcapping is not None else "gemma3"


def _is_gemma(model: ModelSpec) -> bool:
    """Dense gated layers with four zero-centred norms, and an embedding scaled by the root of its width."""
    return (
        model.pre_norms
        and model.gated_mlp
        and model.moe is None
        and model.norm == "rmsnorm"
        and not (model.qkv_bias or model.output_bias or model.has_mlp_bias)
        and math.isclose(model.embedding_multiplier, model.hidden_size**0.5, rel_tol=1e-4)
    )


def _is_gemma3(model: ModelSpec) -> bool:
    """Norms on queries and keys, and every n-th layer without a window."""
    whole = every_nth([kind.attention == "full" for kind in model.layers])
    slides = model.sliding_window is not None and whole is not None and whole > 1
    return _is_gemma(model) and model.qk_norm and slides and model.final_logit_softcapping is None


def _is_gemma2(model: ModelSpec) -> bool:
    """Capped logits of attention and of the vocabulary, and a window on every other layer from the first."""
    halves = [kind.attention == "sliding" for kind in model.layers] == [i % 2 == 0 for i in range(len(model.layers))]
    return _is_gemma(model) and not model.qk_norm and halves and model.final_logit_softcapping is not None


def _is_of_no_recipe(model: ModelSpec) -> bool:
    family = family_of(model)
    return (family == "gemma3" and not _is_gemma3(model)) or (family == "gemma2" and not _is_gemma2(model))


def _has_own_scale(model: ModelSpec) -> bool:
    """The recipe scales the embedding, and caps logits."""
    return family_of(model) in ("gemma2", "gemma3")


def _stretched_otherwise(model: ModelSpec) -> str | None:
    known, method = {"gemma2": (None,), "gemma3": (None, "linear")}.get(family_of(model)), rotary_method(model)
    if known is None or _is_of_no_recipe(model) or method in known:
        return None
    return f"recipes of Gemma 3 stretch linearly and of Gemma 2 not at all, not by {method}"


BRIDGE_MODEL_RULES: tuple[Rule, ...] = (
    *CORE_MODEL_RULES,
    PLAIN["pre_norms"],
    model_rule(
        "post_norms",
        _is_of_no_recipe,
        lambda m: "it has second norms after attention and MLP in recipes of Gemma 2 and 3 only, whose layers differ",
    ),
    HEAD_NORMS,
    model_rule(
        "glu_linear_offset",
        lambda m: m.glu_linear_offset != 0 and not m.gated_mlp,
        lambda m: "a plain MLP has no linear half to add an offset to",
    ),
    model_rule(
        "attn_logit_softcapping",
        lambda m: m.attn_logit_softcapping is not None and not _has_own_scale(m),
        lambda m: "it caps attention logits in recipes of Gemma 2 only",
    ),
    model_rule(
        "final_logit_softcapping",
        lambda m: m.final_logit_softcapping is not None and not _has_own_scale(m),
        lambda m: "it caps the vocabulary's logits in recipes of Gemma 2 only",
    ),
    model_rule(
        "embedding_multiplier",
        lambda m: m.embedding_multiplier != 1 and not _has_own_scale(m),
        lambda m: "it scales the embedding in recipes of Gemma 2 and 3 only",
    ),
    PLAIN["logits_scaling"],
    stretch_rule(_stretched_otherwise),
    model_rule(
        "rope_local_base_freq",
        lambda m: has_local_base(m) and family_of(m) != "gemma3",
        lambda m: "sliding layers have a rotary base of their own in recipes of Gemma 3 only",
    ),
)
"""Rules of Megatron-Bridge 0.7.0 on Megatron core 0.20.0."""


def bridge_model_rules(version: str) -> tuple[Rule, ...]:
    """The rules on models of the release that holds a version of Megatron core: its fields need no options."""
    return BRIDGE_MODEL_RULES + came_later(version)
