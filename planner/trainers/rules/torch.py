"""Rules of torch's pipelines, and of torchtitan (0.3.0, main of August 2026): shapes, and models that none builds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.specs.training import TrainingSpec, tokens_split
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
    first_broken,
    has_groups,
    has_local_base,
    has_usual_scale,
    model_rule,
    no_multiple,
    rotary_method,
    stretch_rule,
)

KV_HEADS = Rule(
    "kv_heads_not_divisible_by_tp",
    lambda model, training, shape: (model.mla is not None) | (model.num_key_value_heads % shape.tp == 0),
    lambda model, training, shape: no_multiple("num_key_value_heads", model.num_key_value_heads, "tp", shape.tp),
)
"""A sharded head dimension has no copies: key-value heads are split, never replicated."""

UNTIED = Rule(
    "tied_embeddings_with_pp",
    lambda model, training, shape: (shape.pp == 1) | (not model.tie_word_embeddings),
    lambda model, training, shape: (
        f"tied embeddings cannot be shared between the first and the last of {shape.pp} stages"
    ),
)

EXPERT_RANKS = Rule(
    "experts_do_not_divide_ranks",
    lambda model, training, shape: (model.moe is None) | ((shape.tp * shape.cp * shape.dp) % shape.ep == 0),
    lambda model, training, shape: no_multiple("tp·cp·dp", shape.tp * shape.cp * shape.dp, "ep", shape.ep),
)
"""Experts are spread over all ranks of a stage."""

TORCH_RULES: tuple[Rule, ...] = (HEADS, KV_HEADS, DENSE_WIDTH, SHARED_EXPERT_WIDTH)
"""Constraints that hold for all schedules."""


def _tokens_split(shape: Shape) -> Any:
    shards = np.where(np.asarray(shape.sequence_parallel) > 0, shape.tp, 1)
    return tokens_split(np.asarray(shape.cp), shards)


def _unless_split(reason: str, feature: str, has: Callable[[ModelSpec], bool]) -> Rule:
    """A rule of flash attention over split sequences, which takes windows but no bias and no key without a token."""
    return Rule(
        reason,
        lambda model, training, shape: (shape.cp == 1) | (not has(model)),
        lambda model, training, shape: f"flash attention over split sequences (cp {shape.cp}) takes no {feature}",
    )


TORCH_EAGER_RULES: tuple[Rule, ...] = (
    *TORCH_RULES,
    EXPERTS,
    EXPERT_RANKS,
    Rule(
        "etp_not_expressible",
        lambda model, training, shape: (model.moe is None) | (shape.etp == 1),
        lambda model, training, shape: f"the runner does not split an expert (etp {shape.etp})",
    ),
    Rule(
        "moe_tp_without_sequence_parallel",
        lambda model, training, shape: (model.moe is None) | (shape.tp == 1) | (shape.sequence_parallel > 0),
        lambda model, training, shape: f"the runner's experts need sequence parallelism beside tp {shape.tp}",
    ),
    _unless_split("attention_sinks_with_cp", "attention sinks", lambda model: model.attention_sinks),
    _unless_split("attention_chunks_with_cp", "chunks", lambda model: model.attention_chunk_size is not None),
    _unless_split("alibi_with_cp", "ALiBi", lambda model: model.position_embedding == "alibi"),
    Rule(
        "zero_stage_not_expressible",
        lambda model, training, shape: shape.zero_stage <= 1,
        lambda model, training, shape: f"the runner shards optimizer states only, not ZeRO-{shape.zero_stage}",
    ),
    Rule(
        "shard_size_not_expressible",
        lambda model, training, shape: (shape.zero_stage == 0) | (shape.shard_size == shape.dp * shape.cp),
        lambda model, training, shape: (
            f"the runner shards over all of dp·cp ({shape.dp * shape.cp}), not {shape.shard_size} ranks"
        ),
    ),
    Rule(
        "seq_length_not_divisible_by_tp_cp",
        lambda model, training, shape: shape.seq_length % _tokens_split(shape) == 0,
        lambda model, training, shape: no_multiple(
            "seq_length",
            shape.seq_length,
            "tp" if shape.cp == 1 else "cp·lcm(2, tp)" if shape.sequence_parallel else "2·cp",
            int(_tokens_split(shape)),
        ),
    ),
    Rule(
        "vocab_size_not_divisible_by_tp",
        lambda model, training, shape: model.vocab_size % shape.tp == 0,
        lambda model, training, shape: no_multiple("vocab_size", model.vocab_size, "tp", shape.tp),
    ),
)
"""Constraints of our own runner, which runs what is planned for `torch-eager`."""

_ROUNDS = Rule(
    "microbatches_no_multiple_of_rounds",
    lambda model, training, shape: (
        shape.num_microbatches % np.maximum(1, np.asarray(shape.num_microbatches) // shape.pp) == 0
    ),
    lambda model, training, shape: no_multiple(
        "num_microbatches",
        shape.num_microbatches,
        "num_microbatches div pp",
        max(1, shape.num_microbatches // shape.pp),
    ),
)


def _at_least(times: int) -> Rule:
    """num_microbatches ≥ times·pp."""
    return Rule(
        "too_few_microbatches",
        lambda model, training, shape: shape.num_microbatches >= times * shape.pp,
        lambda model, training, shape: (
            f"num_microbatches {shape.num_microbatches} is below {'' if times == 1 else f'{times}·'}pp "
            f"({times * shape.pp})"
        ),
    )


_ONE_CHUNK = Rule(
    "schedule_needs_one_stage_per_rank",
    lambda model, training, shape: shape.vpp == 1,
    lambda model, training, shape: f"the schedule runs one stage per rank, vpp is {shape.vpp}",
)
_TWO_CHUNKS = Rule(
    "schedule_needs_two_stages_per_rank",
    lambda model, training, shape: shape.vpp == 2,
    lambda model, training, shape: f"the schedule runs exactly two stages per rank, vpp is {shape.vpp}",
)

TORCH_SCHEDULE_RULES: dict[str, tuple[Rule, ...]] = {
    "none": (),
    "gpipe": (_ONE_CHUNK,),
    "1f1b": (_ONE_CHUNK, _at_least(1)),
    "interleaved-1f1b": (_ROUNDS,),
    "breadth-first": (),
    "zb-h1": (_ROUNDS,),
    "zb-v": (_TWO_CHUNKS,),
    "dualpipe-v": (_TWO_CHUNKS, _at_least(2)),
}
"""Constraints of torch's own schedule classes, by our schedule name; an order given as CSV has none of them."""

FULL_PIPELINE = Rule(
    "too_few_microbatches",
    lambda model, training, shape: (shape.vpp > 1) | (shape.num_microbatches >= shape.pp),
    lambda model, training, shape: f"num_microbatches {shape.num_microbatches} is below pp ({shape.pp})",
)
"""1F1B fills its pipeline; interleaved 1F1B need not."""


def _when_interleaved(rule: Rule) -> Rule:
    """`rule`, held against shapes whose ranks hold several stages only."""
    return replace(rule, holds=lambda model, training, shape: (shape.vpp == 1) | rule.holds(model, training, shape))


INTERLEAVED_RULES: tuple[Rule, ...] = tuple(map(_when_interleaved, TORCH_SCHEDULE_RULES["interleaved-1f1b"]))
"""The rules of interleaved 1F1B, for a trainer that runs 1F1B too."""

TORCH_CLASSES: dict[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""torch's name of each schedule that it has a class for."""

UNCOMPILED = (
    "backwards are split: layers run uncompiled, slower than planned; a compiled one computes its whole backward "
    "for each part"
)
"""torch.compile's backward is one node of the graph, and its donated buffers allow no second pass (torch 2.13)."""


AUTOMODEL_RULES: tuple[Rule, ...] = (
    *TORCH_RULES,
    UNTIED,
    EXPERTS,
    EXPERT_RANKS,
    Rule(
        "experts_with_tp",
        # moe/parallelizer.py splits attention alone, and takes no sequence parallelism beside it
        lambda model, training, shape: (model.moe is None) | ((shape.tp == 1) & (shape.etp == 1)),
        lambda model, training, shape: f"tp {shape.tp}, etp {shape.etp}: experts are split over ep alone",
    ),
    Rule(
        "seq_length_not_divisible_by_2cp",
        lambda model, training, shape: shape.seq_length % np.where(shape.cp == 1, 1, 2 * np.asarray(shape.cp)) == 0,
        lambda model, training, shape: no_multiple("seq_length", shape.seq_length, "2cp", 2 * shape.cp),
    ),
    Rule(
        "shard_size_not_dividing_dp_cp",
        lambda model, training, shape: (shape.dp * shape.cp) % shape.shard_size == 0,
        lambda model, training, shape: no_multiple("dp·cp", shape.dp * shape.cp, "shard_size", shape.shard_size),
    ),
    FULL_PIPELINE,
    *INTERLEAVED_RULES,
)
"""Constraints for 1F1B at vpp 1 and interleaved 1F1B above."""


def _unless_traced(rule: Rule) -> Rule:
    """The rule on layers that the runner builds; a traced module's are its own."""
    return replace(rule, holds=lambda model, *others: model.traced is not None or rule.holds(model, *others))


TORCH_MODEL_RULES: tuple[Rule, ...] = (
    *WHOLE_MODEL_RULES,
    *map(
        _unless_traced,
        (
            *UNWRITTEN_RULES,
            PLAIN["pre_norms"],
            PLAIN["parallel_residual"],
            HEAD_NORMS,
            PLAIN["attn_output_gate"],
        ),
    ),
)


MODULE_RULE = Rule(
    "module_not_split",
    lambda model, training, shape: (
        (model.traced is None) | ((shape.tp * shape.cp * shape.pp == 1) & (np.asarray(shape.zero_stage) <= 1))
    ),
    lambda model, training, shape: (
        f"tp {shape.tp}, cp {shape.cp}, pp {shape.pp}, ZeRO-{shape.zero_stage}: ranks run a module of your own "
        "whole, with its optimizer sharded or not"
    ),
)
"""The rule of the program that runs a traced module."""


def runner_objection(model: ModelSpec, training: TrainingSpec) -> str | None:
    """The reason why our own runner cannot build the model's layers; None where it can."""
    rule = first_broken(TORCH_MODEL_RULES, model, training, Shape())
    return None if rule is None else f"{rule.reason}: {rule.message(model, training, Shape())}"


def _sequence_quantum(shape: Shape) -> Any:
    """tp under sequence parallelism, times 2·cp where cp > 1."""
    tp = np.where(np.asarray(shape.sequence_parallel) > 0, shape.tp, 1)
    return tp * np.where(np.asarray(shape.cp) > 1, 2 * np.asarray(shape.cp), 1)


def _expert_tp(shape: Shape) -> Any:
    """Experts are split over tp where ep is 1, and over nothing else where it is not."""
    return np.where(np.asarray(shape.ep) > 1, 1, shape.tp)


def _fsdp_ranks(shape: Shape) -> Any:
    """Ranks that FSDP shards over: those of `shard_size` where weights are sharded, else those of cp, always."""
    return np.where(np.asarray(shape.zero_stage) >= 2, shape.shard_size, shape.cp)


def _shards_experts(model: ModelSpec, shape: Shape) -> Any:
    """True where FSDP cuts every routed expert evenly.

    Ranks beyond the number of experts cut inside each expert, intermediate and hidden size, and FSDP pads only its
    first dimension (torchtitan/distributed/fsdp.py; FSDP2's "uneven sharding on dim 1").
    """
    if model.moe is None:
        return True
    fsdp = _fsdp_ranks(shape)
    has_ep = np.asarray(shape.ep) > 1
    cut_by = np.where(has_ep, fsdp * shape.tp // shape.ep, fsdp)
    num_shards = np.where(has_ep, cut_by * shape.ep, np.asarray(shape.dp) * shape.cp)
    experts_stay_whole = num_shards <= model.moe.num_experts
    width = model.moe.moe_intermediate_size // np.where(has_ep, 1, shape.tp)
    return experts_stay_whole | (
        (width % np.maximum(cut_by, 1) == 0) & (model.hidden_size % np.maximum(cut_by, 1) == 0)
    )


def _expert_sizes(model: ModelSpec) -> str:
    return "" if model.moe is None else f"{model.moe.moe_intermediate_size} × {model.hidden_size}"


TORCHTITAN_LAYOUT_RULES: tuple[Rule, ...] = (
    *TORCH_RULES,
    UNTIED,
    EXPERTS,
    Rule(
        "experts_do_not_divide_ranks",
        # expert ranks are taken from dp_shard·cp·tp: replicas do not count
        lambda model, training, shape: (model.moe is None) | ((_fsdp_ranks(shape) * shape.tp) % shape.ep == 0),
        lambda model, training, shape: no_multiple("dp_shard·cp·tp", _fsdp_ranks(shape) * shape.tp, "ep", shape.ep),
    ),
    Rule(
        "etp_not_expressible",
        lambda model, training, shape: (model.moe is None) | (shape.etp == _expert_tp(shape)),
        lambda model, training, shape: (
            f"etp {shape.etp}: experts are split over tp ({shape.tp}) at ep 1 and not at all above (ep {shape.ep})"
        ),
    ),
    EXPERT_WIDTH,
    Rule(
        "experts_unevenly_sharded",
        lambda model, training, shape: _shards_experts(model, shape),
        lambda model, training, shape: (
            f"FSDP over {shape.shard_size} ranks at ep {shape.ep} cuts experts of {_expert_sizes(model)} unevenly"
        ),
    ),
    Rule(
        "mtp_with_pp_or_cp",
        lambda model, training, shape: (model.num_nextn_predict_layers == 0) | ((shape.pp == 1) & (shape.cp == 1)),
        lambda model, training, shape: f"multi-token prediction runs at pp 1 and cp 1, not {shape.pp} and {shape.cp}",
    ),
    Rule(
        "seq_length_not_divisible_by_tp_2cp",
        lambda model, training, shape: shape.seq_length % _sequence_quantum(shape) == 0,
        lambda model, training, shape: no_multiple(
            "seq_length", shape.seq_length, "tp·2cp", int(_sequence_quantum(shape))
        ),
    ),
    Rule(
        "shard_size_not_dividing_dp_cp",
        lambda model, training, shape: (shape.dp * shape.cp) % shape.shard_size == 0,
        lambda model, training, shape: no_multiple("dp·cp", shape.dp * shape.cp, "shard_size", shape.shard_size),
    ),
    Rule(
        "shard_size_no_multiple_of_cp",
        lambda model, training, shape: shape.shard_size % shape.cp == 0,
        lambda model, training, shape: no_multiple("shard_size", shape.shard_size, "cp", shape.cp),
    ),
)
"""Constraints that hold for all schedules."""

TORCHTITAN_RULES: tuple[Rule, ...] = (
    *TORCHTITAN_LAYOUT_RULES,
    FULL_PIPELINE,
    *INTERLEAVED_RULES,
)
"""Constraints for 1F1B at vpp 1 and interleaved 1F1B above."""


_GPT_OSS = {24: 32, 36: 128}
"""Number of experts by number of layers of gpt-oss 20b and 120b, the two sizes that torchtitan's gpt_oss builds."""
_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}  # fmt: skip
"""Its rotary scaling."""


def is_gpt_oss(model: ModelSpec) -> bool:
    """True for the two models that torchtitan's gpt_oss builds."""
    return (
        model.attention_sinks
        and model.moe is not None
        and _GPT_OSS.get(model.num_hidden_layers) == model.moe.num_experts
        and (model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (2880, 64, 8)
        and (model.vocab_size, model.moe.moe_intermediate_size, model.sliding_window) == (201_088, 2880, 128)
        and (model.activation, model.swiglu_limit, model.glu_linear_offset) == ("quick_gelu", 7.0, 1.0)
        and model.rope_theta == 150_000
        and model.norm_eps in (None, 1e-5)
        and model.rope_scaling is not None
        and _numbers(model.rope_scaling, _GPT_OSS_YARN) == _GPT_OSS_YARN
    )


def _numbers(scaling: RopeScalingSpec, usual: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a scaling; those that it leaves out are usual."""
    given = {name: getattr(scaling, name) for name in usual}
    return {name: usual[name] if number is None else number for name, number in given.items()}


def _broken_scaling(model: ModelSpec) -> str | None:
    """The method or scale of rotary frequencies that torchtitan does not have; None where it has all."""
    method, scaling = rotary_method(model), model.rope_scaling
    if method is None or scaling is None or is_gpt_oss(model):
        return None
    if method not in ("llama3", "yarn"):
        return f"it stretches rotary frequencies as llama3 or yarn, not {method}"
    if method == "yarn" and not math.isclose(scaling.yarn_scale, 1.0, rel_tol=1e-6):
        return f"yarn only rotates queries and keys there, the model scales them by {scaling.yarn_scale:.4g}"
    if method == "llama3" and model.mla is not None:
        return "latent attention has yarn there, not llama3"
    return None


TORCHTITAN_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    *PLAIN.values(),
    model_rule("position_embedding", lambda m: m.position_embedding != "rope", lambda m: "its models rotate positions"),
    model_rule(
        "partial_rotary_factor",
        lambda m: m.partial_rotary_factor < 1,
        lambda m: f"its models rotate whole heads, not {m.partial_rotary_factor:g} of each",
    ),
    stretch_rule(_broken_scaling),
    model_rule("rope_local_base_freq", has_local_base, lambda m: "all layers have one rotary base there"),
    model_rule(
        "attention_multiplier",
        lambda m: not has_usual_scale(m),
        lambda m: (
            f"it divides attention logits by the root of a head's width, the model scales by "
            f"{m.attention_multiplier:.4g}"
        ),
    ),
    model_rule("norm", lambda m: m.norm != "rmsnorm", lambda m: f"its models have RMSNorm, not {m.norm}"),
    model_rule(
        "qk_norm_over",
        lambda m: m.qk_norm and m.qk_norm_over != "head_dim",
        lambda m: "norms of queries and keys are over a head there, with one weight for all heads",
    ),
    model_rule(
        "qk_norm", lambda m: m.qk_norm and m.mla is not None, lambda m: "latent attention norms its latents alone there"
    ),
    model_rule(
        "activation",
        lambda m: not (m.gated_mlp and m.activation == "silu") and not is_gpt_oss(m),
        lambda m: f"its MLPs are SwiGLU, the model's {'gated' if m.gated_mlp else 'plain'} {m.activation}",
    ),
    model_rule(
        "swiglu_limit",
        lambda m: (m.swiglu_limit is not None or m.glu_linear_offset != 0) and not is_gpt_oss(m),
        lambda m: "it clamps and offsets the halves of an MLP only in gpt-oss 20b and 120b",
    ),
    model_rule(
        "bias",
        lambda m: (m.output_bias or m.has_mlp_bias) and not is_gpt_oss(m),
        lambda m: "its models have biases on queries, keys and values only, but for gpt-oss",
    ),
    Rule(
        "attention_chunk_size",
        lambda model, training, shape: training.seq_length <= (model.attention_chunk_size or training.seq_length),
        lambda model, training, shape: "it attends in chunks nowhere",
    ),
    model_rule(
        "attention_sinks",
        lambda m: (m.attention_sinks or m.sliding_window is not None) and not is_gpt_oss(m),
        lambda m: "it has sinks and sliding windows only in gpt-oss 20b and 120b",
    ),
    model_rule(
        "num_nextn_predict_layers",
        lambda m: m.num_nextn_predict_layers > 0 and m.mla is None,
        lambda m: "it predicts several tokens only in deepseek_v3, whose attention is latent",
    ),
    model_rule(
        "shared_expert_gate",
        lambda m: m.moe is not None and m.moe.shared_expert_gate,
        lambda m: "it has no gate on the shared expert",
    ),
    model_rule(
        "scores_on_input",
        lambda m: m.moe is not None and m.moe.scores_on_input,
        lambda m: "scores scale what comes out of experts there, not what goes in",
    ),
    model_rule(
        "scoring_func",
        lambda m: m.moe is not None and m.scoring_func == "sqrtsoftplus",
        lambda m: "its router scores by softmax or sigmoid, not sqrtsoftplus",
    ),
    model_rule(
        "n_group",
        lambda m: m.moe is not None and has_groups(m.moe) and m.moe.num_experts < 2 * (m.moe.n_group or 1),
        lambda m: "a group needs two experts there",
    ),
    model_rule(
        "router_z_loss_coef",
        lambda m: m.moe is not None and m.moe.router_z_loss_coef > 0,
        lambda m: "it has no loss on the router's logits",
    ),
)
