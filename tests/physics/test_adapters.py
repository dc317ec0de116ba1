"""Frozen weights and adapters: parameters against peft's, what is kept and computed, and laws over rank and bits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.physics.adapters import adapted
from planner.physics.layers import decoder_layer, model_totals
from planner.physics.operators import Item, num_parameters, operators_of, saved_bytes
from planner.shape import Shape
from planner.specs.registry import load_model
from planner.specs.training import AdapterSpec
from planner.trainers.load import load_runtime

HF, MEGATRON = load_runtime("hf"), load_runtime("megatron")
SHAPE = Shape(tp=1, seq_length=2048)


def _layer(adapters: AdapterSpec | None, runtime_name: str = "hf") -> tuple[Item, ...]:
    model = load_model("8b")
    runtime = load_runtime(runtime_name).for_adapters(adapters)
    return adapted(decoder_layer(model, model.kinds[0], SHAPE, runtime), adapters, runtime)


@pytest.mark.parametrize(
    ("rank", "targets", "trainable"),
    [
        # peft 0.21's print_trainable_parameters of Llama 3.1 8B
        (16, ("all-linear",), 41_943_040),
        (8, ("q_proj", "v_proj"), 3_407_872),
        (64, ("all-linear",), 167_772_160),
    ],
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
