"""The operator lists against formulas that papers print: activation bytes, FLOPs per step, active parameters."""

from __future__ import annotations

import pytest

from planner.physics.layers import decoder_layer, embedding, head, model_totals
from planner.physics.operators import FP32, operators_of, saved_bytes
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.trainers.load import load_runtime

GPT = {
    "gated_mlp": False,
    "activation": "gelu",
    "norm": "layernorm",
    "bias": True,
    "position_embedding": "learned",
    "max_position_embeddings": 2048,
}
UNFUSED = load_runtime("megatron").model_copy(
    update={"flash_attention": False, "dropout": True, "vocab_divisible_by": 1}
)
"""Megatron-LM as of 2021: scores in memory, dropout everywhere."""

KORTHIKANTI_TABLE_3 = {"22B": (64, 6144), "175B": (96, 12288), "530B": (128, 20480), "1T": (160, 25600)}
"""Heads and hidden size of the four models; sequence 2048, tp 8."""
SEQ = 2048


def gpt(heads: int, hidden: int, layers: int = 1, vocab: int = 51200) -> ModelSpec:
    return ModelSpec(
        name="gpt",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
        **GPT,
    )


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


SC21_TABLE_1 = {
    "1.7B": (24, 2304, 24), "3.6B": (32, 3072, 30), "7.5B": (32, 4096, 36), "18B": (48, 6144, 40),
    "39B": (64, 8192, 48), "76B": (80, 10240, 60), "145B": (96, 12288, 80), "310B": (128, 16384, 96),
    "530B": (128, 20480, 105), "1T": (160, 25600, 128),
}  # fmt: skip
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
