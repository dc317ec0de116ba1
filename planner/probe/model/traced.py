"""A traced layer by its operators: products, attention and moved bytes of their sizes, and as many bytes kept.

Nothing of the module's own code runs. An operator works on a part, or on repeats, of what the one before it gave, so
that losses and gradients follow from tokens and weights, and are the same in one process, but are not the module's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from planner.physics.layers import traced_operators
from planner.physics.operators import BF16, FP32, Operator
from planner.probe.model.attention import AttentionTables, Visibility, core_attention
from planner.probe.model.layers import INITIAL_STD
from planner.probe.model.peers import Exchange, Surroundings, apply, mark, recomputable
from planner.shape import Shape
from planner.specs.model import LayerKind, ModelSpec


class TracedLayer(nn.Module):
    """x plus what comes out of the operators one after another, which begin at x."""

    def __init__(
        self, model: ModelSpec, kind: LayerKind, around: Surroundings, before: Iterable[nn.Parameter] = ()
    ) -> None:
        """`before` are weights of earlier layers, which those without weights of their own share."""
        super().__init__()
        self.model, self.kind, self.around = model, kind, around
        self.weights = nn.ParameterDict()
        tp = around.tp.size
        for number, (row, operator) in enumerate(traced_operators(model, kind, Shape(tp=tp))):
            size = round(float(operator.parameters))
            product = prod(_sizes(operator)[2:]) if operator.kind == "gemm" and operator.weight else 0
            if not size and not product:
                continue
            pool = [] if size else [*self.weights.values(), *before]
            weight = min((one for one in pool if one.numel() >= product), key=Tensor.numel, default=None)
            if weight is None:
                weight = nn.Parameter(torch.empty(size or product))
                size = weight.numel()
                mark(weight, partial="sequence", shard=(0, ((size * tp, size),)) if row.split else None)
            self.weights[str(number)] = weight

    def forward(self, x: Tensor, tables: AttentionTables) -> Tensor:
        tp = self.around.tp
        shape = Shape(
            tp=tp.size, micro_batch_size=x.shape[1], seq_length=x.shape[0] * (tp.size if tp.sequence_parallel else 1)
        )
        flow, is_held, left = x, False, 0.0  # left: bytes in 16 bits that are still to be kept
        for number, (row, operator) in enumerate(traced_operators(self.model, self.kind, shape)):
            left += sum(float(tensor.num_bytes) for tensor in operator.saved)
            keeps = is_held or operator.kind == "attention" or left >= BF16 * flow.numel()
            left -= BF16 * flow.numel() * (keeps and not is_held)
            if operator.kind == "attention":
                attend = recomputable("core_attn", _attention, self.around)
                flow, is_held = attend(flow, operator, self.around), True
                left -= FP32 * int(operator.q_len * operator.batch * operator.heads) + BF16 * flow.numel()
            else:
                weight = self.weights.get(str(number))
                out = apply(_Step, flow, weight, operator, row.split, self.around, keeps)
                is_view = operator.kind == "elementwise" and out.numel() == flow.numel()
                flow, is_held = out, keeps and is_view
        return apply(_Kept, x + _taken(flow, x.shape), max(round(left) // BF16, 0))


def _part(values: Tensor, *sizes: int) -> Tensor:
    """The first values, or all of them as often as it takes, in these sizes."""
    flat, total = values.reshape(-1), prod(sizes)
    if flat.numel() < total:
        flat = flat.repeat(-(-total // flat.numel()))
    return flat[:total].view(sizes)


def _taken(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """`_part` whose gradient is as large as what it was taken of."""
    shape = values.shape
    return apply(Exchange, values, lambda whole: _part(whole, *sizes), lambda grad: _part(grad, *shape))


def _sizes(operator: Operator) -> tuple[int, int, int, int]:
    """count, m, n and k of a product."""
    count, m, n, k = (max(1, round(float(one))) for one in (operator.count, operator.m, operator.n, operator.k))
    return count, m, n, k


def _attention(flow: Tensor, operator: Operator, around: Surroundings) -> Tensor:
    """Attention of a part of `flow` to itself; what torch keeps for its backward is kept."""
    op = operator
    sizes = (op.q_len, op.heads, op.qk_dim), (op.kv_len, op.kv_heads, op.qk_dim), (op.kv_len, op.kv_heads, op.v_dim)
    q, k, v = (_taken(flow, [round(float(one)) for one in (length, op.batch, *heads)]) for length, *heads in sizes)
    return core_attention(q, k, v, Visibility(None, 0, None), around.cp)


class _Step(torch.autograd.Function):
    """A product or kernels that move bytes. What went in is kept for the backward where the trace has bytes for it."""

    @staticmethod
    def forward(
        ctx: Any, flow: Tensor, weight: Tensor | None, operator: Operator, split: str, around: Surroundings, keeps: bool
    ) -> Tensor:
        ctx.save_for_backward(flow if keeps else None, weight)
        ctx.parameter, ctx.shape, ctx.operator, ctx.split, ctx.around = weight, flow.shape, operator, split, around
        if operator.kind != "gemm":
            return _moved(flow, float(operator.forward_bytes), operator.forward_kernels)
        count, m, n, k = _factors(operator, weight)
        if split == "columns":
            shards = around.tp.size if around.tp.sequence_parallel else 1
            flow = around.tp.enter(_part(flow, count * m * k // shards))
        right = _part(flow, count, k, n) if weight is None else _part(weight, count, n, k).transpose(1, 2)
        out = _product(_part(flow, count, m, k), right, weight is not None)
        return around.tp.leave(out.flatten()) if split == "rows" else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flow, weight = ctx.saved_tensors
        operator, tp = ctx.operator, ctx.around.tp
        grad = grad.contiguous()
        inputs = grad if flow is None else flow
        weight_grad = None
        if operator.kind != "gemm":
            grad = _moved(grad, float(operator.backward_bytes), operator.backward_kernels)
            # a copy: two kernels with weights one after another would add to one gradient
            weight_grad = None if weight is None else _part(grad, *weight.shape).clone()
        else:
            count, m, n, k = _factors(operator, weight)
            rows = _part(tp.leave_grad(grad) if ctx.split == "rows" else grad, count, m, n)
            left = _part(inputs, count, m, k).transpose(1, 2)
            right = _part(inputs, count, n, k) if weight is None else _part(weight, count, n, k)
            grad = _product(rows, right, weight is not None)
            if weight is None:
                _product(left, rows, False)  # the other operand's
            else:
                columns = rows.transpose(1, 2)
                weight_grad = ctx.around.weight_gradient(
                    ctx.parameter, lambda: _as_large(_product(columns, left.transpose(1, 2), False), weight)
                )
            if ctx.split == "columns":
                grad = tp.enter_grad(grad.flatten())
        return _part(grad, *ctx.shape), weight_grad, None, None, None, None


def _factors(operator: Operator, weight: Tensor | None) -> tuple[int, int, int, int]:
    """count, m, n and k; products by one weight, such as a loop's, are one of all rows."""
    count, m, n, k = _sizes(operator)
    return (count, m, n, k) if weight is None or weight.numel() >= count * n * k else (1, count * m, n, k)


def _product(left: Tensor, right: Tensor, by_weight: bool) -> Tensor:
    """[count, m, k] · [count, k, n], scaled so that values neither grow nor vanish along a layer."""
    scale = 1 / (sqrt(left.shape[-1]) * (INITIAL_STD if by_weight else 1))
    out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    return torch.baddbmm(out, left, right, beta=0, alpha=scale)


def _as_large(grad: Tensor, weight: Tensor) -> Tensor:
    """A product's gradient of a weight that may have a bias, or what other products read, behind it."""
    return nn.functional.pad(grad.flatten(), (0, weight.numel() - grad.numel()))


def _moved(values: Tensor, num_bytes: float, num_kernels: int) -> Tensor:
    """Values once so many kernels have read and written so many bytes."""
    elements = max(1, round(num_bytes / (2 * BF16 * max(1, num_kernels))))
    out = values
    for _ in range(num_kernels):
        out = torch.mul(_part(out, elements), 1.0)
    return out if out.numel() > values.numel() else values.view_as(values)


class _Kept(torch.autograd.Function):
    """x, and as many elements beside it until the backward as nothing else of the layer keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_elements: int) -> Tensor:
        ctx.save_for_backward(x.new_empty(num_elements))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
