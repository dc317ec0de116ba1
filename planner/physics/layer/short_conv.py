"""The short convolution of LFM2: a gated convolution over a few tokens in place of attention."""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import enter_tp, leave_tp
from planner.physics.layer.scans import convolution
from planner.physics.operators import BF16, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.spec import RuntimeSpec


def short_conv(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """One projection to B, C and x, the convolution of B·x, its product with C, the projection out."""
    assert model.short_conv_kernel is not None
    hidden, tokens, width = model.hidden_size, shape.tokens, model.hidden_size / shape.tp
    bias = int(model.bias)
    product = Operator(
        name="convolution in", kind="gemm", m=tokens, n=3 * width, k=hidden, parameters=3 * width * (hidden + bias),
        saved=(Saved("B, C, x", (tokens, 3 * width)),),
    )  # fmt: skip
    yield from enter_tp("convolution in", [product], hidden, shape, runtime)
    yield _product("gate before", width, shape, gemm_input=False)
    kept = Saved("convolved", (tokens, width))
    yield convolution("convolution", width, model.short_conv_kernel, shape, model.bias, (kept,))
    yield _product("gate behind", width, shape, gemm_input=True)
    output = Operator(
        name="convolution out", kind="gemm", modules=("op",), m=tokens, n=hidden, k=width,
        parameters=hidden * (width + bias),
    )  # fmt: skip
    yield from leave_tp(output, BF16 * tokens * hidden, shape)


def _product(name: str, width: Number, shape: Shape, gemm_input: bool) -> Operator:
    num_bytes = BF16 * shape.tokens * width
    return Operator(
        name=name, kind="elementwise", family="activation", modules=("op",), forward_bytes=3 * num_bytes,
        backward_bytes=5 * num_bytes, forward_kernels=1, backward_kernels=2,
        saved=(Saved(name, (shape.tokens, width), ("op",), gemm_input=gemm_input),),
    )  # fmt: skip
