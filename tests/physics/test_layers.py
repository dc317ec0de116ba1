"""Layers put together: parameters of shipped models, sharding, padded vocabularies, tied weights, prediction blocks.

The operator lists against formulas that papers print: activation bytes, FLOPs per step, active parameters.
Parts of a stage: how they add up.
Examples in docstrings are true.
"""

from __future__ import annotations

import doctest
from dataclasses import fields, replace
from types import ModuleType

import numpy as np
import pytest
from tables import beside

from planner import shape
from planner.physics import pricing
from planner.physics.cost import PartCost, sum_parts
from planner.physics.layer.blocks import enter_half, leave_half, ngrams
from planner.physics.layers import decoder_layer, embedding, head, model_totals, mtp_block, padded_vocab
from planner.physics.operators import FP32, Item, Operator, num_parameters, operators_of, saved_bytes
from planner.shape import Shape
from planner.specs.architectures import from_config
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model, model_names
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.spec import RuntimeSpec

TABLES = beside(__file__)

MEGATRON, TORCH = load_runtime("megatron"), load_runtime("torch-eager")
ONE = Shape(seq_length=4096)


def whole_model(model: ModelSpec, shape: Shape, runtime: str) -> list[tuple[Item, ...]]:
    """Embedding, every decoder layer and the head, as one rank of each shard holds them."""
    spec = load_runtime(runtime)
    layers = [decoder_layer(model, kind, shape, spec) for kind in model.layers]
    return [embedding(model, shape, spec), *layers, head(model, shape, spec, model.tie_word_embeddings)]


@pytest.mark.parametrize(("name", "total"), TABLES["parameters_equal_the_published_ones_whatever_the_trainer"])
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


@pytest.mark.parametrize(("vocab", "tp", "runtime", "padded"), TABLES["vocabulary_is_padded_as_the_trainer_does"])
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


@pytest.mark.parametrize(("name", "parameters"), TABLES["predictions_have_the_layers_of_the_checkpoint"])
def test_predictions_have_the_layers_of_the_checkpoint(name: str, parameters: int) -> None:
    """Megatron-LM's pattern of Nemotron 3 ends in `/*E`; a block chooses keys where the last layer shares them."""
    assert model_totals(load_model(name), MEGATRON, 8192).num_predicting_parameters == parameters


def test_a_prediction_block_is_a_layer_with_a_projection_and_a_head_of_others() -> None:
    """DeepSeek-AI 2024, section 2.2: embedding and head are the main model's."""
    model = load_model("deepseek-v3")
    h = model.hidden_size
    layer = num_parameters(decoder_layer(model, model.layers[-1], ONE, TORCH))
    assert num_parameters(mtp_block(model, ONE, TORCH)) == layer + 2 * h * h + 3 * h
    plain = model.without_predictions()
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


@pytest.mark.parametrize(("seq_length", "window"), [(1024, 0), (1025, 1024)])
def test_a_window_as_long_as_the_sequence_is_none(seq_length: int, window: int) -> None:
    model = load_model("gemma-3-27b")
    layer = decoder_layer(model, model.layers[0], Shape(seq_length=seq_length), MEGATRON)
    assert [op.window for op in operators_of(layer) if op.name == "attention"] == [window]


def test_a_router_in_fp32_makes_fp32_of_the_rows_that_transformers_weights() -> None:
    model, hf = load_model("deepseek-v3"), load_runtime("hf")
    (rows,) = (op for op in operators_of(decoder_layer(model, model.layers[-1], ONE, hf)) if op.name == "rows in fp32")
    token_bytes = 2 * 4096 * 7168
    assert (rows.forward_bytes, rows.backward_bytes) == (4 * 9 * token_bytes, (17 * 8 + 2) * token_bytes)
    ours = operators_of(decoder_layer(model, model.layers[-1], ONE, MEGATRON))
    assert "rows in fp32" not in {op.name for op in ours}


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


GPT = TABLES["gpt"]
UNFUSED = load_runtime("megatron").model_copy(
    update={"flash_attention": False, "dropout": True, "vocab_divisible_by": 1}
)
"""Megatron-LM as of 2021: scores in memory, dropout everywhere."""

KORTHIKANTI_TABLE_3 = {"22B": (64, 6144), "175B": (96, 12288), "530B": (128, 20480), "1T": (160, 25600)}
"""Heads and hidden size of the four models; sequence 2048, tp 8."""
SEQ = 2048


def gpt(heads: int, hidden: int, layers: int = 1, vocab: int = 51200) -> ModelSpec:
    return ModelSpec(
        name="gpt", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden,
        num_attention_heads=heads, vocab_size=vocab, tie_word_embeddings=True, **GPT,
    )  # fmt: skip


def layer_bytes(model: ModelSpec, shape: Shape, recomputed: frozenset[str] = frozenset()) -> float:
    """Saved bytes of one layer less the fp32 mean and variance of its two norms, which the paper leaves out."""
    statistics = 2 * 2 * FP32 * float(shape.shard_tokens)
    return float(saved_bytes(decoder_layer(model, model.layers[0], shape, UNFUSED), recomputed)) - statistics


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", KORTHIKANTI_TABLE_3)
def test_activation_bytes_of_a_layer(name: str, batch: int) -> None:
    """Korthikanti et al. 2022, equations 1, 2 and 4 and table 2."""
    a, h = KORTHIKANTI_TABLE_3[name]
    s, b, t = SEQ, batch, 8
    model = gpt(a, h)
    one = Shape(seq_length=s, micro_batch_size=b)
    tensor = Shape(seq_length=s, micro_batch_size=b, tp=t)
    sequence = Shape(seq_length=s, micro_batch_size=b, tp=t, sequence_parallel=1)
    core = frozenset({"core_attn"})
    sbh, scores = s * b * h, 5 * a * s * s * b  # sbh · 5as/h
    assert layer_bytes(model, one) == 34 * sbh + scores
    assert layer_bytes(model, tensor) == 10 * sbh + 24 * sbh / t + scores / t
    assert layer_bytes(model, sequence) == (34 * sbh + scores) / t
    assert layer_bytes(model, tensor, core) == 10 * sbh + 24 * sbh / t
    assert layer_bytes(model, sequence, core) == 34 * sbh / t


SC21_TABLE_1 = TABLES["sc21_table_1"]
"""Heads, hidden size and layers of the ten models."""


@pytest.mark.parametrize("name", SC21_TABLE_1)
def test_flops_of_a_step(name: str) -> None:
    """Narayanan et al. 2021, equation 3: 96·B·s·l·h²·(1 + s/6h + V/16lh), each forward run twice."""
    a, h, layers = SC21_TABLE_1[name]
    batch, vocab = 512, 51200
    model = gpt(a, h, layers, vocab)
    shape = Shape(seq_length=SEQ)
    layer = operators_of(decoder_layer(model, model.layers[0], shape, UNFUSED))
    ends = operators_of((*embedding(model, shape, UNFUSED), *head(model, shape, UNFUSED)))
    flops = layers * sum(2 * op.forward_flops + op.backward_flops for op in layer)
    flops += sum(op.forward_flops + op.backward_flops for op in ends)
    paper = 96 * batch * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + vocab / (16 * layers * h))
    assert float(flops) * batch == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("name", SC21_TABLE_1)
def test_parameters_of_a_gpt(name: str) -> None:
    """Narayanan et al. 2021, equation 2: 12·l·h²·(1 + 13/12h + (V + s)/12lh); it leaves the final norm out."""
    a, h, layers = SC21_TABLE_1[name]
    vocab = 51200
    paper = 12 * layers * h**2 + 13 * layers * h + (vocab + SEQ) * h
    assert model_totals(gpt(a, h, layers, vocab), UNFUSED, SEQ).num_parameters == paper + 2 * h


def test_active_parameters_of_mixtral() -> None:
    """Jiang et al. 2024: 8 experts of which a token visits 2; 47B parameters, 13B of them active."""
    model = load_model("mixtral-8x7b")
    h, f, d, k = 4096, 14336, 128, 8
    attention = h * h + 2 * h * k * d + h * h
    active = 32 * (attention + 8 * h + 2 * 3 * h * f + 2 * h) + 2 * 32000 * h + h
    totals = model_totals(model, UNFUSED, 4096)
    assert totals.num_active_parameters == active
    assert totals.num_parameters == active + 32 * 6 * 3 * h * f == 46_702_792_704


def test_active_parameters_of_deepseek_v3() -> None:
    """DeepSeek-AI 2024, §4.2: 61 layers, the first 3 dense; 671B parameters, 37B active less the input embedding."""
    model = load_model("deepseek-v3")
    h, a, q, kv, nope, rope, v = 7168, 128, 1536, 512, 128, 64, 128
    attention = h * q + q + q * a * (nope + rope) + h * (kv + rope) + kv + kv * a * (nope + v) + a * v * h
    dense, expert, router = 3 * h * 18432, 3 * h * 2048, 256 * h + 256
    outside = 61 * (attention + 2 * h) + 3 * dense + 58 * (expert + router) + 2 * 129280 * h + h
    totals = model_totals(model, UNFUSED, 4096)
    assert totals.num_parameters == outside + 58 * 256 * expert == 671_026_419_200
    assert totals.num_active_parameters == outside + 58 * 8 * expert
    assert round((totals.num_active_parameters - 129280 * h) / 1e9) == 37


def test_model_flops_are_six_per_active_parameter_and_causal_attention() -> None:
    """6·(active matmul parameters, head included, embedding not) + 6·L·s·a·d per token."""
    model = load_model("llama-3.1-8b")
    totals = model_totals(model, UNFUSED, 8192)
    norms, embedded = 65 * 4096, 128256 * 4096
    expected = 6 * (totals.num_active_parameters - norms - embedded) + 6 * 32 * 8192 * 4096
    assert totals.model_flops_per_token == pytest.approx(expected, rel=1e-12)


QUANTITIES = [field.name for field in fields(PartCost)]
TOTALS = ["forward_total_s", "input_grad_total_s", "backward_total_s", "total_s", "static_bytes"]


def part(seed: int) -> PartCost:
    numbers = np.random.default_rng(seed)
    return PartCost(**{name: float(numbers.uniform(1, 2)) for name in QUANTITIES})


def test_parts_add_up_but_for_what_is_needed_for_a_moment() -> None:
    one, two, three = part(1), part(2), part(3)
    both = one + two
    for name in QUANTITIES:
        mine, other = getattr(one, name), getattr(two, name)
        assert getattr(both, name) == (max(mine, other) if name == "transient_bytes" else mine + other)
    for name in TOTALS:
        assert getattr(both, name) == pytest.approx(getattr(one, name) + getattr(two, name))
    whole = sum_parts([one, two, three])
    for name in QUANTITIES:
        assert getattr(whole, name) == pytest.approx(getattr(one + (two + three), name))
    assert all(getattr(sum_parts([]), name) == 0 for name in QUANTITIES)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_part_several_times_is_its_sum(count: int) -> None:
    one = part(4)
    many, added = one.times(count), sum_parts([one] * count)
    for name in QUANTITIES:
        assert getattr(many, name) == pytest.approx(getattr(added, name)), name


def test_totals_are_sums_of_compute_and_exchanges() -> None:
    one = part(5)
    forward = one.forward_s + one.tp_forward_s + one.cp_forward_s + one.ep_forward_s
    backward = one.input_grad_s + one.tp_backward_s + one.cp_backward_s + one.ep_backward_s + one.weight_grad_s
    assert one.forward_total_s == pytest.approx(forward)
    assert one.backward_total_s == pytest.approx(backward)
    assert one.total_s == pytest.approx(forward + backward)
    assert one.static_bytes == pytest.approx(one.weights_bytes + one.gradients_bytes + one.optimizer_bytes)


@pytest.mark.parametrize("module", [pricing, shape])
def test_examples_are_true(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_what_parts_of_new_layers_keep_is_what_transformers_keeps() -> None:
    """Bytes that transformers 5.24 keeps of 512 tokens in 16 bits on a CPU: A.X-K2's norm, a half of Qwen4 and its
    n-grams, a layer of Llama 3.2 Vision over 2,048 tokens of images."""
    hf, shape = load_runtime("hf"), Shape(seq_length=512)
    gated = from_config({"model_type": "axk2", "hidden_size": 512}, "x")
    assert saved_bytes(tuple(enter_half("attention", gated, shape, hf))) == 3_704_832
    ngram = {"ple_layer_ids": [1], "ngram_vocab_size_base": 500, "hc_lowrank": 32, "head_dim": 64}
    qwen = from_config({"model_type": "qwen4_exp_text", "hidden_size": 256, **ngram}, "x")
    half = (*enter_half("attention", qwen, shape, hf), *leave_half("attention", qwen, shape, hf))
    # the mixer keeps what it reads, which stands for itself there
    assert saved_bytes(half) - 2 * 512 * 256 == pytest.approx(6_639_616, rel=0.005)
    assert saved_bytes(tuple(ngrams(256, qwen, shape, hf))) == pytest.approx(17_443_072, rel=0.01)
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8}
    text = {"model_type": "mllama_text_model", "num_key_value_heads": 2, "cross_attention_layers": [3], **sizes}
    tower = {"model_type": "mllama_vision_model"}
    llama = from_config({"model_type": "mllama", "text_config": text, "vision_config": tower}, "x")
    assert llama.vision is not None
    seeing = llama.model_copy(update={"vision": llama.vision.model_copy(update={"image_tokens": 2048})})
    assert saved_bytes(decoder_layer(seeing, seeing.layers[3], shape, hf)) == pytest.approx(19_976_196, rel=1e-5)
