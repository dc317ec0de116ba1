"""Rules of torch: what its sharding refuses, our own runner, and torch.distributed.pipelining (2.13) by schedule.

NeMo AutoModel (main of August 2026) shards as torch does. Our own runner has rules on models, too: the export writes
it, the probe runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec, tokens_split
from planner.trainers.rules.common import (
    DENSE_WIDTH,
    EXPERTS,
    HEADS,
    SHARED_EXPERT_WIDTH,
    Rule,
    first_broken,
    no_multiple,
)
from planner.trainers.rules.model_fields import HEAD_NORMS, PLAIN, UNWRITTEN_RULES, WHOLE_MODEL_RULES

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
"""Constraints whatever the schedule is."""


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


TORCH_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    PLAIN["pre_norms"],
    PLAIN["parallel_residual"],
    HEAD_NORMS,
    PLAIN["attn_output_gate"],
)


def runner_objection(model: ModelSpec, training: TrainingSpec) -> str | None:
    """The reason why our own runner cannot build the model's layers; None where it can."""
    rule = first_broken(TORCH_MODEL_RULES, model, training, Shape())
    return None if rule is None else f"{rule.reason}: {rule.message(model, training, Shape())}"
