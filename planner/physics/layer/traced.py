"""Layers whose operators were traced from a module: read from the model's file, at this shape's sizes."""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import enter_tp, leave_tp
from planner.physics.operators import BF16, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.traced import Polynomial, TracedOperator
from planner.trainers.spec import RuntimeSpec

BACKWARD_FACTOR = 2.0
"""Bytes and kernels of an element-by-element operation's backward over those of its forward: the output's gradient and
what was kept are read, and the input's gradient is written."""


def traced(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """The operators of a traced layer for a micro-batch on a rank; exchanges where weights are split over tp."""
    assert model.traced is not None
    for row in model.traced.layers[int(kind.attention.removeprefix("traced"))]:
        operator = _operator(row, shape)
        if row.split == "columns":
            yield from enter_tp(row.name, [operator], row.k[0], shape, runtime)
        elif row.split == "rows":
            yield from leave_tp(operator, BF16 * shape.tokens * row.n[0], shape)
        else:
            yield operator


def _operator(row: TracedOperator, shape: Shape) -> Operator:
    """A traced operator of b sequences on one of tp ranks."""
    sequences, share = shape.micro_batch_size, 1 / shape.tp if row.split else 1.0
    length = shape.seq_length / shape.cp
    saved = tuple(
        Saved(row.name, (_at(one.num_bytes, length) * sequences / (shape.tp if one.is_sharded else 1),), dtype="bytes")
        for one in row.kept
    )
    parameters = row.parameters * share
    if row.kind == "gemm":
        m, n, k = (_at(size, length) for size in (row.m, row.n, row.k))
        count = _at(row.count, length) * (1 if row.weight else sequences)
        return Operator(
            name=row.name, kind="gemm", weight=row.weight, saved=saved, parameters=parameters,
            count=count * (share if row.split == "inside" else 1.0), m=m * (sequences if row.weight else 1),
            n=n * (share if row.split == "columns" else 1.0), k=k * (share if row.split == "rows" else 1.0),
        )  # fmt: skip
    if row.kind == "attention":
        return Operator(
            name=row.name, kind="attention", modules=("core_attn",), batch=sequences, heads=row.heads * share,
            kv_heads=row.kv_heads * share, q_len=_at(row.q_len, length), kv_len=_at(row.kv_len, length),
            qk_dim=row.qk_dim, v_dim=row.v_dim, saved=saved,
        )  # fmt: skip
    moved = _at(row.bytes, length) * sequences * share
    return Operator(
        name=row.name, kind="elementwise", family="residual", forward_bytes=moved,
        backward_bytes=BACKWARD_FACTOR * moved, forward_kernels=row.kernels,
        backward_kernels=round(BACKWARD_FACTOR * row.kernels), parameters=parameters, saved=saved,
    )  # fmt: skip


def _at(size: Polynomial, length: Number) -> Number:
    """A size at a length of the sequence."""
    constant, linear, square = size
    return constant + linear * length + square * length * length
