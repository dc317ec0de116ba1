"""What 8- and 4-bit recipes keep and compute: which tensors are cast, and what stays in 16 bits."""

from __future__ import annotations

import pytest

from planner.physics import compute, kernels, memory
from planner.physics.communication import collective_s, exchange_s
from planner.physics.layers import decoder_layer, head
from planner.physics.operators import (
    NARROW_BYTES,
    Operator,
    Saved,
    collectives_of,
    operators_of,
    saved_bytes,
    wide_parameters,
)
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

MEGATRON = load_runtime("megatron")
SHAPE = Shape(dp=8, shard_size=8, seq_length=4096)


def priced(dtype: str, hardware: str, runtime: str = "megatron", **changes: object) -> Pricing:
    return Pricing(
        model=load_model("llama-3.1-8b"),
        training=TrainingSpec.model_validate({"seq_length": 4096, "global_batch_size": 64, "dtype": dtype}),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=8),
        runtime=load_runtime(runtime).model_copy(update=changes),
    )


@pytest.mark.parametrize(
    ("dtype", "hardware", "runtime", "zero_stage", "bytes_per_weight"),
    [
        ("bf16", "b200", "megatron", 1, 2),
        ("fp8", "h100", "megatron", 1, 2),  # as it is and transposed
        ("fp8", "b200", "megatron", 1, 1),  # products of either orientation
        ("mxfp8", "b200", "megatron", 1, 2 * 33 / 32),  # scales run along rows
        ("nvfp4", "b200", "megatron", 1, 2 * 9 / 16),
        ("mxfp8", "b200", "megatron", 0, 2 + 2 * 33 / 32),  # no sharded optimizer to cast for
        ("fp8", "h100", "torch-eager", 1, 2 + 2),
        ("fp8", "h100", "torchtitan", 3, 4 / 8),  # fp32 shards, cast in every pass
    ],
)
def test_bytes_of_weights(dtype: str, hardware: str, runtime: str, zero_stage: int, bytes_per_weight: float) -> None:
    pricing = priced(dtype, hardware, runtime)
    shape = Shape(dp=8, shard_size=8, seq_length=4096, zero_stage=zero_stage)
    (kind,) = pricing.model.kinds
    part = pricing.table(shape).layers[kind, "none"]
    norms = 2 * 4096
    wide_bytes = pricing.runtime.weight_bytes / (8 if zero_stage == 3 else 1)
    assert part.wide_parameters == norms
    assert part.weights_bytes == pytest.approx((part.parameters - norms) * bytes_per_weight + norms * wide_bytes)


def test_embedding_and_head_stay_in_16_bits() -> None:
    table = priced("mxfp8", "b200").table(SHAPE)
    for part in (table.embedding, table.head):
        assert part.wide_parameters == part.parameters
        assert part.weights_bytes == 2 * part.parameters


def test_the_head_is_computed_in_16_bits() -> None:
    pricing = priced("fp8", "h100")
    (product,) = (op for op in operators_of(head(pricing.model, SHAPE, MEGATRON)) if op.kind == "gemm")
    hardware = pricing.cluster.hardware
    narrow, wide = (compute.operator_seconds(product, hardware, dtype, MEGATRON) for dtype in ("fp8", "bf16"))
    assert narrow == wide


def test_routers_stay_in_16_bits() -> None:
    model = load_model("qwen3-30b-a3b")
    layer = operators_of(decoder_layer(model, model.layers[0], SHAPE, MEGATRON))
    assert [op.name for op in layer if op.kind == "gemm" and not op.is_cast] == ["router"]
    assert wide_parameters(layer) == 128 * 2048 + 2 * 2048 + 2 * 128


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", "nvfp4"])
def test_saved_bytes_of_a_dense_layer(dtype: str) -> None:
    """Inputs of norms, qkv, the core's output with its cast copy, gate and up; cast inputs of the four kernels."""
    model = load_model("llama-3.1-8b")
    hidden, kv, intermediate, heads = 4096, 1024, 14336, 32
    kept = 2 * (2 * hidden + (hidden + 2 * kv) + hidden + 2 * intermediate) + 4 * (heads + 2)
    cast = NARROW_BYTES[dtype] * (3 * hidden + intermediate)
    layer = decoder_layer(model, model.layers[0], SHAPE, MEGATRON)
    assert saved_bytes(layer, dtype=dtype) == pytest.approx(4096 * (kept + cast))
    assert saved_bytes(layer) == 4096 * (kept + 2 * (2 * hidden + intermediate))


def test_a_recomputed_module_keeps_no_cast_copy_either() -> None:
    op = Operator(name="x", kind="gemm", saved=(Saved("input", (32,), ("mlp",), cast_copy=True),))
    assert op.saved_bytes(dtype="fp8") == 32
    assert op.saved_bytes(frozenset({"mlp"}), "fp8") == 0
    assert op.saved_bytes() == 0


@pytest.mark.parametrize(("runtime", "dtype", "expected"), [
    (MEGATRON, "bf16", 4), (MEGATRON, "mxfp8", 2), (MEGATRON.with_features({"fp32_grad_accum": True})[0], "mxfp8", 4),
    (MEGATRON.with_features({"fp32_grad_accum": False})[0], "bf16", 2), (load_runtime("torch-eager"), "fp8", 4),
])  # fmt: skip
def test_bytes_of_main_gradients(runtime: RuntimeSpec, dtype: str, expected: int) -> None:
    resolved = runtime.in_dtype(dtype, "blackwell")
    assert memory.gradients_bytes(10, 0, SHAPE, resolved) == 10 * expected


def test_what_products_take_in_is_sent_as_they_take_it() -> None:
    """All-gathers before products carry the cast values; reduce-scatters, and what the head takes, 16 bits."""
    model, shape = load_model("llama-3.1-8b"), Shape(tp=4, sequence_parallel=1, seq_length=4096)
    cluster = ClusterSpec(hardware=load_hardware("b200"), num_gpus=8)
    latency_s = 3 * cluster.tiers[0].latency_s
    kinds = set()
    for items, cast in (
        (decoder_layer(model, model.layers[0], shape, MEGATRON), True),
        (head(model, shape, MEGATRON), False),
    ):
        for exchange in collectives_of(items):
            wide, narrow = (float(exchange_s(exchange, shape, cluster, dtype)) for dtype in ("bf16", "mxfp8"))
            if exchange.kind == "all_gather" and cast:
                assert (narrow - latency_s) * (wide > 0) == pytest.approx((wide - latency_s) * (wide > 0) * 33 / 64)
                kinds.add(exchange.name.split()[-1])
            elif exchange.kind != "all_gather" or exchange.name != "head grad gather":
                assert narrow == wide, exchange.name
    assert kinds == {"gather", "again"}


def test_scales_of_rows_are_sent_with_16_bits_and_cast_by_every_rank() -> None:
    shape = Shape(tp=8, sequence_parallel=1, seq_length=8192)
    sooner, later = (
        priced("fp8", "h100", narrow_exchanges=narrow, tp_overlap_fraction=0.0, host_factor=0.0).table(shape, ("none",))
        for narrow in (True, False)
    )
    (kind,) = sooner.layers
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    wide_s, narrow_s = (float(collective_s("all_gather", size * 8192 * 4096, 8, 1, cluster)) for size in (2, 1))
    more_s = later.layers[kind].tp_forward_s - sooner.layers[kind].tp_forward_s
    assert float(more_s) == pytest.approx(2 * (wide_s - narrow_s))
    assert later.layers[kind].forward_s > sooner.layers[kind].forward_s


def test_a_head_in_eight_bits_is_faster_where_products_are_narrow() -> None:
    wide, narrow = (priced("mxfp8", "gb200", narrow_head=on).table(SHAPE, ("none",)).head for on in (False, True))
    assert narrow.forward_s < 0.75 * wide.forward_s
    in_bf16 = (priced("bf16", "gb200", narrow_head=on).table(SHAPE, ("none",)).head for on in (False, True))
    assert len({part.forward_s for part in in_bf16}) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_trainers_own_narrow_kernels_slow_narrow_products_alone(dtype: str) -> None:
    product = Operator(name="x", kind="gemm", m=8192, n=4096, k=4096, parameters=4096 * 4096, modules=())
    hardware, times = load_hardware("h100"), []
    for factor in (1.0, 1.5):
        runtime = MEGATRON.model_copy(update={"narrow_factor": factor, "casts_weights": False})
        seconds = compute.operator_seconds(product, hardware, dtype, runtime)
        cast = kernels.cast_s(product, hardware, dtype, runtime)
        times.append(seconds.forward_s - cast.forward_s)
    assert times[1] == pytest.approx(times[0] * (1.5 if dtype == "fp8" else 1.0))
