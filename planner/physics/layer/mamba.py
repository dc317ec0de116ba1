"""State-space mixers: Mamba-2 and Mamba, heads or channels sharded over tp.

What is kept is what mamba_ssm 2.2's fused kernels keep: of Mamba-2 the input projection's output and the scan's, the
convolution and the states are computed again in the backward; of Mamba with inner norms (Jamba) all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import bias_gradients, enter_tp, leave_tp
from planner.physics.layer.scans import convolution, gated_norm, scan
from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved
from planner.shape import Number, Shape, maximum
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MambaSpec
from planner.trainers.spec import RuntimeSpec

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
    yield from _project_out(model, mamba, width, shape, runtime)


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
    kept = Saved("convolved", (tokens, width))
    yield convolution("mamba convolution", width, mamba.conv_kernel, shape, mamba.conv_bias, (kept,))
    yield Operator(
        name="mamba x", kind="gemm", wide=True, m=tokens, n=inner, k=width, parameters=inner * width,
        saved=(Saved("dt, B, C", (tokens, inner)),),
    )  # fmt: skip
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
    yield Operator(
        name="mamba dt", kind="gemm", wide=True, m=tokens, n=width, k=rank, parameters=width * (rank + 1),
        saved=(Saved("time steps", (tokens, width)),),
    )  # fmt: skip
    outputs = Saved("scan output", (tokens, width))
    gated = Saved("gated output", (tokens, width), gemm_input=True)
    states = Saved("states", (tokens / SCAN_SEGMENT, width, 2 * state), dtype="fp32")
    yield scan(
        "mamba scan", SCAN_FLOPS_PER_STATE * width * state, BF16 * (5 * width + 2 * state), shape, (1, 1),
        (outputs, gated, states),
        parameters=width * (state + 1), on_tensor_cores=False,
    )  # fmt: skip
    yield from _project_out(model, mamba, width, shape, runtime)


def _project_in(
    model: ModelSpec, mamba: MambaSpec, columns: Number, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    product = Operator(
        name="mamba in", kind="gemm", m=shape.tokens, n=columns, k=model.hidden_size,
        parameters=columns * (model.hidden_size + mamba.proj_bias),
        saved=(Saved("projected", (shape.tokens, columns)),),
    )  # fmt: skip
    yield from enter_tp("mamba in", [product], model.hidden_size, shape, runtime)


def _project_out(
    model: ModelSpec, mamba: MambaSpec, width: Number, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    output = Operator(
        name="mamba out", kind="gemm", modules=("op",), m=shape.tokens, n=model.hidden_size, k=width,
        parameters=model.hidden_size * (width + mamba.proj_bias),
    )  # fmt: skip
    yield from leave_tp(output, BF16 * shape.tokens * model.hidden_size, shape)
    if mamba.proj_bias:
        yield from bias_gradients("mamba", [width, model.hidden_size], shape, runtime)


def _gate(width: Number, shape: Shape) -> Operator:
    """The gate that the scan's last kernel applies: it passes over no memory of its own, its output is kept."""
    return Operator(
        name="mamba gate", kind="elementwise",
        saved=(Saved("gated output", (shape.tokens, width), gemm_input=True),),
    )  # fmt: skip
