"""Kernels of GPUs by the bytes that they allocate and their CPU twins do not: outputs, saved tensors, buffers.

A rehearsal's tensors are on the CPU, because every build of torch differentiates there. Its kernels are registered in
place of torch's own for as long as a rehearsal lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from planner.probe.model.peers import apply
from planner.probe.rehearse.account import MomentBytes

BF16, FP32 = 2, 4
"""Bytes of an element."""
EMBEDDING_ROWS = 10
"""Rows of one token that a thread of the embedding's backward sums (NROWS_PER_THREAD, EmbeddingBackwardKernel.cu)."""
MOST_UNSORTED = 3072
"""The most tokens whose embedding gradients are summed without sorting (aten/src/ATen/native/cuda/Embedding.cu)."""


class FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel: keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


class FusedAttention(torch.autograd.Function):
    """Attention in one kernel: keeps its operands, its output in their layout, the log-sum-exp and a random state."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _laid_out_as(q, (*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        moment = q.new_empty(attention_backward_bytes(q.transpose(1, 2), k.transpose(1, 2)), dtype=torch.uint8)
        del moment
        return grads


def _laid_out_as(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor whose dimensions lie in memory in the order of `like`'s."""
    order = sorted(range(like.dim()), key=lambda dim: like.stride(dim), reverse=True)
    dense = like.new_empty([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(like.dim())])


def attention_backward_bytes(q: Tensor, k: Tensor) -> int:
    """Bytes of a fused attention's backward for itself; q and k are [batch, seq, heads, dim].

    The gradient of q is summed in fp32, each row has the sum of its gradient times its output, and where heads share
    keys each query head has gradients of keys and values of its own until they are summed (flash_api.cpp's mha_bwd;
    cuDNN's graph has the same tensors, sdpa backward of cudnn-frontend).
    """
    batch, seq, heads, dim = q.shape
    rows = batch * -(-seq // 128) * 128 * heads
    unit = 32 if dim <= 128 else 64
    shared = 2 * BF16 * batch * k.shape[1] * heads * dim if k.shape[2] != heads else 0
    return FP32 * rows * (-(-dim // unit) * unit + 1) + shared


def _flash_backward_bytes(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    return attention_backward_bytes(q, k)


def _embedding_backward_bytes(grad: Tensor, indices: Tensor, num_weights: int, *_: Any, **__: Any) -> int:
    """Sums of up to ten rows of one token, in fp32, before they are added up."""
    tokens = indices.numel()
    if tokens <= MOST_UNSORTED:
        return 0
    return FP32 * (tokens // EMBEDDING_ROWS + min(tokens, num_weights)) * grad.shape[-1]


MOMENTS: dict[Any, MomentBytes] = {
    torch.ops.aten._flash_attention_backward.default: _flash_backward_bytes,
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward_bytes,
}
"""Bytes that kernels allocate for themselves, by operator."""


@contextmanager
def gpu_kernels(fuses_norms: bool) -> Iterator[None]:
    """Norms and attention allocate what a GPU's kernels do. Norms do so where this torch fuses them."""

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        assert weight is not None
        return apply(FusedNorm, x, weight)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if mask is not None and enable_gqa:  # no fused kernel takes both
            written: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
            return written
        return apply(FusedAttention, q, k, v)

    library = cast(Any, torch.library).Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    if fuses_norms:
        library.impl("rms_norm", rms_norm, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()
