"""Seconds of expert exchanges: what hides behind another micro-batch, and what that costs the products beside it.

Latent attention: keys are wider than values, the backward meets keys three times and values twice.
DeepSeek-V4's layers held against closed forms: FLOPs, split parameters, streams of the residual; published runs.
Prices of layers of every kind are those of before, to nine digits (`scripts/pin`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pinned_numbers import prices

from planner.layout.evaluate import evaluate
from planner.physics.cost import PartCost
from planner.physics.kernels import attention_s
from planner.physics.layers import decoder_layer, head, model_totals
from planner.physics.memory import transient_bytes, working_set
from planner.physics.operators import Operator, num_parameters, operators_of
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec, HardwareSpec
from planner.specs.model import LayerKind
from planner.specs.model_parts import AttentionKind
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

OVERLAPPED = {"ep_overlap_fraction": 0.9, "ep_overlap_network_fraction": 0.8}
QUIET: dict[str, Any] = {"moe_kernels": 0.0, "expert_kernels": 0.0, "host_factor": 0.0}
"""A host that is never late."""


def pricing(hardware: str = "h100", model: str = "deepseek-v3", **fields: Any) -> Pricing:
    return Pricing(
        model=load_model(model),
        training=TrainingSpec(seq_length=4096, global_batch_size=1024),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=1024),
        runtime=load_runtime("megatron").model_copy(update=fields),
    )


def shape_of(ep: int, **sizes: Any) -> Shape:
    return Shape(**{"dp": ep, "ep": ep, "shard_size": ep, "seq_length": 4096, "num_microbatches": 64} | sizes)


def mixture(ep: int, mode: str = "none", hardware: str = "h100", **fields: Any) -> PartCost:
    """A layer with experts."""
    layers = pricing(hardware, **QUIET | fields).table(shape_of(ep)).layers
    return next(part for (kind, found), part in layers.items() if kind.mlp == "moe" and found == mode)


def exchanged_s(part: PartCost) -> float:
    return float(part.ep_forward_s + part.ep_backward_s)


@pytest.mark.parametrize("ep", [8, 64])
def test_the_shares_that_hide_are_those_of_the_tiers(ep: int) -> None:
    """Eight GPUs share NVLink; of 64, most of what is exchanged crosses the network."""
    still = {"deepep_sms": 0, "delays_weight_gradients": True}
    alone, inner, outer = (
        exchanged_s(mixture(ep, **still, ep_overlap_fraction=near, ep_overlap_network_fraction=far))
        for near, far in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5))
    )
    hidden_inner, hidden_outer = alone - inner, alone - outer
    if ep == 8:
        assert hidden_inner == pytest.approx(alone / 2)
        assert hidden_outer == 0.0
    else:
        assert hidden_inner + hidden_outer == pytest.approx(alone / 2)
        assert hidden_outer > 3 * hidden_inner > 0


def test_kernels_that_send_take_multiprocessors_from_the_products_beside_them() -> None:
    h100 = load_hardware("h100")
    none, all_of_them = (exchanged_s(mixture(8, **OVERLAPPED, deepep_sms=sms)) for sms in (0, 20))
    hidden_s = exchanged_s(mixture(8)) - none
    assert all_of_them - none == pytest.approx(20 / h100.num_sms * hidden_s)
    # NCCL's all-to-all has no such kernels
    plain = {"dispatcher": "alltoall", "sends_tokens_once": False}
    few, many = (exchanged_s(mixture(8, **OVERLAPPED, **plain, deepep_sms=sms)) for sms in (0, 20))
    assert few == many


@pytest.mark.parametrize(
    ("dispatcher", "once", "hardware", "runs"),
    [
        ("", True, "h100", "deepep"), ("", True, "gb200", "hybridep"), ("", False, "gb200", "alltoall"),
        ("hybridep", True, "h100", "hybridep"), ("alltoall", False, "gb200", "alltoall"),
    ],
)  # fmt: skip
def test_links_choose_the_dispatcher_that_no_recipe_names(
    dispatcher: str, once: bool, hardware: str, runs: str
) -> None:
    runtime = load_runtime("megatron").model_copy(update={"dispatcher": dispatcher, "sends_tokens_once": once})
    assert runtime.dispatcher_on(load_hardware(hardware)) == runs


def test_replayed_exchanges_show() -> None:
    """Nothing runs beside the forward that a recomputed layer repeats."""
    plain, full = (mixture(64, mode, **OVERLAPPED) for mode in ("none", "full"))
    alone = mixture(64)
    assert full.ep_backward_s - plain.ep_backward_s == pytest.approx(alone.ep_forward_s)
    assert plain.ep_forward_s < 0.5 * alone.ep_forward_s


def test_both_passes_together_hide_what_one_alone_would_not() -> None:
    """Forwards run beside backwards, which take twice as long."""
    slow = {"ep_row_bytes": 1.2e5, "deepep_sms": 0, "delays_weight_gradients": True}
    alone = mixture(8, **slow)
    forward_s, passes_s = alone.forward_s, alone.forward_s + alone.input_grad_s + alone.weight_grad_s
    assert forward_s < alone.ep_forward_s
    assert exchanged_s(alone) < passes_s
    assert exchanged_s(mixture(8, **slow, ep_overlap_fraction=1.0)) == pytest.approx(0.0, abs=1e-12)


def test_weight_gradients_that_do_not_wait_hide_no_late_exchange() -> None:
    slow = {**OVERLAPPED, "ep_row_bytes": 4.5e5}
    waiting, early = (exchanged_s(mixture(8, **slow, delays_weight_gradients=delays)) for delays in (True, False))
    assert waiting <= early


def test_the_first_and_the_last_micro_batches_have_nothing_beside_them() -> None:
    overlapped, alone = pricing(**OVERLAPPED), pricing()
    for pp in (1, 4):
        shape = shape_of(64, pp=pp)
        (hidden_s,) = {float(overlapped.tail_s(shape) - alone.tail_s(shape))}
        assert hidden_s == pytest.approx(float(overlapped.unpaired_s(shape)))
    one, four = (float(overlapped.unpaired_s(shape_of(64, pp=pp))) for pp in (1, 4))
    # a rank has a quarter of the layers, and four micro-batches of each
    assert four == pytest.approx(one) and one > 0  # noqa: PT018
    few = float(overlapped.unpaired_s(shape_of(64, pp=4, num_microbatches=2)))
    assert few == pytest.approx(one / 2)
    assert float(alone.unpaired_s(shape_of(64))) == 0.0
    assert float(pricing(model="llama-3.1-8b", **OVERLAPPED).unpaired_s(Shape(dp=8, seq_length=4096))) == 0.0


def test_unpaired_seconds_of_arrays_are_those_of_each_shape() -> None:
    overlapped = pricing(**OVERLAPPED)
    ranks = np.array([8, 64])
    both = Shape(dp=ranks, ep=ranks, shard_size=ranks, pp=np.array([1, 4]), seq_length=4096, num_microbatches=64)
    each = [overlapped.unpaired_s(shape_of(ep, pp=pp)) for ep, pp in ((8, 1), (64, 4))]
    assert overlapped.unpaired_s(both) == pytest.approx(np.array(each))


def test_shared_experts_hide_exchanges_as_long_as_they_take() -> None:
    alone, beside = (mixture(8, overlaps_shared_experts=on) for on in (False, True))
    assert 0 < exchanged_s(beside) < exchanged_s(alone)
    assert beside.forward_s == alone.forward_s
    # a whole micro-batch hides more, and the two exclude each other
    both = mixture(8, overlaps_shared_experts=True, **OVERLAPPED)
    assert both == mixture(8, **OVERLAPPED)


def test_graphs_take_the_host_time_of_what_they_replay() -> None:
    host = {"moe_kernels": 4000.0, "expert_kernels": 0.0, "host_factor": 1.3}
    eager, routing, both = (
        float(mixture(8, **host, graphed_modules=modules).forward_total_s)
        for modules in ((), ("moe_router", "moe_preprocess"), ("attn", "moe_router", "moe_preprocess"))
    )
    assert routing == pytest.approx(0.85 * eager)
    assert both == pytest.approx(0.6 * eager)
    overlapped = float(mixture(8, **host, **OVERLAPPED).forward_total_s)
    assert overlapped == pytest.approx(1.471 * eager)
    graphs = float(mixture(8, **host, **OVERLAPPED, graphed_modules=("moe_router",)).forward_total_s)
    assert graphs == pytest.approx(routing)


def test_fused_experts_need_no_passes_of_their_own() -> None:
    plain, fused = (mixture(8, hardware="b200", fuses_experts=on) for on in (False, True))
    assert fused.forward_s < plain.forward_s
    assert fused.input_grad_s < plain.input_grad_s
    assert fused.live_bytes == plain.live_bytes


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


FLASH, MEGATRON_OF_COMPRESSED_ATTENTION = load_model("deepseek-v4-flash"), load_runtime("megatron")
SEQ = 4096
HIDDEN, HEADS_OF_COMPRESSED_ATTENTION, WIDTH, RANK = 4096, 64, 512, 1024


def attended(keys: float, window: float) -> float:
    """Keys that the mean query meets: half of all, or a window of them less its corner."""
    width = min(window, keys)
    return width * (1 - width / keys / 2)


def expected_flops(kind: AttentionKind) -> float:
    """FLOPs of a token's forward through attention: products by weights, scores and values, the indexer."""
    weights = HIDDEN * RANK + RANK * HEADS_OF_COMPRESSED_ATTENTION * WIDTH + HIDDEN * WIDTH  # queries, the key head
    weights += HEADS_OF_COMPRESSED_ATTENTION * WIDTH * RANK + 8 * RANK * HIDDEN  # output, in groups
    scores = 4 * HEADS_OF_COMPRESSED_ATTENTION * WIDTH * attended(SEQ, 128)
    if kind == "heavily_compressed":
        weights += 2 * HIDDEN * WIDTH
        scores += 4 * HEADS_OF_COMPRESSED_ATTENTION * WIDTH * attended(SEQ / 128, SEQ / 128)
    if kind == "compressed_sparse":
        weights += 2 * HIDDEN * 2 * WIDTH + 2 * HIDDEN * 2 * 128 + RANK * 64 * 128 + HIDDEN * 64
        scores += 4 * HEADS_OF_COMPRESSED_ATTENTION * WIDTH * attended(SEQ / 4, 512) + 2 * 64 * 128 * attended(
            SEQ / 4, SEQ / 4
        )
    return 2 * weights + scores


@pytest.mark.parametrize("kind", ["sliding", "compressed_sparse", "heavily_compressed"])
def test_flops_of_attention_are_those_of_its_products(kind: AttentionKind) -> None:
    layer = decoder_layer(FLASH, LayerKind(kind, "moe"), Shape(seq_length=SEQ), MEGATRON_OF_COMPRESSED_ATTENTION)
    names = [operator.name for operator in operators_of(layer)]
    own = operators_of(layer)[: names.index("attention output") + 1]
    flops = sum(operator.forward_flops for operator in own if "maps" not in operator.name)
    assert flops / SEQ == pytest.approx(expected_flops(kind), rel=1e-12)


def test_model_flops_are_those_that_megatron_bridge_reports() -> None:
    # docs/performance-summary.md of Megatron-Bridge (067f987d): 706 TFLOP/s at 7,776 tokens/s of a GB200
    assert model_totals(FLASH, MEGATRON_OF_COMPRESSED_ATTENTION, SEQ).model_flops_per_token == pytest.approx(
        706e12 / 7776, rel=0.005
    )


def test_heads_are_split_over_tensor_parallel_ranks_and_the_key_head_is_not() -> None:
    shapes = (Shape(seq_length=SEQ), Shape(seq_length=SEQ, tp=4))
    layers = (
        decoder_layer(FLASH, LayerKind("heavily_compressed", "moe"), shape, MEGATRON_OF_COMPRESSED_ATTENTION)
        for shape in shapes
    )
    whole, split = (num_parameters(layer, expert=False) for layer in layers)
    of_heads = (
        RANK * HEADS_OF_COMPRESSED_ATTENTION * WIDTH
        + HEADS_OF_COMPRESSED_ATTENTION * WIDTH * RANK
        + 8 * RANK * HIDDEN
        + HEADS_OF_COMPRESSED_ATTENTION
    )
    assert whole - split == of_heads * 3 / 4 + 3 * HIDDEN * 2048 * 3 / 4  # and the shared expert


def test_four_streams_are_kept_and_sent_where_a_plain_residual_is_one() -> None:
    plain = FLASH.model_copy(update={"num_residual_streams": 1})
    shape, cluster = Shape(seq_length=SEQ, pp=2), ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
    training = TrainingSpec(seq_length=SEQ, global_batch_size=64)
    one, four = (
        Pricing(
            model=model, cluster=cluster, training=training, runtime=MEGATRON_OF_COMPRESSED_ATTENTION
        ).exchanges.p2p_s(shape)
        for model in (plain, FLASH)
    )
    assert four > 3 * one
    extra = num_parameters(head(FLASH, shape, MEGATRON_OF_COMPRESSED_ATTENTION)) - num_parameters(
        head(plain, shape, MEGATRON_OF_COMPRESSED_ATTENTION)
    )
    assert extra == 4 * 4 * HIDDEN + 4 + 1
    maps = (2 + 4) * 4
    layer = operators_of(decoder_layer(FLASH, FLASH.kinds[0], shape, MEGATRON_OF_COMPRESSED_ATTENTION))
    assert [op.parameters for op in layer if op.name.endswith(" maps")] == [maps * 4 * HIDDEN + maps + 3] * 2


@pytest.mark.parametrize(("hardware", "published_s"), [("gb200", 8.428), ("gb300", 7.969)])
def test_published_throughput_is_inside_the_interval(hardware: str, published_s: float) -> None:
    """Megatron-Bridge 26.08: 128 GPUs, mxfp8, EP 64, 7,776 and 8,224 tokens/s a GPU; nothing was fitted to them."""
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=128)
    training = TrainingSpec(seq_length=SEQ, global_batch_size=2048, dtype="mxfp8")
    runtime = load_runtime("bridge").with_features({"cuda_graph": "full_iteration", "ep_overlap": False})[0]
    plan = evaluate("deepseek-v4-flash", cluster, training, Parallelism(dp=128, ep=64), runtime=runtime)
    assert plan.step.step_s_interval is not None
    low_s, high_s = plan.step.step_s_interval
    assert low_s < published_s < high_s
    assert plan.step.step_s == pytest.approx(published_s, rel=0.2)


PINNED = json.loads((Path(__file__).parents[1] / "pinned" / "prices.json").read_text())


def test_prices_are_those_of_before() -> None:
    now = prices()
    assert now.keys() == PINNED.keys()
    changed = [name for name, values in now.items() if values != pytest.approx(PINNED[name], rel=1e-9)]
    assert not changed, f"{len(changed)} prices changed, such as {changed[0]}"
