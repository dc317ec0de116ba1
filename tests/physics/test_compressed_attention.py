"""DeepSeek-V4's layers held against closed forms: FLOPs, split parameters, streams of the residual; published runs."""

from __future__ import annotations

import pytest

from planner.layout.evaluate import evaluate
from planner.physics.layers import decoder_layer, head, model_totals
from planner.physics.operators import num_parameters, operators_of
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import LayerKind
from planner.specs.model_parts import AttentionKind
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

FLASH, MEGATRON = load_model("deepseek-v4-flash"), load_runtime("megatron")
SEQ = 4096
HIDDEN, HEADS, WIDTH, RANK = 4096, 64, 512, 1024


def attended(keys: float, window: float) -> float:
    """Keys that the mean query meets: half of all, or a window of them less its corner."""
    width = min(window, keys)
    return width * (1 - width / keys / 2)


def expected_flops(kind: AttentionKind) -> float:
    """FLOPs of a token's forward through attention: products by weights, scores and values, the indexer."""
    weights = HIDDEN * RANK + RANK * HEADS * WIDTH + HIDDEN * WIDTH  # queries, the key head
    weights += HEADS * WIDTH * RANK + 8 * RANK * HIDDEN  # output, in groups
    scores = 4 * HEADS * WIDTH * attended(SEQ, 128)
    if kind == "heavily_compressed":
        weights += 2 * HIDDEN * WIDTH
        scores += 4 * HEADS * WIDTH * attended(SEQ / 128, SEQ / 128)
    if kind == "compressed_sparse":
        weights += 2 * HIDDEN * 2 * WIDTH + 2 * HIDDEN * 2 * 128 + RANK * 64 * 128 + HIDDEN * 64
        scores += 4 * HEADS * WIDTH * attended(SEQ / 4, 512) + 2 * 64 * 128 * attended(SEQ / 4, SEQ / 4)
    return 2 * weights + scores


@pytest.mark.parametrize("kind", ["sliding", "compressed_sparse", "heavily_compressed"])
def test_flops_of_attention_are_those_of_its_products(kind: AttentionKind) -> None:
    layer = decoder_layer(FLASH, LayerKind(kind, "moe"), Shape(seq_length=SEQ), MEGATRON)
    names = [operator.name for operator in operators_of(layer)]
    own = operators_of(layer)[: names.index("attention output") + 1]
    flops = sum(operator.forward_flops for operator in own if "maps" not in operator.name)
    assert flops / SEQ == pytest.approx(expected_flops(kind), rel=1e-12)


def test_model_flops_are_those_that_megatron_bridge_reports() -> None:
    # docs/performance-summary.md of Megatron-Bridge (067f987d): 706 TFLOP/s at 7,776 tokens/s of a GB200
    assert model_totals(FLASH, MEGATRON, SEQ).model_flops_per_token == pytest.approx(706e12 / 7776, rel=0.005)


def test_heads_are_split_over_tensor_parallel_ranks_and_the_key_head_is_not() -> None:
    shapes = (Shape(seq_length=SEQ), Shape(seq_length=SEQ, tp=4))
    layers = (decoder_layer(FLASH, LayerKind("heavily_compressed", "moe"), shape, MEGATRON) for shape in shapes)
    whole, split = (num_parameters(layer, expert=False) for layer in layers)
    of_heads = RANK * HEADS * WIDTH + HEADS * WIDTH * RANK + 8 * RANK * HIDDEN + HEADS
    assert whole - split == of_heads * 3 / 4 + 3 * HIDDEN * 2048 * 3 / 4  # and the shared expert


def test_four_streams_are_kept_and_sent_where_a_plain_residual_is_one() -> None:
    plain = FLASH.model_copy(update={"num_residual_streams": 1})
    shape, cluster = Shape(seq_length=SEQ, pp=2), ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
    training = TrainingSpec(seq_length=SEQ, global_batch_size=64)
    one, four = (
        Pricing(model=model, cluster=cluster, training=training, runtime=MEGATRON).exchanges.p2p_s(shape)
        for model in (plain, FLASH)
    )
    assert four > 3 * one
    extra = num_parameters(head(FLASH, shape, MEGATRON)) - num_parameters(head(plain, shape, MEGATRON))
    assert extra == 4 * 4 * HIDDEN + 4 + 1
    maps = (2 + 4) * 4
    layer = operators_of(decoder_layer(FLASH, FLASH.kinds[0], shape, MEGATRON))
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
