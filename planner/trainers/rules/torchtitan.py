"""Rules of torchtitan (0.3.0, and main of August 2026) on shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.trainers.rules.common import EXPERT_WIDTH, EXPERTS, Rule, no_multiple
from planner.trainers.rules.torch import FULL_PIPELINE, INTERLEAVED_RULES, TORCH_RULES, UNTIED


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
"""Constraints whatever the schedule is."""

TORCHTITAN_RULES: tuple[Rule, ...] = (
    *TORCHTITAN_LAYOUT_RULES,
    FULL_PIPELINE,
    *INTERLEAVED_RULES,
)
"""Constraints for 1F1B at vpp 1 and interleaved 1F1B above."""
