"""Layers put together: parameters of shipped models, sharding, padded vocabularies, tied weights, prediction blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.physics.layers import decoder_layer, embedding, head, model_totals, mtp_block, padded_vocab
from planner.physics.operators import Item, Operator, num_parameters, operators_of
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model, model_names
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.spec import RuntimeSpec

MEGATRON, TORCH = load_runtime("megatron"), load_runtime("torch-eager")
ONE = Shape(seq_length=4096)


def whole_model(model: ModelSpec, shape: Shape, runtime: str) -> list[tuple[Item, ...]]:
    """Embedding, every decoder layer and the head, as one rank of each shard holds them."""
    spec = load_runtime(runtime)
    layers = [decoder_layer(model, kind, shape, spec) for kind in model.layers]
    return [embedding(model, shape, spec), *layers, head(model, shape, spec, model.tie_word_embeddings)]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("405b", 405_853_388_800),
        ("70b", 70_553_706_496),
        ("8b", 8_030_261_248),
        ("deepseek-v3", 671_026_419_200),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_parameters_equal_the_published_ones_whatever_the_trainer(name: str, total: int, runtime: str) -> None:
    assert model_totals(load_model(name), load_runtime(runtime), 4096).num_parameters == total


@pytest.mark.parametrize(
    ("own", "more"),
    [
        # 8 heads of 8 over a hidden size of 64: no keys and values, a narrower MLP, one matrix for attention
        ({"layer_sizes": ({}, {"shares_keys": True})}, {"parameters": -2 * 64 * 64, "forward_flops": -2 * 2 * 64 * 64}),
        ({"layer_sizes": ({}, {"intermediate_size": 96})}, {"parameters": -3 * 32 * 64}),
        ({"layer_types": ("full", "linear")}, {"parameters": -3 * 64 * 64}),
        ({"per_layer_input_size": 8}, {"parameters": 2 * 64 * 8 + 64, "forward_flops": 2 * 2 * 64 * 8}),
    ],
)
def test_a_layer_has_sizes_of_its_own(own: dict[str, object], more: dict[str, float]) -> None:
    base: dict[str, object] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    plain, model = (ModelSpec(name="tiny", num_attention_heads=8, **base, **one) for one in ({}, own))  # type: ignore[arg-type]
    tokens = Shape(seq_length=1)
    for quantity, difference in more.items():
        found, was = (
            sum(float(getattr(op, quantity)) for op in operators_of(decoder_layer(one, one.layers[-1], tokens, TORCH)))
            for one in (model, plain)
        )
        assert found - was == difference


@pytest.mark.parametrize("name", model_names())
def test_layers_of_a_shipped_model_add_up_to_its_total(name: str) -> None:
    model = load_model(name)
    parameters = sum(float(num_parameters(items)) for items in whole_model(model, ONE, "torch-eager"))
    assert parameters == model_totals(model, TORCH, 4096).num_parameters


@pytest.mark.parametrize("name", model_names())
def test_active_parameters_and_flops_agree(name: str) -> None:
    """Six FLOPs a step for each matmul parameter that a token meets; attention and prediction blocks come on top."""
    model = load_model(name)
    totals = model_totals(model, MEGATRON, 2048)
    assert totals.num_active_parameters <= totals.num_parameters
    assert (totals.num_active_parameters < totals.num_parameters) == (model.moe is not None)
    lookup = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    matmul = totals.num_active_parameters - lookup - model.num_position_parameters
    assert totals.model_flops_per_token >= 6 * 0.999 * matmul
    longer = model_totals(model, MEGATRON, 4096)
    assert longer.num_parameters == totals.num_parameters
    if model.sliding_window is None:
        assert longer.model_flops_per_token > totals.model_flops_per_token


@pytest.mark.parametrize("name", ["8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_tensor_parallel_ranks_together_hold_every_matrix(name: str) -> None:
    """What is not sharded (norms, routers, latent projections, output biases) is copied: never less than the model."""
    model = load_model(name)
    whole = sum(float(num_parameters(items)) for items in whole_model(model, ONE, "torch-eager"))
    tp = 8
    sharded = Shape(seq_length=4096, tp=tp, etp=tp, sequence_parallel=1)
    shard = sum(float(num_parameters(items)) for items in whole_model(model, sharded, "torch-eager"))
    copied = tp * shard - whole
    assert copied >= 0
    # norms, biases and positions are below two thousandths; latent down-projections and routers are not
    assert copied / whole < (2e-3 if model.moe is None else 0.05)


@pytest.mark.parametrize("ep", [2, 8])
def test_expert_parallelism_divides_experts_and_nothing_else(ep: int) -> None:
    model = load_model("mixtral-8x7b")
    kind = model.layers[0]
    one, many = (decoder_layer(model, kind, replace(ONE, ep=n), MEGATRON) for n in (1, ep))
    assert num_parameters(many, expert=True) == num_parameters(one, expert=True) / ep
    assert num_parameters(many, expert=False) == num_parameters(one, expert=False)
    assert sum(op.forward_flops for op in operators_of(many)) == sum(op.forward_flops for op in operators_of(one))


@pytest.mark.parametrize(
    ("vocab", "tp", "runtime", "padded"),
    [
        (128_256, 1, "megatron", 128_256),
        (128_256, 4, "megatron", 128_512),  # a multiple of 128 · 4
        (128_256, 8, "megatron", 129_024),
        (50_257, 1, "megatron", 50_304),
        (50_257, 8, "megatron", 51_200),  # the 51,200 of Megatron's GPT models
        (32_000, 2, "megatron", 32_000),
        (50_257, 8, "torch-eager", 50_264),  # a multiple of tp only
        (32_000, 8, "torchtitan", 32_000),
    ],
)
def test_vocabulary_is_padded_as_the_trainer_does(vocab: int, tp: int, runtime: str, padded: int) -> None:
    model = load_model("8b").model_copy(update={"vocab_size": vocab})
    spec, shape = load_runtime(runtime), Shape(tp=tp, seq_length=4096)
    assert padded_vocab(model, shape, spec) == padded
    rows = padded / tp * model.hidden_size
    assert num_parameters(embedding(model, shape, spec)) == rows
    assert num_parameters(head(model, shape, spec)) == rows + model.hidden_size
    np.testing.assert_array_equal(padded_vocab(model, Shape(tp=np.array([tp, tp])), spec), [padded, padded])


def test_a_tied_head_beside_its_embedding_has_no_matrix_of_its_own() -> None:
    model = load_model("llama-3.2-1b")
    assert model.tie_word_embeddings
    apart, beside = (num_parameters(head(model, ONE, TORCH, shares)) for shares in (False, True))
    assert apart - beside == model.vocab_size * model.hidden_size
    assert beside == model.hidden_size
    flops = [sum(op.forward_flops for op in operators_of(head(model, ONE, TORCH, shares))) for shares in (False, True)]
    assert flops[0] == flops[1]


def test_a_prediction_block_is_a_layer_with_a_projection_and_a_head_of_others() -> None:
    """DeepSeek-AI 2024, section 2.2: embedding and head are the main model's."""
    model = load_model("deepseek-v3")
    h = model.hidden_size
    layer = num_parameters(decoder_layer(model, model.layers[-1], ONE, TORCH))
    assert num_parameters(mtp_block(model, ONE, TORCH)) == layer + 2 * h * h + 3 * h
    plain = model.model_copy(update={"num_nextn_predict_layers": 0})
    with_block, without = (model_totals(m, MEGATRON, 4096) for m in (model, plain))
    assert with_block.num_parameters == without.num_parameters
    assert with_block.model_flops_per_token > without.model_flops_per_token


def named(model: ModelSpec, shape: Shape, runtime: RuntimeSpec, name: str) -> Operator:
    (found,) = (op for op in operators_of(decoder_layer(model, model.layers[0], shape, runtime)) if op.name == name)
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_ring_merges_blocks(cp: int) -> None:
    """A rank's block in whole, three quarters of each other one: read, added to what is read, written."""
    model, shape = load_model("8b"), Shape(seq_length=8192, cp=cp)
    merged = named(model, shape, MEGATRON, "merge blocks")
    tokens, others = 8192 / cp, 0.75 * (cp - 1)
    queries, keys = 2 * tokens * 4096, 2 * tokens * 2 * 1024
    passes = (2 + 3 * others) * (cp > 1)
    assert merged.forward_bytes == pytest.approx(passes * queries)
    assert merged.backward_bytes == pytest.approx(passes * queries + 3 * (1 + others) * (cp > 1) * keys)
    gathers = MEGATRON.model_copy(update={"cp_comm_type": "all_gather"})
    layer = decoder_layer(model, model.layers[0], shape, gathers)
    assert "merge blocks" not in {op.name for op in operators_of(layer)}


@pytest.mark.parametrize(("seq_length", "chunks", "span"), [(4096, 1, 4096), (8192, 1, 8192), (32768, 4, 8192)])
def test_layers_that_attend_in_chunks_take_them_for_sequences(seq_length: int, chunks: int, span: int) -> None:
    model = load_model("llama-4-scout")
    assert [kind.attention for kind in model.layers[:4]] == ["chunked"] * 3 + ["full"]
    shape = Shape(seq_length=seq_length, micro_batch_size=2)
    attention = named(model, shape, MEGATRON, "attention")
    assert (attention.batch, attention.q_len, attention.kv_len) == (2 * chunks, span, span)
    (full,) = (
        op for op in operators_of(decoder_layer(model, model.layers[3], shape, MEGATRON)) if op.name == "attention"
    )
    assert (full.batch, full.q_len, full.kv_len) == (2, seq_length, seq_length)


@pytest.mark.parametrize(("fused", "forward", "backward"), [(True, 2, 3), (False, 4, 10)])
def test_the_square_of_relu_is_kernels_of_its_own_unless_fused(fused: bool, forward: int, backward: int) -> None:
    model = load_model("nemotron-4-340b")
    runtime = MEGATRON.model_copy(update={"fused_activation": fused})
    activation = named(model, ONE, runtime, "mlp activation")
    width_bytes = 2 * 4096 * 73728
    assert (activation.forward_bytes, activation.backward_bytes) == (forward * width_bytes, backward * width_bytes)


def test_learned_positions_and_a_norm_behind_the_embedding_are_parameters() -> None:
    opt, bloom = load_model("opt-175b"), load_model("bloom-176b")
    rows = num_parameters(embedding(opt, ONE, TORCH)) / opt.hidden_size
    assert rows == opt.vocab_size + (opt.max_position_embeddings or 0)
    assert bloom.embedding_norm
    assert num_parameters(embedding(bloom, ONE, TORCH)) == (bloom.vocab_size + 2) * bloom.hidden_size


def test_each_metric_reads_the_logits_again() -> None:
    """Cast to fp32, normalized: 2 bytes read and 4 written, 4 and 4."""
    model, shape = load_model("8b"), Shape(seq_length=1024)
    none, two = (
        next(op for op in operators_of(head(model, shape, spec)) if op.name == "cross-entropy")
        for spec in (MEGATRON, MEGATRON.model_copy(update={"loss_metrics": 2}))
    )
    assert two.forward_bytes - none.forward_bytes == 2 * 14 * 1024 * 128_256
    assert two.backward_bytes == none.backward_bytes


def test_gradients_of_biases_read_what_products_gave_once_more() -> None:
    """Queries, keys and values, the output, up and down: nine times the width of GPT-3, 2 bytes each."""
    model, shape = load_model("gpt3-175b"), Shape(tp=4, dp=8, seq_length=2048)
    found = {}
    for name in ("megatron", "megatron-2022"):
        items = operators_of(decoder_layer(model, model.layers[0], shape, load_runtime(name)))
        found[name] = [op for op in items if op.family == "bias"]
    columns = (3 * 12_288 / 4 + 12_288) + (4 * 12_288 / 4 + 12_288)
    assert not found["megatron"]
    assert sum(op.backward_bytes for op in found["megatron-2022"]) == 2 * 2048 * columns
    assert sum(op.backward_kernels for op in found["megatron-2022"]) == 4
    llama = load_model("8b")
    plain = operators_of(decoder_layer(llama, llama.layers[0], ONE, TORCH))
    assert not [op for op in plain if op.family == "bias"]


def test_a_rank_that_holds_all_experts_has_no_fuller_neighbour() -> None:
    model = load_model("gpt-oss-20b")
    shapes = ONE, replace(ONE, ep=4)
    one, many = (
        [operators_of(decoder_layer(model, model.layers[0], shape, MEGATRON, fullest)) for fullest in (1.0, 1.6)]
        for shape in shapes
    )
    assert one[0] == one[1]
    assert many[0] != many[1]


def test_fused_experts_add_biases_inside_their_products() -> None:
    model = load_model("gpt-oss-20b")
    eager, fused = (
        named(model, ONE, MEGATRON.model_copy(update={"fuses_experts": fuses}), "row biases") for fuses in (False, True)
    )
    assert eager.forward_bytes > 0
    assert fused.forward_bytes == fused.forward_kernels == 0
    assert 0 < fused.backward_bytes < eager.backward_bytes / 4


def test_yarn_that_scales_is_rotated_in_eager_torch_unless_compiled() -> None:
    yarn = load_model("gpt-oss-20b")
    plain = ModelSpec.model_validate({**yarn.model_dump(), "rope_scaling": None})
    assert yarn.scales_rotation
    assert not plain.scales_rotation
    runtimes = {
        compiled: MEGATRON.model_copy(update={"fused_rotary": True, "compiled": compiled}) for compiled in (False, True)
    }
    bytes_of = {
        (model.scales_rotation, compiled): named(model, ONE, runtime, "rotary").forward_bytes
        for model in (yarn, plain)
        for compiled, runtime in runtimes.items()
    }
    assert bytes_of[True, False] == 5 * bytes_of[False, False]
    assert bytes_of[True, True] == bytes_of[False, True] == bytes_of[False, False]
