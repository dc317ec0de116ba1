"""Copies and sums of eager torch's ranks around FlashAttention-2 where they call it (`trainers.torch_attention`).

The kernels and their bytes are those of the probe's own module, `probe/model/context_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.operators import BF16, FP32, Operator
from planner.shape import Number, Shape, where


def chunks_of(shape: Shape) -> Number:
    """Kernels of one attention: two where sequences are split, since each rank holds an early and a late chunk."""
    return where(shape.cp > 1, 2, 1)


def around_flash(
    shape: Shape, flash: Number, heads: Number, kv_heads: Number, qk_dim: int, v_dim: int, has_sinks: bool
) -> Iterator[Operator]:
    """Copies and sums around the kernel: of gathered keys and values, of values narrower than keys, of sinks."""
    yield _gathered(shape, heads, kv_heads, qk_dim, v_dim)
    if v_dim < qk_dim:
        yield _padded(shape, flash, heads, kv_heads, qk_dim, v_dim)
    if has_sinks:
        yield _sinks(shape, heads, v_dim)


def _rows_of_keys(shape: Shape) -> Number:
    """Rows of keys that a rank's kernels take: chunks r and 2·cp − 1 − r see (2·cp + 1) / (2·cp) sequences together."""
    whole = shape.tokens * shape.cp
    return where(shape.cp > 1, whole * (1 + 1 / (2 * shape.cp)), whole)


def _gathered(shape: Shape, heads: Number, kv_heads: Number, qk_dim: int, v_dim: int) -> Operator:
    """Puts gathered keys and values in the order of the sequence, and sums the gradients that both chunks give them.

    FlashAttention-2 gives a gradient for every query head, and torch sums them over the heads of a group.
    """
    row = BF16 * kv_heads * (qk_dim + v_dim)
    whole, used = row * shape.tokens * shape.cp, row * _rows_of_keys(shape)
    query, value, output = (BF16 * shape.tokens * n for n in (heads * qk_dim, kv_heads * v_dim, heads * v_dim))
    # values are a view of the projection's output, which an exchange copies first
    ordered = 2 * whole + 2 * value
    per_head = where(heads > kv_heads, used * (heads / kv_heads + 1), 0.0)
    is_split = shape.cp > 1
    return Operator(
        name="gathered keys and values",
        kind="elementwise",
        family="copy",
        modules=("core_attn",),
        forward_bytes=is_split * (ordered + 2 * output),
        # gathered again; gradients zeroed, added for both chunks and put in the order of ranks; those of queries joined
        backward_bytes=is_split * (ordered + whole + 3 * used + 2 * whole + 2 * query + per_head),
        forward_kernels=4,
        backward_kernels=16,
        working_bytes=0.0,
    )


def _padded(shape: Shape, flash: Number, heads: Number, kv_heads: Number, qk_dim: int, v_dim: int) -> Operator:
    """Widens values to keys with zeros, and the output and its gradient in the backward; a pad writes all, then v."""
    values = BF16 * _rows_of_keys(shape) * kv_heads * (qk_dim + 2 * v_dim)
    outputs = BF16 * shape.tokens * heads * (qk_dim + 2 * v_dim)
    return Operator(
        name="padded values",
        kind="elementwise",
        family="copy",
        modules=("core_attn",),
        forward_bytes=flash * (values + BF16 * shape.tokens * heads * 2 * v_dim),
        backward_bytes=flash * (values + 2 * outputs),
        forward_kernels=3,
        backward_kernels=6,
        working_bytes=0.0,
    )


def _sinks(shape: Shape, heads: Number, v_dim: int) -> Operator:
    """Scales the output by the share that sinks leave, and computes the gradient of their logits from grad ∘ output."""
    output, statistics = BF16 * shape.tokens * heads * v_dim, FP32 * shape.tokens * heads
    return Operator(
        name="sinks",
        kind="elementwise",
        family="copy",
        modules=("core_attn",),
        # logaddexp, difference, exponential and cast of the log-sum-exp; the product reads and writes the output
        forward_bytes=2 * output + 9 * statistics,
        # grad ∘ output in bf16 (3), in fp32 (3), its row sums (2)
        backward_bytes=8 * output + 9 * statistics,
        forward_kernels=6,
        backward_kernels=9,
        working_bytes=0.0,
    )
