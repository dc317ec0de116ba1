"""Adapters of Megatron: split over tensor-parallel ranks, their exchanges, and frozen weights in 8 bits."""

from __future__ import annotations

import pytest

from planner.physics.adapters import adapted
from planner.physics.kernels import cast_s
from planner.physics.layers import decoder_layer
from planner.physics.operators import (
    Collective,
    Item,
    Operator,
    collectives_of,
    num_parameters,
    operators_of,
    saved_bytes,
)
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, Dtype, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

MODEL = load_model("llama-2-70b")
ATTENTION = AdapterSpec(rank=16, targets=("attention",), dropout=0.1)
TP, TOKENS, HIDDEN = 4, 8192, 8192
DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")


def _runtime(**fields: object) -> RuntimeSpec:
    return load_runtime("megatron").for_adapters(ATTENTION).model_copy(update=fields)


def _layer(tp: int, adapters: AdapterSpec | None = ATTENTION, **fields: object) -> tuple[Item, ...]:
    shape = Shape.of(tp=tp, seq_length=TOKENS, sequence_parallel=1 if tp > 1 else 0)
    runtime = _runtime(**fields)
    return adapted(decoder_layer(MODEL, MODEL.kinds[0], shape, runtime), adapters, runtime, shape)


def _exchange(items: tuple[Item, ...], name: str) -> Collective:
    return next(each for each in collectives_of(items) if each.name == name)


def _pricing(dtype: Dtype, hardware: str, adapters: AdapterSpec | None, **fields: object) -> Pricing:
    return Pricing(
        model=MODEL,
        training=TrainingSpec(seq_length=TOKENS, global_batch_size=8, dtype=dtype, adapters=adapters),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=8),
        runtime=load_runtime("megatron").model_copy(update=fields),
    )


def test_ranks_share_all_of_every_adapter() -> None:
    whole, shares = (float(num_parameters(_layer(tp), trained=True)) for tp in (1, TP))
    assert shares * TP == whole == 16 * ((8192 + 10240) + (8192 + 8192))


def test_an_adapter_that_other_trainers_have_is_whole_on_every_rank() -> None:
    split, whole = (float(num_parameters(_layer(TP, splits_adapters=splits), trained=True)) for splits in (True, False))
    assert whole > 2 * split


def test_a_row_parallel_adapter_trades_columns_for_tokens_or_gathers_all() -> None:
    gathered = _exchange(_layer(TP), "attention output adapter output")
    traded = _exchange(_layer(TP, adapters_all_to_all=True), "attention output adapter output")
    assert (gathered.kind, traded.kind) == ("all_gather", "all_to_all")
    assert gathered.num_bytes == 2 * TOKENS * HIDDEN == TP * traded.num_bytes
    hidden = _exchange(_layer(TP), "qkv adapter hidden")
    assert hidden.num_bytes == 2 * TOKENS * 16


def test_nothing_is_gathered_again_for_weights_that_are_frozen() -> None:
    names = {each.name for each in collectives_of(_layer(TP, None))}
    again = {name for name in names if name.endswith("gather again")}
    assert again == {"qkv gather again", "mlp up gather again"}
    assert not again & {each.name for each in collectives_of(_layer(TP))}


def test_the_input_of_a_target_is_gathered_in_16_bits_and_shown() -> None:
    items = _layer(TP)
    target, other = _exchange(items, "qkv gather"), _exchange(items, "mlp up gather")
    assert (target.cast, target.overlap) == (False, "none")
    assert (other.cast, other.overlap) == (True, "tp")


def test_one_rank_exchanges_nothing_for_its_adapters() -> None:
    pricing = _pricing("fp8", "h100", ATTENTION)
    shape = Shape.of(tp=1, seq_length=TOKENS)
    exchanged = [float(each.exchanged_s) for each in pricing.passes.each_exchange(_layer(1), shape)]
    assert exchanged
    assert not any(exchanged)


def test_ranks_do_not_wait_for_each_other_again_for_an_adapter() -> None:
    """All that an exchange of 256 KiB takes is its bytes and hops, once the product's own has made ranks wait."""
    pricing = _pricing("fp8", "h100", ATTENTION)
    shape = Shape.of(tp=TP, seq_length=TOKENS, sequence_parallel=1)
    seconds = {e.exchange.name: float(e.exchanged_s) for e in pricing.passes.each_exchange(_layer(TP), shape)}
    waited_s = pricing.runtime.collective_sync_us * 1e-6
    assert 0 < seconds["qkv adapter hidden"] < waited_s < seconds["qkv gather"]


@pytest.mark.parametrize(("dtype", "each_bytes"), [("bf16", 2.0), ("fp8", 1.0), ("mxfp8", 1 + 1 / 32)])
def test_frozen_weights_are_kept_in_the_dtype_that_products_read(dtype: Dtype, each_bytes: float) -> None:
    pricing = _pricing(dtype, "b200", ATTENTION)
    layer = pricing.table(Shape.of(tp=1, seq_length=TOKENS, zero_stage=1)).layers[MODEL.kinds[0], "none"]
    frozen = float(layer.frozen_parameters)
    assert float(layer.weights_bytes) == pytest.approx(each_bytes * frozen, rel=0.01)


def test_weights_in_4_bits_stay_so_under_an_8_bit_recipe() -> None:
    packed = AdapterSpec(rank=16, base_bits=4)
    layers = [
        _pricing(dtype, "h100", packed).table(Shape.of(tp=1, seq_length=TOKENS)).layers[MODEL.kinds[0], "none"]
        for dtype in DTYPES
    ]
    assert float(layers[0].weights_bytes) == pytest.approx(float(layers[1].weights_bytes), rel=0.01)


def _up(trained: bool) -> Operator:
    layer = _layer(1, None if trained else ATTENTION)
    return next(op for op in operators_of(layer) if op.name == "mlp up")


def test_a_frozen_product_casts_no_transposed_copies() -> None:
    hopper = load_hardware("h100")
    kept = _runtime(transposes_frozen=False)
    frozen, trained = (cast_s(_up(trained), hopper, "fp8", kept) for trained in (False, True))
    assert frozen.forward_s < trained.forward_s
    assert frozen.dgrad_s < trained.dgrad_s


def test_a_frozen_weight_is_transposed_for_its_gradient_only_where_rows_are_all_that_is_multiplied() -> None:
    turned, kept = _runtime(transposes_frozen=True), _runtime(transposes_frozen=False)
    hopper = load_hardware("h100")
    frozen = _up(trained=False)
    more_s = cast_s(frozen, hopper, "fp8", turned).dgrad_s - cast_s(frozen, hopper, "fp8", kept).dgrad_s
    least_s = float(2 * frozen.n * frozen.k) / hopper.hbm_bytes_per_s
    assert least_s < more_s < 2 * least_s
    blackwell = turned.in_dtype("fp8", "blackwell")
    assert cast_s(frozen, hopper, "fp8", blackwell).dgrad_s == cast_s(frozen, hopper, "fp8", kept).dgrad_s


def test_an_adapter_reads_16_bits_whatever_products_read() -> None:
    """Without dropout it shares its input with whatever made it, which then keeps 16 bits and no 8-bit copy."""
    plain = AdapterSpec(rank=16, targets=("attention",))
    norm = next(op for op in operators_of(_layer(1, plain)) if op.name == "attention norm")
    assert float(norm.saved_bytes(dtype="fp8")) == float(norm.saved_bytes(dtype="bf16"))
    assert not any(tensor.cast_copy for op in operators_of(_layer(1, plain)) for tensor in op.saved)


def test_masks_that_are_drawn_again_are_not_kept() -> None:
    kept, again = (float(saved_bytes(_layer(1, recomputes_adapter_masks=drawn))) for drawn in (False, True))
    assert kept - again == 2 * TOKENS * HIDDEN
