"""Kernels of chunked recurrences: what one computes, moves and keeps, and its seconds on a GPU.

A chunked recurrence computes products of chunks on tensor cores and hands a state from chunk to chunk (Dao and Gu 2024,
§6; Yang et al. 2024, gated delta networks, §3.3). Its seconds are the longer of the products at a share of the peak and
of the bytes at a share of the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import bias_gradients, enter_tp, leave_tp
from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved, matmul
from planner.shape import Number, Shape, maximum
from planner.specs.hardware import HardwareSpec
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import LinearAttentionSpec, MambaSpec
from planner.trainers.spec import RuntimeSpec

SCAN_BACKWARD = 3.0
"""FLOPs of the backward over those of the forward: the states are computed again, then two gradients for each product
(mamba_ssm's and flash-linear-attention's kernels keep no states)."""
SCAN_FRACTION = 0.2
"""Share of the peak in 16 bits that the products of a chunked recurrence reach. Their sides are 64 to 256 and each
waits for the one before. Assumed: half of what attention reaches at these sides; Mamba-2's scan at states of 64 to 256
is as fast as FlashAttention-2 at sequences of 2,048 (Dao and Gu 2024, figure 10)."""
SCAN_STREAM_FRACTION = 0.25
"""Share of a plain copy's bandwidth at which the bytes of a scan move. Five runs of Nemotron 3 Nano on GB300, GB200,
B300, B200 and H100 (Megatron-Bridge's performance summaries) take 0.94 to 1.12 times the predicted step with it, and
1.07 to 1.32 times without; what else such models lose is part of it."""
CORES_SCAN_FRACTION = 0.03
"""The same for a scan without tensor cores: fp32 cores have 1/15 of the peak on Hopper, and half of it is exponents."""
TRIANGLE_KERNELS = 2
"""Kernels of the delta rule that invert the triangle of each chunk."""


def scan(
    name: str, flops_per_token: Number, bytes_per_token: Number, shape: Shape, kernels: tuple[int, int],
    saved: tuple[Saved, ...], parameters: Number = 0, on_tensor_cores: bool = True,
) -> Operator:  # fmt: skip
    """A chunked recurrence that computes `flops_per_token` and moves `bytes_per_token` in its forward."""
    return Operator(
        name=name,
        kind="scan",
        family="scan" if on_tensor_cores else "scan_on_cores",
        scan_flops=flops_per_token * shape.tokens,
        backward_factor=SCAN_BACKWARD,
        forward_bytes=bytes_per_token * shape.tokens,
        # inputs again, gradients of inputs and outputs
        backward_bytes=SCAN_BACKWARD * bytes_per_token * shape.tokens,
        forward_kernels=kernels[0],
        backward_kernels=kernels[1],
        parameters=parameters,
        saved=saved,
    )


def scan_flops_s(op: Operator, hardware: HardwareSpec) -> Number:
    """Seconds of a scan's FLOPs in the forward: at a share of the peak that no run has measured."""
    peak = hardware.peak_flops("bf16")
    assert peak is not None, "HardwareSpec has bf16 or fp16"
    return op.scan_flops / ((SCAN_FRACTION if op.family == "scan" else CORES_SCAN_FRACTION) * peak)


def convolution(
    name: str, channels: Number, taps: int, shape: Shape, has_bias: bool, saved: tuple[Saved, ...] = ()
) -> Operator:
    """A causal convolution over time, one filter a channel, with its activation: as fast as memory is."""
    num_bytes = BF16 * shape.tokens * channels
    return Operator(
        name=name,
        kind="elementwise",
        family="activation",
        forward_bytes=2 * num_bytes,
        backward_bytes=3 * num_bytes,
        forward_kernels=1,
        backward_kernels=2,
        parameters=channels * (taps + has_bias),
        saved=saved,
    )


def gated_norm(name: str, width: Number, groups: Number, parameters: Number, shape: Shape) -> Operator:
    """A norm of a mixer's output and its gate, which the output projection reads; its inputs are kept already."""
    num_bytes = BF16 * shape.tokens * width
    return Operator(
        name=name,
        kind="elementwise",
        family="norm",
        modules=("op",),
        forward_bytes=3 * num_bytes,
        backward_bytes=5 * num_bytes,
        forward_kernels=1,
        backward_kernels=2,
        parameters=parameters,
        saved=(
            Saved("statistics", (shape.tokens, groups), dtype="fp32"),
            Saved("output", (shape.tokens, width), ("op",), gemm_input=True),
        ),
    )


SCAN_FLOPS_PER_STATE = 9
"""FLOPs of Mamba's scan per token, channel and state: discretise A and B, update the state, read it out (mamba_ssm,
benchmarks of selective_scan)."""
SCAN_SEGMENT = 2048
"""Tokens after which Mamba's scan keeps its state (mamba_ssm, selective_scan_fwd_kernel.cuh)."""


def mamba2(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Mamba-2 (Dao and Gu 2024): one projection to z, x, B, C and dt, a convolution, the scan, a gated norm.

    Per token and head of width P, a chunk of Q tokens costs 2·Q·P for the masked scores times x and 4·N·P to and from
    the state; the scores C·Bᵀ cost 2·Q·N a group.
    """
    mamba = model.mamba
    assert mamba is not None
    assert mamba.num_heads is not None
    heads, width = mamba.num_heads / shape.tp, mamba.intermediate_size / shape.tp
    groups = maximum(mamba.n_groups / shape.tp, 1.0)
    both = 2 * groups * mamba.state_size
    yield from _project_in(model, mamba, 2 * width + both + heads, shape, runtime)
    yield from _exchange_heads(2 * width + both + heads, width, shape)
    yield convolution("mamba convolution", width + both, mamba.conv_kernel, shape, mamba.conv_bias)
    head_dim, state, chunk = mamba.intermediate_size / mamba.num_heads, mamba.state_size, mamba.chunk_size
    flops = 2 * chunk * (groups * state + width) + 4 * width * state
    # states of a chunk in fp32: written, passed on, read
    state_bytes = 4 * FP32 * heads * head_dim * state / chunk
    num_bytes = BF16 * (3 * width + both + heads) + state_bytes
    kept = Saved("scan output", (shape.tokens, width))
    yield scan("mamba scan", flops, num_bytes, shape, (5, 14), (kept,), parameters=3 * heads)
    if mamba.gated_norm:
        yield gated_norm("mamba norm", width, groups, width, shape)
    else:
        yield _gate(width, shape)
    yield from _scan_out(model, mamba, width, shape, runtime)


def mamba1(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Mamba (Gu and Dao 2023): a state of N for each channel, computed without tensor cores.

    B, C and the time steps come from a small projection of the channels, whose shares tensor-parallel ranks sum.
    """
    mamba = model.mamba
    assert mamba is not None
    assert mamba.time_step_rank is not None
    width, state, rank = mamba.intermediate_size / shape.tp, mamba.state_size, mamba.time_step_rank
    tokens, inner = shape.tokens, mamba.time_step_rank + 2 * mamba.state_size
    yield from _project_in(model, mamba, 2 * width, shape, runtime)
    yield from _exchange_heads(2 * width, width, shape)
    kept = Saved("convolved", (tokens, width))
    yield convolution("mamba convolution", width, mamba.conv_kernel, shape, mamba.conv_bias, (kept,))
    yield matmul("mamba x", tokens, inner, width, Saved("dt, B, C", (tokens, inner)), wide=True)
    for backward in (False, True):
        yield Collective(
            name="mamba x reduce", kind="all_reduce", group="tp", num_bytes=BF16 * tokens * inner, backward=backward
        )
    if mamba.inner_norms:
        yield Operator(
            name="mamba inner norms", kind="elementwise", family="norm", forward_bytes=2 * BF16 * tokens * inner,
            backward_bytes=3 * BF16 * tokens * inner, forward_kernels=3, backward_kernels=6, parameters=inner,
            saved=(Saved("normed dt, B, C", (tokens, inner)), Saved("statistics", (3, tokens), dtype="fp32")),
        )  # fmt: skip
    yield matmul("mamba dt", tokens, width, rank, Saved("time steps", (tokens, width)), biases=1, wide=True)
    outputs = Saved("scan output", (tokens, width))
    gated = Saved("gated output", (tokens, width), gemm_input=True)
    states = Saved("states", (tokens / SCAN_SEGMENT, width, 2 * state), dtype="fp32")
    yield scan(
        "mamba scan", SCAN_FLOPS_PER_STATE * width * state, BF16 * (5 * width + 2 * state), shape, (1, 1),
        (outputs, gated, states),
        parameters=width * (state + 1), on_tensor_cores=False,
    )  # fmt: skip
    yield from _scan_out(model, mamba, width, shape, runtime)


def griffin(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Griffin's recurrent block (De et al. 2024): a gate, a convolution, two gates by blocks, one number of state.

    A channel's gates, its decay, the root of it and the update are some 20 FLOPs a token, without tensor cores.
    """
    mamba = model.mamba
    assert mamba is not None
    assert mamba.num_heads is not None
    width, block = mamba.intermediate_size / shape.tp, mamba.intermediate_size / mamba.num_heads
    tokens = shape.tokens
    yield from _project_in(model, mamba, 2 * width, shape, runtime)
    convolved = Saved("convolved", (tokens, width))
    yield convolution("griffin convolution", width, mamba.conv_kernel, shape, mamba.conv_bias, (convolved,))
    yield Operator(
        name="griffin gates", kind="gemm", wide=True, count=2 * mamba.num_heads / shape.tp, m=tokens, n=block, k=block,
        parameters=2 * width * (block + 1), saved=(Saved("gates", (2, tokens, width)),),
    )  # fmt: skip
    kept = (Saved("decays", (tokens, width), dtype="fp32"), Saved("states", (tokens, width)))
    yield scan(
        "griffin scan", 20 * width, BF16 * 4 * width, shape, (1, 1), kept, parameters=width, on_tensor_cores=False
    )
    yield _conv_product("griffin gate", width, shape, gemm_input=True)
    yield from _scan_out(model, mamba, width, shape, runtime)


def _project_in(
    model: ModelSpec, mamba: MambaSpec, columns: Number, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    kept = Saved("projected", (shape.tokens, columns))
    product = matmul("mamba in", shape.tokens, columns, model.hidden_size, kept, biases=mamba.proj_bias)
    yield from enter_tp("mamba in", [product], model.hidden_size, shape, runtime)


def _scan_out(model: ModelSpec, mamba: MambaSpec, width: Number, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    output = matmul("mamba out", shape.tokens, model.hidden_size, width, biases=mamba.proj_bias, modules=("op",))
    yield from leave_tp(output, BF16 * shape.tokens * model.hidden_size, shape)
    if mamba.proj_bias:
        yield from bias_gradients("mamba", [width, model.hidden_size], shape, runtime)


def _gate(width: Number, shape: Shape) -> Operator:
    """The gate that the scan's last kernel applies: it passes over no memory of its own, its output is kept."""
    return Operator(
        name="mamba gate", kind="elementwise",
        saved=(Saved("gated output", (shape.tokens, width), gemm_input=True),),
    )  # fmt: skip


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
    yield from _exchange_heads(both + 2 * heads, values, shape)
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
        yield matmul(f"{name} up", tokens, columns, rank or 0, Saved(name, (tokens, columns)))
    yield from _exchange_heads(3 * keys + 2 * values + heads, values, shape)
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
    yield from _exchange_heads(2 * keys + 2 * values, values, shape)
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


def _exchange_heads(columns: Number, outputs: Number, shape: Shape) -> Iterator[Item]:
    """Ranks of context parallelism exchange tokens for heads before a scan, which needs all tokens, and back behind it.

    Heads are put in the order of their ranks and tokens in that of their texts by a copy each, both ways (Megatron-LM,
    ssm/gated_delta_net and ssm/mamba_context_parallel).
    """
    num_bytes = BF16 * shape.tokens * (columns + outputs)
    for backward in (False, True):
        yield Collective(name="cp heads", kind="all_to_all", group="cp", num_bytes=num_bytes, backward=backward)
    moved = 4 * num_bytes * (shape.cp > 1)
    yield Operator(
        name="cp order", kind="elementwise", family="copy", forward_bytes=moved, backward_bytes=moved, working_bytes=0.0
    )


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
    return matmul(name, shape.tokens, columns, model.hidden_size, saved)


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
    output = matmul(name, shape.tokens, model.hidden_size, width, modules=("op",))
    yield from leave_tp(output, BF16 * shape.tokens * model.hidden_size, shape)


def short_conv(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """One projection to B, C and x, the convolution of B·x, its product with C, the projection out."""
    assert model.short_conv_kernel is not None
    hidden, tokens, width = model.hidden_size, shape.tokens, model.hidden_size / shape.tp
    bias = int(model.bias)
    product = matmul("convolution in", tokens, 3 * width, hidden, Saved("B, C, x", (tokens, 3 * width)), biases=bias)
    yield from enter_tp("convolution in", [product], hidden, shape, runtime)
    yield _conv_product("gate before", width, shape, gemm_input=False)
    kept = Saved("convolved", (tokens, width))
    yield convolution("convolution", width, model.short_conv_kernel, shape, model.bias, (kept,))
    yield _conv_product("gate behind", width, shape, gemm_input=True)
    output = matmul("convolution out", tokens, hidden, width, biases=bias, modules=("op",))
    yield from leave_tp(output, BF16 * tokens * hidden, shape)


def _conv_product(name: str, width: Number, shape: Shape, gemm_input: bool) -> Operator:
    num_bytes = BF16 * shape.tokens * width
    return Operator(
        name=name, kind="elementwise", family="activation", modules=("op",), forward_bytes=3 * num_bytes,
        backward_bytes=5 * num_bytes, forward_kernels=1, backward_kernels=2,
        saved=(Saved(name, (shape.tokens, width), ("op",), gemm_input=gemm_input),),
    )  # fmt: skip
