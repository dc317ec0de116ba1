"""Linear layers sharded over tensor-parallel peers, whose backward keeps input and weight gradient apart; and norms."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.probe.model.peers import Leave, Surroundings, apply, mark_partial, mark_shard
from planner.probe.torch_build import on_gpu, this_build
from planner.specs.model import ModelSpec

NORM_EPSILON = 1e-5


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as the model has it."""

    def __init__(self, width: int, model: ModelSpec, per_head: bool = False) -> None:
        super().__init__()
        self.rms = per_head or model.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if model.has_norm_bias and not self.rms else None
        mark_partial(self.weight, always=per_head)
        mark_partial(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        shape = tuple(self.weight.shape)
        if self.rms:
            return functional.rms_norm(x, shape, self.weight, NORM_EPSILON)
        return functional.layer_norm(x, shape, self.weight, self.bias, NORM_EPSILON)


_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32) if hasattr(torch, "_grouped_mm") else ()
"""Dtypes that torch's grouped GEMM takes on the CPU; on a GPU it takes bf16, where the build has it. Everything else is
multiplied expert by expert."""


class Linear(nn.Module):
    """y = x · weightᵀ + bias, whole ("none"), or with its rows ("column") or columns ("row") sharded over tp.

    A column-parallel layer gathers the sequence inside its GEMM, keeps the shard and gathers again in backward; a
    row-parallel one sums over the peers and shards the sequence again. `sections` are the parts of a fused weight
    (q, k, v; gate, up), each sharded by itself: (whole width, width on a rank).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        around: Surroundings,
        *,
        parallel: Literal["none", "column", "row"] = "none",
        bias: bool = False,
        sections: tuple[tuple[int, int], ...] = (),
    ) -> None:
        super().__init__()
        tp = around.tp.size
        self.around, self.parallel = around, parallel
        rows, columns = out_features, in_features // tp if parallel == "row" else in_features
        if parallel == "column":
            sections = sections or ((out_features, out_features // tp),)
            rows = sum(local for _, local in sections)
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        if parallel == "column":
            mark_shard(self.weight, 0, sections)
            mark_shard(self.bias, 0, sections)
        elif parallel == "row":
            mark_shard(self.weight, 1, ((in_features, columns),))
            mark_partial(self.bias)
        else:
            mark_partial(self.weight)
            mark_partial(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        row_of_several = self.parallel == "row" and self.around.tp.size > 1
        inner_bias = None if row_of_several else self.bias
        y = apply(_Product, x, self.weight, inner_bias, self.around, self.parallel == "column")
        if row_of_several:
            y = apply(Leave, y, self.around.tp)
            return y if self.bias is None else y + self.bias
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, around: Surroundings, enters: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # where it is recomputed, what was saved is another tensor, without main gradient
        ctx.around, ctx.enters, ctx.has_bias = around, enters, bias is not None
        return functional.linear(around.tp.enter(x) if enters else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp, enters = ctx.around.tp, ctx.enters
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = (tp.enter(x) if enters else x).reshape(-1, x.shape[-1])
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        bias_grad = rows.sum(0) if ctx.has_bias else None
        # trainers scatter the input's gradient while they compute the weight's: both are there at once
        weight_grad = ctx.around.weight_gradient(ctx.parameter, partial(_outer, rows, inputs))
        if x_grad is not None and enters:
            x_grad = tp.enter_grad(x_grad)
        return x_grad, weight_grad, bias_grad, None, None


def _outer(rows: Tensor, inputs: Tensor) -> Tensor:
    return rows.T @ inputs


class GroupedProduct(torch.autograd.Function):
    """y[rows of expert e] = x[rows of expert e] · weight[e]ᵀ; `ends` are the ends of the experts' rows, int32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, around: Surroundings) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.parameter = weight
        ctx.around = around
        return _grouped(x, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        return (
            _grouped(grad, weight, ends),
            ctx.around.weight_gradient(ctx.parameter, partial(_grouped_outer, grad, x, ends)),
            None,
            None,
        )


def takes_groups(x: Tensor) -> bool:
    """True if torch's grouped product runs on x's device and dtype."""
    if not on_gpu(x):
        return x.dtype in _GROUPED_DTYPES
    return bool(_GROUPED_DTYPES) and x.dtype == torch.bfloat16 and this_build().takes_groups(x.device)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, k] · [experts, k, n] → [rows, n]."""
    if takes_groups(x):
        return torch._grouped_mm(x, weight, offs=ends)
    return torch.cat([part @ matrix for part, matrix in zip(_split(x, ends), weight, strict=True)])


def _grouped_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """[rows, n]ᵀ · [rows, k] → [experts, n, k]."""
    if takes_groups(x):
        return torch._grouped_mm(grad.T, x, offs=ends)
    return torch.stack([g.T @ part for g, part in zip(_split(grad, ends), _split(x, ends), strict=True)])


def _split(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return torch.tensor_split(x, ends[:-1].cpu().long())
