"""Rules of Megatron-LM (core 0.20.0): shapes that its parser refuses, its config classes, or a step once it runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.shape import RANK_ORDERS, Shape
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import (
    DENSE_WIDTH,
    EXPERT_WIDTH,
    EXPERTS,
    HEADS,
    SHARED_EXPERT_WIDTH,
    Rule,
    no_multiple,
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
"""Constraints whatever the runtime's switches are."""

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
