"""Layers that scan, held against transformers: parameters, products by weights, products between activations.

`tests/physics/mixers.json` has what `tools/measure_mixers` measured. Where transformers computes an algorithm
otherwise than the kernels that the planner prices, the difference is written down, not compared within a tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.physics.layers import decoder_layer, model_totals
from planner.physics.operators import Operator, num_parameters, operators_of, saved_bytes
from planner.shape import Shape
from planner.specs.architectures import from_config
from planner.specs.model import ModelSpec
from planner.trainers.load import load_runtime

MEASURED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "mixers.json").read_text())


def layer_of(kind: str, **sizes: int) -> tuple[ModelSpec, list[Operator]]:
    """The model of a measured kind, and the operators of its layer."""
    row = MEASURED[kind]
    model = from_config(row["config"], kind)
    shape = Shape(seq_length=row["tokens"], **sizes)
    runtime = load_runtime("torch-eager").model_copy(update={"fuses_sparse_attention": True})
    return model, operators_of(decoder_layer(model, model.layers[0], shape, runtime))


def otherwise(kind: str, model: ModelSpec) -> float:
    """FLOPs per token between activations that transformers computes beyond the kernels, or by other functions."""
    mamba, linear, indexer = model.mamba, model.linear_attention, model.indexer
    if kind in ("mamba2", "full_mamba2", "shared_mamba2"):
        assert mamba is not None
        assert mamba.num_heads is not None
        # scores of every head, not of every group; states handed on by a product of all chunks with all
        scores = 2 * mamba.chunk_size * mamba.state_size * (mamba.num_heads - mamba.n_groups)
        chunks = MEASURED[kind]["tokens"] // mamba.chunk_size
        states = 2 * (chunks + 1) ** 2 * mamba.intermediate_size * mamba.state_size / MEASURED[kind]["tokens"]
        return scores + states
    if kind in ("mamba", "griffin"):
        assert mamba is not None
        # only the states' product with C; the rest, and all of Griffin's scan, is element by element
        return -(7 if kind == "mamba" else 20) * mamba.intermediate_size * mamba.state_size
    if kind in ("gated_delta", "kimi_delta"):
        assert linear is not None
        # triangles are solved, not multiplied
        widths = linear.key_head_dim + linear.value_head_dim
        return -2 * linear.chunk_size * widths * linear.num_value_heads
    if kind == "indexed":
        assert indexer is not None
        # heads' scores times their weights
        return 2 * MEASURED[kind]["tokens"] * indexer.index_n_heads
    return 0.0


def between_activations(operators: list[Operator]) -> float:
    """FLOPs of scans, and of attention over the whole square, as eager torch computes it."""
    whole = 0.0
    for op in operators:
        if op.kind == "scan":
            whole += float(op.forward_flops)
        elif op.kind == "attention":
            whole += float(2 * op.batch * op.heads * op.q_len * op.kv_len * (op.qk_dim + op.v_dim))
    return whole


@pytest.mark.parametrize("kind", MEASURED)
def test_a_layer_has_the_parameters_that_transformers_gives_it(kind: str) -> None:
    _, operators = layer_of(kind)
    assert num_parameters(operators) == MEASURED[kind]["parameters"]


@pytest.mark.parametrize("kind", [kind for kind in MEASURED if kind != "lightning"])
def test_a_layer_multiplies_by_its_weights(kind: str) -> None:
    _, operators = layer_of(kind)
    assert sum(op.gemm_flops for op in operators if op.weight) == MEASURED[kind]["mm"]


def test_lightning_attention_multiplies_by_its_weights() -> None:
    _, operators = layer_of("lightning")
    mixer = [op for op in operators if op.name.startswith(("lightning", "router"))]
    assert sum(op.gemm_flops for op in mixer) == MEASURED["lightning"]["mm"]


@pytest.mark.parametrize("kind", MEASURED)
def test_a_layer_multiplies_activations_as_its_algorithm_does(kind: str) -> None:
    model, operators = layer_of(kind)
    expected = MEASURED[kind]["bmm"] - otherwise(kind, model) * MEASURED[kind]["tokens"]
    assert between_activations(operators) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", MEASURED)
def test_tensor_parallel_ranks_share_a_layer(kind: str) -> None:
    """Two ranks hold all weights, and of those that each holds whole a copy each; they compute all products."""
    _, alone = layer_of(kind)
    _, shared = layer_of(kind, tp=2, sequence_parallel=1)
    copies = {"index q", "index k", "index weights", "index norm", "index scores"}
    whole, half_of_it = (num_parameters([op for op in ops if not op.expert]) for ops in (alone, shared))
    assert whole < 2 * half_of_it < 1.6 * whole
    for one, half in zip(alone, shared, strict=True):
        if one.name not in copies and "down" not in one.name and not one.expert and one.name != "router":
            assert half.forward_flops * 2 == pytest.approx(one.forward_flops, rel=1e-12), one.name


def test_the_flops_of_a_token_grow_with_the_sequence_only_where_layers_attend() -> None:
    runtime = load_runtime("megatron")
    scanning = from_config(MEASURED["mamba"]["config"], "x")
    assert model_totals(scanning, runtime, 4096)[2] == model_totals(scanning, runtime, 65_536)[2]
    sparse = from_config(MEASURED["indexed"]["config"], "x")
    flops = [model_totals(sparse, runtime, length)[2] for length in (65_536, 131_072)]
    index = sparse.indexer
    assert index is not None
    # only the indexer sees the added keys: 2·d a head and key, half of them before the query, three passes
    added = 3 * 2 * index.index_n_heads * index.index_head_dim * 65_536 / 2
    assert flops[1] - flops[0] == pytest.approx(added, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "sizes", "kept"),
    [
        ("differential", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}, 30_296),
        # a layer with the shared block, less one without
        ("shared_mamba2", {"num_attention_heads": 8, "n_mamba_heads": 16, "mamba_ngroups": 1, "adapter_rank": 32,
                           "use_mem_rope": True, "num_hidden_layers": 2,
                           "layers_block_type": ["hybrid", "mamba"]}, 34_088),
    ],
)  # fmt: skip
def test_a_layer_keeps_what_transformers_keeps(kind: str, sizes: dict[str, Any], kept: int) -> None:
    """Bytes a token of 512 that autograd holds on a CPU, in bf16 with torch's attention, weights aside."""
    config = MEASURED[kind]["config"] | {"hidden_size": 512, "intermediate_size": 1536} | sizes
    model, shape, runtime = from_config(config, kind), Shape(seq_length=512), load_runtime("hf")
    first, *others = (float(saved_bytes(decoder_layer(model, each, shape, runtime))) / 512 for each in model.kinds)
    assert first - sum(others) == pytest.approx(kept, rel=5e-4)
