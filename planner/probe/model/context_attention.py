"""Attention whose backward is written here: over the keys of all context-parallel ranks, or by the flash kernel alone.

Keys and values are gathered from all ranks, and a chunk sees itself and those before it (Llama 3, arXiv:2407.21783
§3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.probe.model.attention_kernels import (
    Visibility,
    flash_backward,
    flash_forward,
    plain_backward,
    plain_forward,
    takes_flash,
)
from planner.probe.model.peers import TensorPeers
from planner.probe.model.split_sequence import chunk_ends, gather, scatter


class ContextAttention(torch.autograd.Function):
    """Causal attention of this rank's queries [seq/cp, batch, heads, dim] over the keys and values of all ranks.

    Keys and values come as this rank's, and are kept as such: the others' are gathered again in backward. Returns
    [seq/cp, batch, heads, v dim].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        window: int,
        sinks: Tensor | None,
        cp: TensorPeers,
    ) -> Tensor:
        ctx.mask, ctx.window, ctx.cp = mask, window, cp
        ctx.flash = takes_flash(q) and mask is None
        keys, values, rules = gather(k, cp), gather(v, cp), Visibility(mask, window, sinks)
        outs, saved = [], []
        for part, end in zip(q.chunk(2), chunk_ends(q, cp), strict=True):
            attend = flash_forward if ctx.flash else plain_forward
            out, *kernel_state = attend(part, keys[:end], values[:end], rules)
            outs.append(out)
            saved += kernel_state
        output = torch.cat(outs)
        ctx.save_for_backward(q, k, v, sinks, output, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, *saved = ctx.saved_tensors
        keys, values, rules = gather(k, ctx.cp), gather(v, ctx.cp), Visibility(ctx.mask, ctx.window, sinks)
        keys_grad, values_grad = torch.zeros_like(keys), torch.zeros_like(values)
        sinks_grad = None if sinks is None else torch.zeros_like(sinks)
        q_grads, half = [], len(saved) // 2
        backward = flash_backward if ctx.flash else plain_backward
        for number, end in enumerate(chunk_ends(q, ctx.cp)):
            dout, part, part_out = (x.chunk(2)[number] for x in (grad.contiguous(), q, out))
            kernel_state = saved[number * half : (number + 1) * half]
            dq, dk, dv, dsinks = backward(dout, part, part_out, keys[:end], values[:end], rules, kernel_state)
            q_grads.append(dq)
            keys_grad[:end].add_(dk)  # with += Python would copy the sum onto itself
            values_grad[:end].add_(dv)
            if sinks_grad is not None and dsinks is not None:
                sinks_grad += dsinks
        k_grad, v_grad = scatter(keys_grad, ctx.cp), scatter(values_grad, ctx.cp)
        return torch.cat(q_grads), k_grad, v_grad, None, None, sinks_grad, None


class FlashAttention(torch.autograd.Function):
    """Causal attention of q [seq, batch, heads, dim] over k and v by the flash kernel itself: windows, learned sinks.

    Returns [seq, batch, heads, v dim].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Tensor:
        out, *saved = flash_forward(q, k, v, Visibility(None, window, sinks))
        ctx.window = window
        ctx.save_for_backward(q, k, v, sinks, out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, *saved = ctx.saved_tensors
        dq, dk, dv, dsinks = flash_backward(grad, q, out, k, v, Visibility(None, ctx.window, sinks), saved)
        return dq, dk, dv, None, dsinks
