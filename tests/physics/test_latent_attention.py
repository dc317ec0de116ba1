"""Latent attention: keys are wider than values, the backward meets keys three times and values twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.physics.kernels import attention_s
from planner.physics.layers import decoder_layer
from planner.physics.memory import transient_bytes, working_set
from planner.physics.operators import Operator, operators_of
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec, HardwareSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

HEADS, QK_DIM, V_DIM = 128, 192, 128
MODEL, MEGATRON = load_model("deepseek-v3"), load_runtime("megatron")


def operator(name: str, shape: Shape) -> Operator:
    """An operator of a DeepSeek-V3 layer with experts."""
    layer = decoder_layer(MODEL, MODEL.layers[-1], shape, MEGATRON)
    return next(op for op in operators_of(layer) if op.name == name)


def test_the_core_has_the_dimensions_of_queries_and_of_values() -> None:
    core = operator("attention", Shape.of(seq_length=4096))
    assert (core.qk_dim, core.v_dim, core.heads, core.kv_heads) == (QK_DIM, V_DIM, HEADS, HEADS)


def test_a_backward_counts_queries_and_keys_three_times_and_values_twice() -> None:
    core = operator("attention", Shape.of(seq_length=4096))
    square = 2 * HEADS * 4096 * 4096 / 2
    assert core.forward_flops == square * (QK_DIM + V_DIM)
    assert core.backward_flops == square * (3 * QK_DIM + 2 * V_DIM)


def test_a_backward_takes_as_long_as_its_flops() -> None:
    """Against equally wide values, on a GPU whose rate does not depend on the width and that starts at once."""
    block = {"half_head_dim": 0.0, "wide_factor": 1.0, "head_dim_multiple": 64}
    h100 = load_hardware("h100")
    even = h100.efficiency.attention.model_copy(update=block)
    hardware: HardwareSpec = h100.model_copy(
        update={"efficiency": h100.efficiency.model_copy(update={"cudnn": even, "launch_us": 0.0})}
    )
    core = operator("attention", Shape.of(seq_length=4096))
    narrow, wide = (attention_s(op, hardware) for op in (core, replace(core, v_dim=QK_DIM)))
    assert narrow[0] / wide[0] == pytest.approx((QK_DIM + V_DIM) / (2 * QK_DIM))
    assert narrow[1] / wide[1] == pytest.approx((3 * QK_DIM + 2 * V_DIM) / (5 * QK_DIM))


def test_bytes_of_a_ring_follow_the_width_of_what_they_hold() -> None:
    """Four ranks: outputs are merged in the forward, gradients of queries, keys and values in the backward."""
    shape, rows = Shape.of(cp=4, seq_length=8192), 2048 * HEADS
    others = 0.75 * 3
    merged = operator("merge blocks", shape)
    assert merged.forward_bytes == 2 * rows * V_DIM * (2 + 3 * others)
    assert merged.backward_bytes == 2 * rows * (QK_DIM * (2 + 3 * others) + (QK_DIM + V_DIM) * 3 * (1 + others))
    # every block's keys, values and output, beside which queries, outputs and their gradients take less
    held = sum(one.num_bytes for one in working_set(operator("attention", shape), MEGATRON))
    assert held == max(2 * 8192 * HEADS * (QK_DIM + 2 * V_DIM), 2 * 2 * (QK_DIM + V_DIM) * 2 * rows)


def test_a_backward_needs_no_room_for_what_it_has_freed() -> None:
    """Attention needs 2.5 GiB for a moment, when what the layer kept behind it is free again: the layer 1.07 more."""
    layer = operators_of(decoder_layer(MODEL, MODEL.layers[-1], Shape.of(seq_length=8192), MEGATRON))
    needed = [float(sum(one.num_bytes for one in working_set(op, MEGATRON))) for op in layer]
    assert max(needed) == 2 * 2 * (QK_DIM + V_DIM) * 8192 * 2 * HEADS == 2.5 * GIB
    freed = [sum(op.saved_bytes() for op in layer[place + 1 :]) for place in range(len(layer))]
    expected = max(now - before for now, before in zip(needed, freed, strict=True))
    assert transient_bytes(layer, MEGATRON) == pytest.approx(expected)
    assert transient_bytes(layer, MEGATRON) == pytest.approx(1.073 * GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "field"), [("70b", "tp_overlap_fraction"), ("deepseek-v3", "mla_tp_overlap_fraction")]
)
def test_exchanges_hide_behind_products_as_far_as_the_kind_of_attention_allows(name: str, field: str) -> None:
    """Megatron-LM has no user buffers for the projections of latent attention: each has a share of its own."""
    model, none = load_model(name), {"tp_overlap_fraction": 0.0, "mla_tp_overlap_fraction": 0.0}
    other = next(key for key in none if key != field)

    def shown_s(**fractions: float) -> float:
        pricing = Pricing(
            model=model,
            training=TrainingSpec(seq_length=16_384, global_batch_size=64),
            cluster=ClusterSpec(hardware=load_hardware("h100"), num_gpus=64),
            runtime=MEGATRON.model_copy(update=none | fractions),
        )
        shape = Shape.of(tp=4, dp=16, ep=1, seq_length=16_384, sequence_parallel=1)
        return float(pricing.table(shape, ("none",)).layers[model.layers[0], "none"].tp_forward_s)

    assert shown_s(**{other: 0.8}) == shown_s()
    assert shown_s(**{field: 0.8}) < 0.8 * shown_s()
