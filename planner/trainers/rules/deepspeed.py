"""Rules of DeepSpeed: the models that its export writes, and the ranks that it shards over."""

from __future__ import annotations

from planner.trainers.rules.common import HEADS, Rule, model_rule
from planner.trainers.rules.fine_tuning import WHOLE_MODEL_RULES
from planner.trainers.rules.layer_kinds import UNWRITTEN_RULES

DEEPSPEED_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    model_rule("moe", lambda model: model.moe is not None, lambda model: "only dense models are exported"),
    model_rule(
        "attention_chunk_size",
        lambda model: bool(model.attention_chunk_size),
        lambda model: "attention in chunks is not exported",
    ),
    model_rule(
        "mtp",
        lambda model: bool(model.num_nextn_predict_layers),
        lambda model: "multi-token prediction has no place in a list of layers",
    ),
)
DEEPSPEED_RULES: tuple[Rule, ...] = (
    HEADS,
    Rule(
        "vpp",
        lambda model, training, shape: shape.vpp == 1,
        lambda model, training, shape: f"one stage per rank, vpp is {shape.vpp}",
    ),
    Rule(
        "shard_size",
        lambda model, training, shape: (shape.zero_stage == 0) | (shape.shard_size == shape.dp),
        lambda model, training, shape: f"it shards over all {shape.dp} replicas, not {shape.shard_size}",
    ),
)
