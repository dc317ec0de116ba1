"""Objectives: what forwards without a gradient and a reference model add to seconds and bytes.

Frozen weights and adapters: parameters against peft's, what is kept and computed, and laws over rank and bits.
Adapters of Megatron: split over tensor-parallel ranks, their exchanges, and frozen weights in 8 bits.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tables import beside

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.physics.adapters import adapted
from planner.physics.kernels import cast_s
from planner.physics.layers import decoder_layer, model_totals
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
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import (
    AdapterSpec,
    Dtype,
    ObjectiveName,
    ObjectiveSpec,
    Parallelism,
    Reference,
    SearchLimits,
    TrainingSpec,
)
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

TABLES = beside(__file__)

CLUSTER = ClusterSpec(hardware=load_hardware("h200"), num_gpus=1)
LORA = AdapterSpec()


def _training(name: ObjectiveName, reference: Reference, adapters: AdapterSpec | None = LORA) -> TrainingSpec:
    objective = ObjectiveSpec(name=name, reference=reference)
    return TrainingSpec(seq_length=1024, global_batch_size=8, adapters=adapters, objective=objective)


def _pricing(name: ObjectiveName, reference: Reference, adapters: AdapterSpec | None = LORA) -> Pricing:
    training = _training(name, reference, adapters)
    return Pricing(model=load_model("8b"), training=training, cluster=CLUSTER, runtime=load_runtime("hf"))


def _evaluated(name: ObjectiveName, reference: Reference = "model", **training: AdapterSpec | None) -> Plan:
    return evaluate(
        load_model("8b"), CLUSTER, _training(name, reference, **training), Parallelism(micro_batch_size=2), runtime="hf"
    )


def test_log_probabilities_known_before_take_least_and_a_second_model_most() -> None:
    plans = [_evaluated("dpo", reference) for reference in ("precomputed", "adapters", "model")]
    steps = [each.best.step.step_s for each in plans]
    peaks = [each.best.stages[0].memory.total_bytes for each in plans]
    assert steps[0] < steps[1] == pytest.approx(steps[2])
    assert peaks[0] == peaks[1] < peaks[2]
    # a second copy of all weights in 16 bits
    weights = [each.best.stages[0].memory.weights_bytes for each in plans]
    assert weights[2] - weights[0] == pytest.approx(2 * 8_030_261_248)


@pytest.mark.parametrize(("fields", "bytes_each"), [({"critics": 1}, 2 + 4), ({"frozen_copies": 2}, 2 * 2)])
def test_models_beside_hold_weights_and_those_that_are_trained_states(fields: dict[str, int], bytes_each: int) -> None:
    totals = []
    for objective in (ObjectiveSpec(), ObjectiveSpec(**fields)):  # type: ignore[arg-type]
        training = TrainingSpec(seq_length=1024, global_batch_size=8, objective=objective)
        memory = evaluate(load_model("8b"), CLUSTER, training, Parallelism(), runtime="hf").best.stages[0].memory
        totals.append(memory.weights_bytes + memory.optimizer_bytes)
    assert totals[1] - totals[0] == pytest.approx(bytes_each * 8_030_261_248)


def test_without_a_reference_a_pair_costs_as_two_sequences() -> None:
    assert _evaluated("orpo").best.step.step_s == _evaluated("lm").best.step.step_s


def test_the_reference_is_as_narrow_as_the_frozen_weights() -> None:
    narrow, wide = (_evaluated("dpo", adapters=AdapterSpec(base_bits=bits)) for bits in (4, 16))
    plain = _evaluated("dpo", "adapters", adapters=AdapterSpec(base_bits=4))
    copied, whole = (
        each.best.stages[0].memory.weights_bytes - plain.best.stages[0].memory.weights_bytes for each in (narrow, wide)
    )
    assert 0.25 < copied / 16e9 < 0.4
    assert whole > copied


def test_a_reference_runs_each_layer_forward_once_without_adapters() -> None:
    shape = Shape.of(tp=1, seq_length=1024, micro_batch_size=2)
    with_reference, without = (
        next(iter(_pricing("dpo", reference).table(shape).layers.values())) for reference in ("adapters", "precomputed")
    )
    frozen_alone = next(iter(_pricing("lm", "model", None).table(shape).layers.values()))
    added_s = float(with_reference.forward_s) - float(without.forward_s)
    assert added_s == pytest.approx(float(frozen_alone.forward_s), rel=1e-6)
    assert float(with_reference.backward_total_s) == float(without.backward_total_s)
    assert float(with_reference.live_bytes) == float(without.live_bytes)


def test_kto_runs_three_forwards_without_a_gradient() -> None:
    shape = Shape.of(tp=1, seq_length=1024)
    plain, dpo, kto = (
        float(next(iter(_pricing(name, "model", None).table(shape).layers.values())).forward_s)
        for name in ("lm", "dpo", "kto")
    )
    assert kto - plain == pytest.approx(3 * (dpo - plain))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_reference_is_sharded_as_the_weights_are(zero_stage: int) -> None:
    def weights(reference: Reference, dp: int) -> float:
        shape = Shape.of(tp=1, dp=dp, seq_length=1024, zero_stage=zero_stage)
        table = _pricing("dpo", reference).table(shape)
        return float(next(iter(table.layers.values())).weights_bytes)

    copies = [weights("model", dp) - weights("precomputed", dp) for dp in (1, 4)]
    assert copies[0] / copies[1] == pytest.approx(4 if zero_stage == 3 else 1)


def test_sharded_weights_are_gathered_once_more_for_each_forward() -> None:
    shape = Shape.of(tp=1, dp=8, seq_length=1024, zero_stage=3)
    cluster = ClusterSpec(hardware=load_hardware("h200"), num_gpus=8)
    plain, dpo = (
        next(
            iter(
                Pricing(
                    model=load_model("8b"), training=_training(name, "model", None), cluster=cluster,
                    runtime=load_runtime("hf"),
                ).table(shape).layers.values()
            )
        )
        for name in ("lm", "dpo")
    )  # fmt: skip
    assert float(dpo.gather_s) == pytest.approx(1.5 * float(plain.gather_s))


def test_micro_batches_hold_whole_pairs() -> None:
    limits = SearchLimits(time_limit_s=20, top=3)
    found = plan(load_model("1b"), CLUSTER, _training("dpo", "adapters"), limits=limits, runtime="hf")
    layouts = [found.best, *found.alternatives]
    assert all(layout.parallelism.micro_batch_size % 2 == 0 for layout in layouts)


@pytest.mark.parametrize(("fields", "says"), TABLES["contradictions_are_refused"])
def test_contradictions_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainingSpec.model_validate({"seq_length": 8, **fields})


HF, MEGATRON = load_runtime("hf"), load_runtime("megatron")
SHAPE = Shape(tp=1, seq_length=2048)


def _layer(adapters: AdapterSpec | None, runtime_name: str = "hf") -> tuple[Item, ...]:
    model = load_model("8b")
    runtime = load_runtime(runtime_name).for_adapters(adapters)
    return adapted(decoder_layer(model, model.kinds[0], SHAPE, runtime), adapters, runtime)


@pytest.mark.parametrize(
    ("rank", "targets", "trainable"), TABLES["adapters_of_llama_8b_have_as_many_parameters_as_in_peft"]
)
def test_adapters_of_llama_8b_have_as_many_parameters_as_in_peft(
    rank: int, targets: tuple[str, ...], trainable: int
) -> None:
    totals = model_totals(load_model("8b"), HF, 2048, adapters=AdapterSpec(rank=rank, targets=targets))
    assert (totals.num_trained_parameters, totals.num_parameters) == (trainable, 8_030_261_248)


def test_without_adapters_all_parameters_are_trained() -> None:
    totals = model_totals(load_model("8b"), HF, 2048)
    assert totals.num_trained_parameters == totals.num_parameters


def test_frozen_products_have_no_weight_gradient() -> None:
    frozen = [op for op in operators_of(_layer(AdapterSpec())) if op.kind == "gemm" and not op.trained]
    assert frozen
    assert all(op.backward_flops == op.gemm_flops for op in frozen)


def test_the_input_of_a_product_without_an_adapter_is_not_kept() -> None:
    both, attention_only = (
        float(saved_bytes(_layer(AdapterSpec(targets=targets), "megatron")))
        for targets in (("attention", "mlp"), ("attention",))
    )
    rows, hidden, width, rank = 2048, 4096, 14336, 16
    # the MLP norm's output, the activation, and the adapters' hidden rows
    assert both - attention_only == pytest.approx(2 * rows * (hidden + width + 2 * rank))


@given(rank=st.integers(1, 512), dropout=st.sampled_from([0.0, 0.05]))
def test_a_larger_rank_trains_and_keeps_more(rank: int, dropout: float) -> None:
    small, large = (_layer(AdapterSpec(rank=each, dropout=dropout)) for each in (rank, rank + 1))
    assert num_parameters(large, trained=True) > num_parameters(small, trained=True)
    assert num_parameters(large, trained=False) == num_parameters(small, trained=False)
    assert float(saved_bytes(large)) > float(saved_bytes(small))


def test_narrower_frozen_weights_take_fewer_bytes() -> None:
    runtimes = [MEGATRON.for_adapters(AdapterSpec(base_bits=bits)) for bits in (4, 8, 16)]
    widths = [runtime.frozen_weight_bytes for runtime in runtimes]
    assert widths == sorted(widths)
    assert widths[-1] == 2


MODEL = load_model("llama-2-70b")
ATTENTION = AdapterSpec(rank=16, targets=("attention",), dropout=0.1)
TP, TOKENS, HIDDEN = 4, 8192, 8192
DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")


def _runtime(**fields: object) -> RuntimeSpec:
    return load_runtime("megatron").for_adapters(ATTENTION).model_copy(update=fields)


def layer_of_adapter_split(tp: int, adapters: AdapterSpec | None = ATTENTION, **fields: object) -> tuple[Item, ...]:
    shape = Shape.of(tp=tp, seq_length=TOKENS, sequence_parallel=1 if tp > 1 else 0)
    runtime = _runtime(**fields)
    return adapted(decoder_layer(MODEL, MODEL.kinds[0], shape, runtime), adapters, runtime, shape)


def _exchange(items: tuple[Item, ...], name: str) -> Collective:
    return next(each for each in collectives_of(items) if each.name == name)


def pricing_of_adapter_split(dtype: Dtype, hardware: str, adapters: AdapterSpec | None, **fields: object) -> Pricing:
    return Pricing(
        model=MODEL,
        training=TrainingSpec(seq_length=TOKENS, global_batch_size=8, dtype=dtype, adapters=adapters),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=8),
        runtime=load_runtime("megatron").model_copy(update=fields),
    )


def test_ranks_share_all_of_every_adapter() -> None:
    whole, shares = (float(num_parameters(layer_of_adapter_split(tp), trained=True)) for tp in (1, TP))
    assert shares * TP == whole == 16 * ((8192 + 10240) + (8192 + 8192))


def test_an_adapter_that_other_trainers_have_is_whole_on_every_rank() -> None:
    split, whole = (
        float(num_parameters(layer_of_adapter_split(TP, splits_adapters=splits), trained=True))
        for splits in (True, False)
    )
    assert whole > 2 * split


def test_a_row_parallel_adapter_trades_columns_for_tokens_or_gathers_all() -> None:
    gathered = _exchange(layer_of_adapter_split(TP), "attention output adapter output")
    traded = _exchange(layer_of_adapter_split(TP, adapters_all_to_all=True), "attention output adapter output")
    assert (gathered.kind, traded.kind) == ("all_gather", "all_to_all")
    assert gathered.num_bytes == 2 * TOKENS * HIDDEN == TP * traded.num_bytes
    hidden = _exchange(layer_of_adapter_split(TP), "qkv adapter hidden")
    assert hidden.num_bytes == 2 * TOKENS * 16


def test_nothing_is_gathered_again_for_weights_that_are_frozen() -> None:
    names = {each.name for each in collectives_of(layer_of_adapter_split(TP, None))}
    again = {name for name in names if name.endswith("gather again")}
    assert again == {"qkv gather again", "mlp up gather again"}
    assert not again & {each.name for each in collectives_of(layer_of_adapter_split(TP))}


def test_the_input_of_a_target_is_gathered_in_16_bits_and_shown() -> None:
    items = layer_of_adapter_split(TP)
    target, other = _exchange(items, "qkv gather"), _exchange(items, "mlp up gather")
    assert (target.cast, target.overlap) == (False, "none")
    assert (other.cast, other.overlap) == (True, "tp")


def test_one_rank_exchanges_nothing_for_its_adapters() -> None:
    pricing = pricing_of_adapter_split("fp8", "h100", ATTENTION)
    shape = Shape.of(tp=1, seq_length=TOKENS)
    exchanged = [float(each.exchanged_s) for each in pricing.passes.each_exchange(layer_of_adapter_split(1), shape)]
    assert exchanged
    assert not any(exchanged)


def test_ranks_do_not_wait_for_each_other_again_for_an_adapter() -> None:
    """All that an exchange of 256 KiB takes is its bytes and hops, once the product's own has made ranks wait."""
    pricing = pricing_of_adapter_split("fp8", "h100", ATTENTION)
    shape = Shape.of(tp=TP, seq_length=TOKENS, sequence_parallel=1)
    seconds = {
        e.exchange.name: float(e.exchanged_s) for e in pricing.passes.each_exchange(layer_of_adapter_split(TP), shape)
    }
    waited_s = pricing.runtime.collective_sync_us * 1e-6
    assert 0 < seconds["qkv adapter hidden"] < waited_s < seconds["qkv gather"]


@pytest.mark.parametrize(("dtype", "each_bytes"), [("bf16", 2.0), ("fp8", 1.0), ("mxfp8", 1 + 1 / 32)])
def test_frozen_weights_are_kept_in_the_dtype_that_products_read(dtype: Dtype, each_bytes: float) -> None:
    pricing = pricing_of_adapter_split(dtype, "b200", ATTENTION)
    layer = pricing.table(Shape.of(tp=1, seq_length=TOKENS, zero_stage=1)).layers[MODEL.kinds[0], "none"]
    frozen = float(layer.frozen_parameters)
    assert float(layer.weights_bytes) == pytest.approx(each_bytes * frozen, rel=0.01)


def test_weights_in_4_bits_stay_so_under_an_8_bit_recipe() -> None:
    packed = AdapterSpec(rank=16, base_bits=4)
    layers = [
        pricing_of_adapter_split(dtype, "h100", packed)
        .table(Shape.of(tp=1, seq_length=TOKENS))
        .layers[MODEL.kinds[0], "none"]
        for dtype in DTYPES
    ]
    assert float(layers[0].weights_bytes) == pytest.approx(float(layers[1].weights_bytes), rel=0.01)


def _up(trained: bool) -> Operator:
    layer = layer_of_adapter_split(1, None if trained else ATTENTION)
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
    norm = next(op for op in operators_of(layer_of_adapter_split(1, plain)) if op.name == "attention norm")
    assert float(norm.saved_bytes(dtype="fp8")) == float(norm.saved_bytes(dtype="bf16"))
    assert not any(tensor.cast_copy for op in operators_of(layer_of_adapter_split(1, plain)) for tensor in op.saved)


def test_masks_that_are_drawn_again_are_not_kept() -> None:
    kept, again = (
        float(saved_bytes(layer_of_adapter_split(1, recomputes_adapter_masks=drawn))) for drawn in (False, True)
    )
    assert kept - again == 2 * TOKENS * HIDDEN
