"""What a backward needs for a moment."""

from __future__ import annotations

from dataclasses import replace

from planner.physics.layers import decoder_layer
from planner.physics.memory import gradients_bytes, transient_bytes, weights_bytes
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


def test_a_pipeline_sums_gradients_whole_until_its_last_micro_batch() -> None:
    """torch's stages let FSDP reduce gradients once a step: only then are they sharded (4 B each, of 1e9 over 8)."""
    titan = load_runtime("torchtitan")
    for zero_stage in (2, 3):
        alone = Shape(dp=8, zero_stage=zero_stage, shard_size=8)
        assert gradients_bytes(1e9, 0.0, alone, titan) == 4e9 / 8
        assert gradients_bytes(1e9, 0.0, replace(alone, pp=2), titan) == 4e9


def test_fp32_shards_with_weights_gathered_for_good() -> None:
    """FSDP2 keeps the fp32 masters sharded; ZeRO-2 there means 16-bit copies of all weights beside them."""
    titan, megatron = load_runtime("torchtitan"), load_runtime("megatron")
    for runtime, pp, zero_stage, expected in (
        (titan, 1, 3, 4e9 / 8),
        (titan, 2, 3, 4e9 / 8 + 2e9),
        (titan, 1, 2, 4e9 / 8 + 2e9),
        (titan, 1, 0, 4e9),
        (megatron, 1, 2, 2e9),
        (megatron, 1, 3, 2e9 / 8),
    ):
        shape = Shape(pp=pp, dp=8, zero_stage=zero_stage, shard_size=8)
        assert weights_bytes(1e9, 0.0, shape, runtime, "bf16") == expected
