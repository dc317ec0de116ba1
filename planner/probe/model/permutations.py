"""Rows of tokens brought to their experts and back, by gathers in both passes.

torch's own gradient of a gather adds rows with atomic operations, which on an H200 takes nine times as long as the
gather (`moe_unpermute` of planner/profile/data/h200/stream.csv) and gives other bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToRows(torch.autograd.Function):
    """A row for each choice of a token: row r is token `token[r]`, and the choices of a token are in the rows
    `inverse[k·token]` to `inverse[k·token + k − 1]`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.num_tokens = tokens.shape[0]
        ctx.save_for_backward(inverse)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, ctx.saved_tensors[0], ctx.num_tokens), None, None


class FromRows(torch.autograd.Function):
    """The sum of each token's rows: what `ToRows` is to tokens, its gradient is to sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, inverse: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token)
        return _summed(rows, inverse, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


class Reorder(torch.autograd.Function):
    """Rows in another order, and their gradients in the old one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class RowsOf(torch.autograd.Function):
    """The row of each expert, repeated for all rows that it computes; a product adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, experts: Tensor, expert: Tensor) -> Tensor:
        ctx.num_experts = experts.shape[0]
        ctx.save_for_backward(expert)
        return experts.index_select(0, expert)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (expert,) = ctx.saved_tensors
        is_own = torch.arange(ctx.num_experts, device=expert.device).unsqueeze(1) == expert
        return is_own.to(grad.dtype) @ grad, None


def _summed(rows: Tensor, inverse: Tensor, num_tokens: int) -> Tensor:
    """[tokens, hidden]: the rows of each token added up."""
    return rows.index_select(0, inverse).view(num_tokens, -1, rows.shape[-1]).sum(1)
