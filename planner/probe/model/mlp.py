"""The MLP of a decoder layer in eager torch: dense, or a mixture of experts with its routing and exchanges.

Rows of tokens come to their experts and back by gathers in both passes. torch's own gradient of a gather adds rows with
atomic operations, which on an H200 takes nine times as long as the gather (`moe_unpermute` of
tools/calibrate/data/h200/stream.csv) and gives other bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.probe.model.linear import GroupedProduct, Linear
from planner.probe.model.peers import ExpertAllToAll, Surroundings, apply, mark_partial, recomputable, to_fp32
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec


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


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def activate(x: Tensor, model: ModelSpec) -> Tensor:
    """act(gate)·up of the two halves of x, or act(x)."""
    function = _ACTIVATIONS[model.activation]
    if model.gated_mlp:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up
    return function(x)


class DenseMLP(nn.Module):
    """Up (and gate) projection in one GEMM, activation, down projection."""

    def __init__(self, model: ModelSpec, intermediate_size: int, around: Surroundings) -> None:
        super().__init__()
        self.model = model
        section = (intermediate_size, intermediate_size // around.tp.size)
        sections = (section,) * (2 if model.gated_mlp else 1)
        self.up = Linear(
            model.hidden_size,
            intermediate_size * len(sections),
            around,
            parallel="column",
            bias=model.has_mlp_bias,
            sections=sections,
        )
        self.down = Linear(intermediate_size, model.hidden_size, around, parallel="row", bias=model.has_mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(activate(self.up(x), self.model)))


class MoE(nn.Module):
    """Router, permutation by expert, exchange over ep, grouped GEMMs, and the way back; a shared expert beside them.

    The router is a softmax whose top-k weights are normalised; its bias, where there is one, is added to the logits.
    Each row is weighted at the experts' activation, so that its gradient needs no copy of the experts' output.
    """

    def __init__(self, model: ModelSpec, moe: MoESpec, around: Surroundings) -> None:
        super().__init__()
        self.moe, self.around = moe, around
        self.router = Linear(model.hidden_size, moe.num_experts, around, bias=moe.router_bias)
        self.experts = Experts(model, moe, around)
        width = moe.shared_expert_intermediate_size
        self.shared = DenseMLP(model, width, around) if width else None
        self.shared_gate = Linear(model.hidden_size, 1, around) if moe.shared_expert_gate else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.moe.num_experts_per_tok
        inverse_order = order.argsort()
        num_sent = count(chosen.flatten(), self.moe.num_experts)
        rows = apply(ToRows, tokens, token, inverse_order)
        rows = self.dispatch(rows, weights.flatten().index_select(0, order), num_sent)
        y = apply(FromRows, rows, token, inverse_order, tokens.shape[0]).view_as(x)
        if self.shared is None:
            return y
        shared = recomputable("shared_experts", self.shared, self.around)(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token, both [tokens, num_experts_per_tok]."""
        scores = to_fp32(self.router(tokens)).softmax(dim=-1)
        num_experts, k = self.moe.num_experts, self.moe.num_experts_per_tok
        if self.around.balanced_routing:
            chosen = torch.arange(tokens.shape[0] * k, device=tokens.device).view(-1, k) % num_experts
            weights = scores.gather(1, chosen)
        else:
            weights, chosen = scores.topk(k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype), chosen

    def dispatch(self, rows: Tensor, weights: Tensor, sent: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the ranks of their experts, apply the experts and bring the rows back."""
        peers = self.around.ep
        if peers.size == 1:
            return cast(Tensor, self.experts(rows, weights, sent))
        received = peers.counts(sent)
        num_sent, num_received = self.splits(sent, received, rows.shape[0])
        rows = apply(ExpertAllToAll, rows, peers, num_sent, num_received)
        weights = apply(ExpertAllToAll, weights, peers, num_sent, num_received)
        num_local_experts = received.shape[1]
        if num_local_experts > 1:
            expert = torch.arange(num_local_experts, device=rows.device).repeat(peers.size)
            expert = expert.repeat_interleave(received.flatten(), output_size=rows.shape[0])  # does not wait for a GPU
            order = expert.argsort(stable=True)
            inverse_order = order.argsort()
            rows, weights = apply(Reorder, rows, order, inverse_order), weights.index_select(0, order)
        rows = self.experts(rows, weights, received.sum(0))
        if num_local_experts > 1:
            rows = apply(Reorder, rows, inverse_order, order)
        return apply(ExpertAllToAll, rows, peers, num_received, num_sent)

    def splits(self, sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """Number of rows that go to each peer, and number that come from each.

        The host waits for a GPU to tell them, once a layer. Where routing is balanced it knows them, and runs ahead of
        the GPU here as elsewhere.
        """
        peers, num_experts = self.around.ep, self.moe.num_experts
        if not self.around.balanced_routing:
            to_peers, from_peers = torch.stack((sent.view(peers.size, -1).sum(1), received.sum(1))).tolist()
            return to_peers, from_peers
        counts = [num_rows // num_experts + (expert < num_rows % num_experts) for expert in range(num_experts)]
        local = num_experts // peers.size
        to_peers = [sum(counts[first : first + local]) for first in range(0, num_experts, local)]
        return to_peers, [to_peers[peers.rank]] * peers.size


def count(chosen: Tensor, num_experts: int) -> Tensor:
    """The number of times that each expert was chosen, counted on the device without waiting for it."""
    return torch.zeros(num_experts, dtype=torch.long, device=chosen.device).scatter_add_(
        0, chosen, torch.ones_like(chosen)
    )


class Experts(nn.Module):
    """The routed experts a rank holds: grouped GEMMs over rows sorted by expert."""

    def __init__(self, model: ModelSpec, moe: MoESpec, around: Surroundings) -> None:
        super().__init__()
        self.model, self.around = model, around
        local, width = moe.num_experts // around.ep.size, moe.moe_intermediate_size
        factor = 2 if model.gated_mlp else 1
        self.up = nn.Parameter(torch.empty(local, factor * width, model.hidden_size))
        self.down = nn.Parameter(torch.empty(local, model.hidden_size, width))
        has_bias = model.has_mlp_bias
        self.up_bias = nn.Parameter(torch.empty(local, factor * width)) if has_bias else None
        self.down_bias = nn.Parameter(torch.empty(local, model.hidden_size)) if has_bias else None
        for parameter in self.parameters():
            parameter.expert = True  # type: ignore[attr-defined]
            mark_partial(parameter)

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        hidden = apply(GroupedProduct, rows, self.up, ends, self.around)
        hidden = self._add_bias(hidden, self.up_bias, counts)
        hidden = activate(hidden, self.model) * weights.unsqueeze(-1)
        out = apply(GroupedProduct, hidden, self.down, ends, self.around)
        if self.down_bias is None:
            return out
        return self._add_bias(out, self.down_bias, counts, weights)

    @staticmethod
    def _add_bias(x: Tensor, bias: Tensor | None, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        if bias is None:
            return x
        expert = torch.arange(bias.shape[0], device=x.device).repeat_interleave(counts, output_size=x.shape[0])
        rows = apply(RowsOf, bias, expert)
        return x + (rows if weights is None else rows * weights.unsqueeze(-1))
