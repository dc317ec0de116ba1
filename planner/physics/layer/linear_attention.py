"""Linear attention with a state per head: gated delta net, Kimi delta attention, lightning attention.

Heads are sharded over tp. What is kept is what flash-linear-attention's kernels keep; the states are computed again in
the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import enter_tp, leave_tp
from planner.physics.layer.scans import TRIANGLE_KERNELS, convolution, gated_norm, scan
from planner.physics.operators import BF16, FP32, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import LinearAttentionSpec
from planner.trainers.spec import RuntimeSpec


def gated_delta(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Gated delta net (Yang et al. 2024; Qwen3-Next): a decay and a step for each head of values.

    Keys and queries are repeated for the heads of values that share them.
    """
    linear = _of(model)
    keys, values, heads = _widths(linear, shape)
    tokens, both = shape.tokens, 2 * keys + 2 * values
    products = [
        _product(model, "delta in", both, shape, Saved("q, k, v, z", (tokens, both))),
        _product(model, "delta gates", 2 * heads, shape, Saved("a, b", (tokens, 2 * heads))),
    ]  # fmt: skip
    yield from enter_tp("delta in", products, model.hidden_size, shape, runtime)
    yield convolution("delta convolution", 2 * keys + values, linear.conv_kernel or 1, shape, has_bias=False)
    # the logarithm of the decay and the step of each head
    yield _gates(tokens * heads, 2 * heads, BF16 + FP32)
    yield _delta_rule(linear, heads, shape, decays=heads)
    yield gated_norm("delta norm", values, heads, linear.value_head_dim, shape)
    yield from _project_out(model, "delta out", values, shape)


def kimi_delta(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Kimi delta attention (Kimi Linear, 2025): a decay for each channel of a key, through a low-rank projection."""
    linear = _of(model)
    keys, values, heads = _widths(linear, shape)
    tokens, rank = shape.tokens, linear.gate_rank
    products = [
        _product(model, name, columns, shape, Saved(name, (tokens, columns)))
        for name, columns in (("delta q", keys), ("delta k", keys), ("delta v", values), ("delta step", heads))
    ]
    gates: tuple[tuple[str, Number], ...] = (("forget", keys), ("output", values))
    if linear.full_output_gate:
        products.append(_product(model, "output gate", values, shape, Saved("output", (tokens, values))))
        gates = gates[:1]
    if rank is None:
        products += [_product(model, f"{name} gate", n, shape, Saved(name, (tokens, n))) for name, n in gates]
    else:
        # the projections down are the same on all ranks
        products += [_product(model, f"{name} down", rank, shape, Saved(name, (tokens, rank))) for name, _ in gates]
    yield from enter_tp("delta in", products, model.hidden_size, shape, runtime)
    for name, columns in gates if rank is not None else ():
        yield Operator(
            name=f"{name} up", kind="gemm", m=tokens, n=columns, k=rank or 0, parameters=columns * (rank or 0),
            saved=(Saved(name, (tokens, columns)),),
        )  # fmt: skip
    yield convolution("delta convolution", 2 * keys + values, linear.conv_kernel or 1, shape, has_bias=False)
    yield _gates(tokens * keys, heads + keys, FP32)
    yield _delta_rule(linear, heads, shape, decays=keys)
    yield gated_norm("delta norm", values, heads, linear.value_head_dim, shape)
    yield from _project_out(model, "delta out", values, shape)


def lightning(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Lightning attention (MiniMax-01, 2025): linear attention with one fixed decay a head.

    Per token and head, a chunk of C tokens costs 2·C·(d_k + d_v) within and 4·d_k·d_v to and from the state.
    """
    linear = _of(model)
    keys, values, heads = _widths(linear, shape)
    tokens, d_k, d_v = shape.tokens, linear.key_head_dim, linear.value_head_dim
    products = [
        _product(model, "lightning qkv", 2 * keys + values, shape, Saved("qkv", (tokens, 2 * keys + values))),
        _product(model, "lightning gate", values, shape, Saved("gate", (tokens, values))),
    ]
    yield from enter_tp("lightning qkv", products, model.hidden_size, shape, runtime)
    num_bytes = BF16 * tokens * (2 * keys + values)
    yield Operator(
        name="lightning activation", kind="elementwise", family="activation", modules=("op",),
        forward_bytes=2 * num_bytes, backward_bytes=3 * num_bytes, forward_kernels=1, backward_kernels=1,
        saved=(Saved("q, k, v", (tokens, 2 * keys + values), ("op",)),),
    )  # fmt: skip
    flops = heads * (2 * linear.chunk_size * (d_k + d_v) + 4 * d_k * d_v)
    state_bytes = 2 * FP32 * heads * d_k * d_v / linear.chunk_size
    output = Saved("output", (tokens, values))
    yield scan("lightning attention", flops, BF16 * 2 * (keys + values) + state_bytes, shape, (2, 4), (output,))
    # the norm is over all heads; the gate's sigmoid and the normed output are kept for their product
    yield Operator(
        name="lightning norm", kind="elementwise", family="norm", modules=("op",),
        forward_bytes=6 * BF16 * tokens * values, backward_bytes=9 * BF16 * tokens * values,
        forward_kernels=3, backward_kernels=5, parameters=values,
        saved=(
            Saved("statistics", (tokens,), dtype="fp32"), Saved("normed, sigmoid", (2, tokens, values), ("op",)),
            Saved("gated", (tokens, values), ("op",), gemm_input=True),
        ),
    )  # fmt: skip
    yield from _project_out(model, "lightning out", values, shape)


def _of(model: ModelSpec) -> LinearAttentionSpec:
    assert model.linear_attention is not None
    return model.linear_attention


def _widths(linear: LinearAttentionSpec, shape: Shape) -> tuple[Number, Number, Number]:
    """Columns of keys, columns of values and heads of values on a rank."""
    return (
        linear.num_key_heads * linear.key_head_dim / shape.tp,
        linear.num_value_heads * linear.value_head_dim / shape.tp,
        linear.num_value_heads / shape.tp,
    )


def _product(model: ModelSpec, name: str, columns: Number, shape: Shape, saved: Saved) -> Operator:
    return Operator(
        name=name, kind="gemm", m=shape.tokens, n=columns, k=model.hidden_size,
        parameters=columns * model.hidden_size, saved=(saved,),
    )  # fmt: skip


def _gates(elements: Number, parameters: Number, bytes_each: int) -> Operator:
    """Decays and steps from their projections, element by element."""
    return Operator(
        name="delta decays", kind="elementwise", family="activation", forward_bytes=(BF16 + bytes_each) * elements,
        backward_bytes=(2 * BF16 + bytes_each) * elements, forward_kernels=2, backward_kernels=4, parameters=parameters,
    )  # fmt: skip


def _delta_rule(linear: LinearAttentionSpec, heads: Number, shape: Shape, decays: Number) -> Operator:
    """The chunked delta rule: normed queries and keys, values, decays, steps and triangles are kept.

    Per token and head, a chunk of C tokens costs 2·C·(3·d_k + 2·d_v): keys times keys, the triangle times keys and
    values, queries times keys, scores times values; and 6·d_k·d_v: keys and queries times the state, and its update.
    """
    d_k, d_v, chunk, tokens = linear.key_head_dim, linear.value_head_dim, linear.chunk_size, shape.tokens
    flops = heads * (2 * chunk * (3 * d_k + 2 * d_v) + 6 * d_k * d_v)
    state_bytes = 2 * FP32 * heads * d_k * d_v / chunk
    num_bytes = BF16 * heads * (6 * d_k + 5 * d_v + 2 * chunk) + FP32 * decays + state_bytes
    triangles = 2 if linear.gate_rank is not None or decays is not heads else 1
    return scan(
        "delta rule", flops, num_bytes, shape, (6 + TRIANGLE_KERNELS, 16),
        (
            Saved("q, k, v", (tokens, heads, 2 * d_k + d_v)),
            Saved("decays", (tokens, decays), dtype="fp32"),
            Saved("steps", (tokens, heads)),
            Saved("norms of q, k", (2, tokens, heads), dtype="fp32"),
            Saved("triangles", (triangles, tokens, heads, chunk)),
            Saved("output", (tokens, heads, d_v)),
        ),
    )  # fmt: skip


def _project_out(model: ModelSpec, name: str, width: Number, shape: Shape) -> Iterator[Item]:
    output = Operator(
        name=name, kind="gemm", modules=("op",), m=shape.tokens, n=model.hidden_size, k=width,
        parameters=model.hidden_size * width,
    )  # fmt: skip
    yield from leave_tp(output, BF16 * shape.tokens * model.hidden_size, shape)
