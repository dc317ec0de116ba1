"""The layers of a model in eager torch but attention: norms, products, the MLP, and mixtures of experts.

Rows of tokens come to their experts and back by gathers in both passes. torch's own gradient of a gather adds rows with
atomic operations, which on an H200 takes nine times as long as the gather (`moe_unpermute` of
tools/calibrate/data/h200/stream.csv) and gives other bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.probe.model.peers import (
    Sections,
    Surroundings,
    apply,
    expert_all_to_all,
    leave,
    mark,
    recomputable,
    to_fp32,
)
from planner.probe.torch_build import on_gpu, this_build
from planner.specs.base import Fields
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec


class Picked(torch.autograd.Function):
    """The rows at `there`, of which each `num_there` are added up unless it is 0; gradients go by `back` likewise.

    A token's rows, one for each of its experts, lie at `inverse[k·token]` to `inverse[k·token + k − 1]`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, num_there: int, back: Tensor, num_back: int) -> Tensor:
        ctx.num_back = num_back
        ctx.save_for_backward(back)
        return _picked(rows, there, num_there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _picked(grad, ctx.saved_tensors[0], ctx.num_back), None, None, None, None


def _picked(rows: Tensor, index: Tensor, num_sums: int) -> Tensor:
    picked = rows.index_select(0, index)
    return picked.view(num_sums, -1, rows.shape[-1]).sum(1) if num_sums else picked


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
        up = ((intermediate_size, intermediate_size // around.tp.size),) * (2 if model.gated_mlp else 1)
        self.up = Linear(model.hidden_size, up, around, parallel="column", bias=model.has_mlp_bias)
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
        self.moe = moe
        self.around = around
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
        num_tokens = tokens.shape[0]
        rows = apply(Picked, tokens, token, 0, inverse_order, num_tokens)
        rows = self.dispatch(rows, weights.flatten().index_select(0, order), num_sent)
        y = apply(Picked, rows, inverse_order, num_tokens, token, 0).view_as(x)
        if self.shared is None:
            return y
        shared = recomputable("shared_experts", self.shared, self.around)(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token, both [tokens, num_experts_per_tok]."""
        scores = to_fp32(self.router(tokens)).softmax(dim=-1)
        num_experts = self.moe.num_experts
        k = self.moe.num_experts_per_tok
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
        rows = expert_all_to_all(rows, peers, num_sent, num_received)
        weights = expert_all_to_all(weights, peers, num_sent, num_received)
        num_local_experts = received.shape[1]
        if num_local_experts > 1:
            expert = torch.arange(num_local_experts, device=rows.device).repeat(peers.size)
            expert = expert.repeat_interleave(received.flatten(), output_size=rows.shape[0])  # does not wait for a GPU
            order = expert.argsort(stable=True)
            inverse_order = order.argsort()
            rows = apply(Picked, rows, order, 0, inverse_order, 0)
            weights = weights.index_select(0, order)
        rows = self.experts(rows, weights, received.sum(0))
        if num_local_experts > 1:
            rows = apply(Picked, rows, inverse_order, 0, order, 0)
        return expert_all_to_all(rows, peers, num_received, num_sent)

    def splits(self, sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """Number of rows that go to each peer, and number that come from each.

        The host waits for a GPU to tell them, once a layer. Where routing is balanced it knows them, and runs ahead of
        the GPU here as elsewhere.
        """
        peers = self.around.ep
        num_experts = self.moe.num_experts
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
        self.model = model
        self.around = around
        local = moe.num_experts // around.ep.size
        width = moe.moe_intermediate_size
        factor = 2 if model.gated_mlp else 1
        self.up = nn.Parameter(torch.empty(local, factor * width, model.hidden_size))
        self.down = nn.Parameter(torch.empty(local, model.hidden_size, width))
        has_bias = model.has_mlp_bias
        self.up_bias = nn.Parameter(torch.empty(local, factor * width)) if has_bias else None
        self.down_bias = nn.Parameter(torch.empty(local, model.hidden_size)) if has_bias else None
        for parameter in self.parameters():
            mark(parameter, expert=True, partial="sequence")

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


NORM_EPSILON = 1e-5
INITIAL_STD = 0.02
"""Standard deviation of weights before the first step."""


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as the model has it."""

    def __init__(self, width: int, model: ModelSpec, per_head: bool = False) -> None:
        super().__init__()
        self.rms = per_head or model.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if model.has_norm_bias and not self.rms else None
        mark(self.weight, partial="always" if per_head else "sequence")
        mark(self.bias, partial="sequence")

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
    row-parallel one sums over the peers and shards the sequence again. A column-parallel weight may be fused of several
    sections (q, k, v; gate, up).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sections,
        around: Surroundings,
        *,
        parallel: Literal["none", "column", "row"] = "none",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.around, self.parallel = around, parallel
        tp = around.tp.size if parallel == "column" else 1
        sections = ((out_features, out_features // tp),) if isinstance(out_features, int) else out_features
        rows, columns = sum(local for _, local in sections), in_features
        of_weight: Fields = {"partial": "sequence"}
        of_bias = of_weight
        if parallel == "column":
            of_weight = of_bias = {"shard": (0, sections)}
        elif parallel == "row":
            columns = in_features // around.tp.size
            of_weight = {"shard": (1, ((in_features, columns),))}
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        mark(self.weight, **of_weight)
        mark(self.bias, **of_bias)

    def forward(self, x: Tensor) -> Tensor:
        row_of_several = self.parallel == "row" and self.around.tp.size > 1
        inner_bias = None if row_of_several else self.bias
        y = apply(_Product, x, self.weight, inner_bias, self.around, self.parallel == "column")
        if row_of_several:
            y = leave(y, self.around.tp)
            return y if self.bias is None else y + self.bias
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, around: Surroundings, enters: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # where it is recomputed, what was saved is another tensor, without main gradient
        ctx.around = around
        ctx.enters = enters
        ctx.has_bias = bias is not None
        return functional.linear(around.tp.enter(x) if enters else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp = ctx.around.tp
        enters = ctx.enters
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = (tp.enter(x) if enters else x).reshape(-1, x.shape[-1])
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        bias_grad = rows.sum(0) if ctx.has_bias else None
        # trainers scatter the input's gradient while they compute the weight's: both are there at once
        weight_grad = ctx.around.weight_gradient(ctx.parameter, lambda: rows.T @ inputs)
        if x_grad is not None and enters:
            x_grad = tp.enter_grad(x_grad)
        return x_grad, weight_grad, bias_grad, None, None


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
