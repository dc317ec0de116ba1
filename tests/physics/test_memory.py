"""What a backward needs for a moment."""

from __future__ import annotations

from planner.physics.layers import decoder_layer
from planner.physics.memory import transient_bytes
from planner.physics.operators import operators_of
from planner.physics.shape import Shape
from planner.specs.registry import load_model
from planner.specs.trainers import load_runtime


def test_gathered_keys_are_held_for_the_whole_sequence() -> None:
    """K and V of 8 heads and their gradients: 7/8 of them more where eight ranks gather instead of passing on."""
    model, shape = load_model("llama-3.1-8b"), Shape(cp=8, dp=1, seq_length=131072, shard_size=8)
    runtime = load_runtime("megatron")
    attention = [
        next(op for op in operators_of(decoder_layer(model, model.layers[0], shape, runtime)) if op.kind == "attention")
    ]
    ring, gathered = (
        transient_bytes(attention, runtime.model_copy(update={"cp_comm_type": kind})) for kind in ("p2p", "all_gather")
    )
    assert gathered - ring == 2 * 2 * (131072 - 131072 // 8) * 8 * (128 + 128)
