"""What a backward needs for a moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.physics.layers import decoder_layer, head
from planner.physics.memory import (
    gradients_bytes,
    optimizer_bytes,
    sharded_parameters,
    transient_bytes,
    weights_bytes,
    working_set,
)
from planner.physics.operators import collectives_of, operators_of, saved_bytes
from planner.shape import Shape
from planner.specs.registry import load_model
from planner.trainers.load import load_runtime
from planner.trainers.switches import Value


@pytest.mark.parametrize(
    ("cp", "kind", "expected"),
    [
        # keys and values of 8 heads and their gradients, all of them gathered; queries of 32 heads, output, gradients
        (8, "all_gather", 2 * 2 * 256 * (131072 * 8 + 131072 // 8 * 32)),
        # eight blocks of keys and values, and an output for each
        (8, "p2p", 2 * 131072 * (8 * 256 + 32 * 128)),
        (8, "a2a", 2 * 2 * 256 * (131072 // 8) * (8 + 32)),
        (1, "p2p", 2 * 2 * 256 * 131072 * (8 + 32)),
    ],
)
def test_what_split_attention_holds_for_a_moment(cp: int, kind: str, expected: int) -> None:
    model, shape = load_model("llama-3.1-8b"), Shape(cp=cp, dp=1, seq_length=131072, shard_size=8)
    runtime = load_runtime("megatron").model_copy(update={"cp_comm_type": kind})
    layer = decoder_layer(model, model.layers[0], shape, runtime)
    attention = [next(op for op in operators_of(layer) if op.kind == "attention")]
    assert transient_bytes(attention, runtime) == expected


def test_keys_that_were_gathered_may_be_kept() -> None:
    """torchtitan keeps those of the whole sequence, and recomputing operations gathers them again."""
    model, shape = load_model("llama-3.1-8b"), Shape(cp=8, dp=8, seq_length=131072, shard_size=64, zero_stage=3)
    titan = load_runtime("torchtitan")
    kept, again = (
        decoder_layer(model, model.layers[0], shape, titan.model_copy(update={"keeps_gathered_keys": keeps}))
        for keeps in (True, False)
    )
    assert saved_bytes(kept) - saved_bytes(again) == 7 * 2 * 131072 // 8 * 8 * 256
    assert saved_bytes(kept, frozenset({"op"})) == saved_bytes(again, frozenset({"op"}))
    sent = [sum(c.num_bytes for c in collectives_of(items) if c.group == "cp") for items in (kept, again)]
    assert sent[1] == 1.5 * sent[0], "K and V once more in backward, beside their gradients"


@pytest.mark.parametrize(("ep", "kept_rows"), [(8, 1), (1, 0)])
def test_of_experts_op_keeps_the_rows_that_an_exchange_brought(ep: int, kept_rows: int) -> None:
    """No grouped product is saved: a run of 16B on eight H100 held 73 GiB, where 95 were counted (torchtitan 1789)."""
    model, shape = load_model("deepseek-v2-lite"), Shape(ep=ep, dp=8, seq_length=4096, shard_size=8, zero_stage=3)
    layer = decoder_layer(model, model.layers[-1], shape, load_runtime("torchtitan-2025"))
    experts = [op for op in operators_of(layer) if op.expert or op.name in ("moe_act", "row weights")]
    rows_bytes = 2 * 4096 * 6 * 2048
    assert saved_bytes(experts, frozenset({"op"})) == pytest.approx(kept_rows * rows_bytes, rel=0.02)
    assert saved_bytes(experts) > 3 * rows_bytes


def test_gathered_inputs_may_be_kept() -> None:
    """torchtitan keeps what tensor-parallel ranks gather, and gathers nothing again; `op` drops it and repeats that."""
    model = load_model("llama-3.1-8b")
    shape = Shape(tp=8, dp=8, seq_length=8192, shard_size=8, zero_stage=3, sequence_parallel=1)
    titan = load_runtime("torchtitan")
    kept, again = (
        decoder_layer(model, model.layers[0], shape, titan.model_copy(update={"keeps_gathered_inputs": keeps}))
        for keeps in (True, False)
    )
    hidden_bytes = 2 * 8192 * 4096
    # the seven shards of others, before attention and before the MLP
    assert saved_bytes(kept) - saved_bytes(again) == 2 * hidden_bytes * 7 / 8
    assert saved_bytes(kept, frozenset({"op"})) == saved_bytes(again, frozenset({"op"}))
    gathers = [[c for c in collectives_of(items) if c.kind == "all_gather" and c.num_bytes] for items in (kept, again)]
    assert len(gathers[1]) - len(gathers[0]) == 2
    assert [gather.backward for gather in gathers[1] if "again" in gather.name] == [True, True]


def test_keys_repeated_for_every_head_are_sent_for_every_head() -> None:
    """torchtitan until 2026: Llama's 8 heads of keys travel as 32, and are written before attention."""
    model, shape = load_model("llama-3.1-8b"), Shape(cp=4, dp=2, seq_length=131072, shard_size=8, zero_stage=3)
    plain = load_runtime("torchtitan-2025").model_copy(update={"repeats_keys": False})
    layers = [
        decoder_layer(model, model.layers[0], shape, plain.model_copy(update={"repeats_keys": repeats}))
        for repeats in (False, True)
    ]
    sent = [sum(c.num_bytes for c in collectives_of(items) if c.group == "cp") for items in layers]
    assert sent[1] == 4 * sent[0]
    copied = next(op for op in operators_of(layers[1]) if op.name == "repeat k, v")
    assert copied.forward_bytes == 2 * 2 * 32768 * 128 * (8 + 32)
    assert "repeat k, v" not in {op.name for op in operators_of(layers[0])}


def test_weights_behind_the_experts_keep_their_outputs() -> None:
    model, shape = load_model("qwen3-30b-a3b"), Shape(dp=8, ep=8, seq_length=4096, shard_size=8, zero_stage=3)
    titan = load_runtime("torchtitan")
    behind, within = (
        saved_bytes(
            decoder_layer(model, model.layers[0], shape, titan.model_copy(update={"weights_expert_outputs": w}))
        )
        for w in (True, False)
    )
    assert behind - within == 2 * 4096 * 8 * 2048


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


@pytest.mark.parametrize(("ep", "shard_size", "ranks"), [(1, 8, 8), (1, 64, 64), (4, 64, 16), (4, 8, 8), (16, 8, 4)])
def test_experts_are_sharded_over_their_replicas_and_no_further_than_the_rest(
    ep: int, shard_size: int, ranks: int
) -> None:
    """HSDP in groups of eight: replicas of an expert beyond the group hold whole copies of the same shards."""
    shape = Shape.of(dp=64, ep=ep, shard_size=shard_size)
    megatron = load_runtime("megatron")
    assert optimizer_bytes(0.0, 1e9, shape, megatron) == pytest.approx(12e9 / ranks)
    assert sharded_parameters(1e9, 1e9, shape, megatron) == pytest.approx(1e9 / shard_size + 1e9 / ranks)


def test_our_runner_shards_experts_over_tensor_parallel_ranks_too() -> None:
    """Sixteen ranks share the experts of four at a time: each expert is on four of them, the rest on two."""
    shape = Shape.of(tp=8, dp=2, ep=4)
    assert sharded_parameters(0.0, 8.0, shape, load_runtime("torch-eager")) == 2.0
    assert sharded_parameters(8.0, 0.0, shape, load_runtime("torch-eager")) == 4.0


@pytest.mark.parametrize(
    ("switches", "dtype", "each"),
    [
        ({}, "bf16", 12),
        # 16 bits of each master are in the weight
        ({"bf16_moments": True}, "bf16", 6),
        ({"bf16_moments": True}, "fp8", 8),
        ({"bf16_moments": True, "fp8_params": False}, "fp8", 6),
        ({"bf16_moments": True, "optimizer_offload": 1.0}, "bf16", 0),
    ],
)
def test_masters_are_remainders_beside_16_bit_weights(switches: dict[str, Value], dtype: str, each: int) -> None:
    runtime, _ = load_runtime("megatron").with_features(switches)
    runtime = runtime.in_dtype(dtype, "hopper")
    assert optimizer_bytes(1e9, 0.0, Shape(), runtime) == each * 1e9


@pytest.mark.parametrize(("tp", "copies"), [(1, 2), (8, 3.5)])
def test_torch_s_loss_split_over_ranks_keeps_exponentials_too(tp: int, copies: float) -> None:
    """Gradients of softmax and logits in fp32, 8 bytes a token for labels; exponentials, and the logits in 16 bits."""
    runtime, _ = load_runtime("torchtitan").with_features({"compile": False})
    layer = head(load_model("llama-3.1-8b"), Shape(tp=tp, seq_length=1024), runtime)
    loss = next(op for op in operators_of(layer) if op.family == "loss")
    logits = 1024 * 128256 / tp * 4
    assert sum(held.num_bytes for held in working_set(loss, runtime)) == pytest.approx(copies * logits, rel=1e-3)
