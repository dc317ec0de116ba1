"""The indexer of sparse attention (DeepSeek-V3.2, 2025), which scores all keys and chooses those attended to."""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.operators import BF16, FP32, Item, Operator, Saved
from planner.shape import Number, Shape, minimum
from planner.specs.model import ModelSpec
from planner.specs.model_parts import IndexerSpec
from planner.trainers.spec import RuntimeSpec

INDEX_NORM_PARAMETERS = 2
"""Weight and bias of the LayerNorm over a key of the indexer."""


def indexer(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Queries from the latents, one key head, a weight a head; scores of all keys before a query; the best of them.

    Every tensor-parallel rank holds the whole indexer and scores for itself. The kept keys' indices are what sparse
    attention reads.
    """
    spec = model.indexer
    assert spec is not None
    tokens, heads, width = shape.tokens, spec.index_n_heads, spec.index_head_dim
    rank = (model.mla.q_lora_rank if model.mla is not None else None) or model.hidden_size
    weights = (("index weights", heads, model.hidden_size),) if spec.weighs_heads else ()
    products = (("index q", heads * width, rank), ("index k", width, model.hidden_size), *weights)
    for name, columns, inputs in products:
        yield Operator(
            name=name, kind="gemm", wide=True, m=tokens, n=columns, k=inputs, parameters=columns * inputs,
            saved=(Saved(name, (tokens, columns)),),
        )  # fmt: skip
    yield Operator(
        name="index norm", kind="elementwise", family="norm", forward_bytes=2 * BF16 * tokens * width,
        backward_bytes=3 * BF16 * tokens * width, forward_kernels=1, backward_kernels=2,
        parameters=INDEX_NORM_PARAMETERS * width,
        saved=(Saved("statistics", (2, tokens), dtype="fp32"), Saved("index k normed", (tokens, width))),
    )  # fmt: skip
    yield scores(spec, shape, shape.seq_length)
    yield choice(spec, shape, shape.seq_length)


def scores(spec: IndexerSpec, shape: Shape, keys: Number) -> Operator:
    """Scores of the `keys` of a sequence before each query, summed over the indexer's heads."""
    return Operator(
        name="index scores", kind="attention", batch=shape.micro_batch_size, heads=spec.index_n_heads, kv_heads=1,
        q_len=shape.seq_length / shape.cp, kv_len=keys, qk_dim=spec.index_head_dim, v_dim=0,
    )  # fmt: skip


def choice(spec: IndexerSpec, shape: Shape, keys: Number) -> Operator:
    """The best of the `keys` before each query, by scores that are read and written once."""
    chosen = minimum(spec.index_topk, keys)
    return Operator(
        name="index choice", kind="elementwise", family="router", forward_bytes=2 * FP32 * shape.tokens * keys / 2,
        forward_kernels=2, saved=(Saved("chosen keys", (shape.tokens, chosen), dtype="int32"),),
    )  # fmt: skip
