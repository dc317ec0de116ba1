"""Who a rank exchanges tensors with inside a layer: nobody, real process groups, or peers emulated on this very device.

Activations are [seq, batch, hidden]; sequence parallelism shards their first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(slots=True)
class TensorPeers:
    """The tensor-parallel (or context-parallel) group of a rank that is alone in it: every exchange is nothing."""

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Input of a column-parallel GEMM: the gathered sequence, or x itself without sequence parallelism."""
        return self.all_gather(x) if self.sequence_parallel else x

    def enter_grad(self, grad: Tensor) -> Tensor:
        """Gradient of what `enter` was given, from this rank's part of the gradient of what it returned."""
        return self.reduce_scatter(grad) if self.sequence_parallel else self.all_reduce(grad)

    def leave(self, y: Tensor) -> Tensor:
        """Output of a row-parallel GEMM, summed over the group and sharded again."""
        return self.reduce_scatter(y) if self.sequence_parallel else self.all_reduce(y)

    def leave_grad(self, grad: Tensor) -> Tensor:
        """Gradient of the summands of `leave`."""
        return self.all_gather(grad) if self.sequence_parallel else grad

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def maximum(self, x: Tensor) -> Tensor:
        return x

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of logits [tokens, vocab/tp] of which each rank has its share of the columns."""
        return functional.cross_entropy(logits, labels)


@dataclass(slots=True)
class EmulatedPeers(TensorPeers):
    """Peers that are copies of this rank: a gather repeats the shard, a reduce-scatter keeps the first one."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.repeat(self.size, *[1] * (x.dim() - 1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[: x.shape[0] // self.size].clone()

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels % logits.shape[1])


@dataclass(slots=True)
class GroupPeers(TensorPeers):
    """A torch.distributed process group."""

    group: dist.ProcessGroup | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":  # gloo has no reduce-scatter in every torch this runs on
            return self.all_reduce(x).chunk(self.size)[self.rank].clone()
        shard = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(shard, x.contiguous(), group=self.group)
        return shard

    def all_reduce(self, x: Tensor) -> Tensor:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def maximum(self, x: Tensor) -> Tensor:
        largest = x.contiguous().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return apply(VocabularyCrossEntropy, logits, labels, self)


@dataclass(slots=True)
class ExpertPeers:
    """The expert-parallel group of a rank: alone (size 1), or emulated (its rows come back as if from its peers)."""

    size: int = 1
    rank: int = 0

    def counts(self, sent: Tensor) -> Tensor:
        """Rows that arrive, shape (size, local experts), from the rows sent to each expert, shape (num_experts,)."""
        local = sent.numel() // self.size
        return sent.view(self.size, local)

    def exchange(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """All-to-all of rows sorted by destination; `sent` and `received` count rows per peer."""
        return rows.clone() if self.size > 1 else rows


@dataclass(slots=True)
class ExpertGroup(ExpertPeers):
    """A torch.distributed process group over which tokens travel to their experts."""

    group: dist.ProcessGroup | None = None

    def counts(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        return received.view(self.size, -1)

    def exchange(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        arrived = rows.new_empty(int(received.sum()), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received.tolist(), sent.tolist(), group=self.group)
        return arrived


@dataclass(slots=True)
class Surroundings:
    """What every module of a stage shares: its peers, and where weight gradients go when a schedule splits them off."""

    tp: TensorPeers = field(default_factory=TensorPeers)
    ep: ExpertPeers = field(default_factory=ExpertPeers)
    cp: TensorPeers = field(default_factory=TensorPeers)
    """Among whom each sequence is split."""
    balanced_routing: bool = False
    """Every expert gets the same number of rows, whatever the router says."""
    recomputed: frozenset[str] = frozenset()
    """Modules of a layer that are recomputed in backward: core_attn, mlp, moe, shared_experts."""
    deferred: list[Callable[[], None]] | None = None
    """Where the products of a backward's weight gradients are put aside; None: they run at once."""

    def weight_gradient(self, weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
        """The gradient of `weight` now, or None and a promise."""
        if self.deferred is None:
            return product()
        self.deferred.append(lambda: accumulate(weight, product()))
        return None


def recomputable(name: str, function: Callable[..., Tensor], around: Surroundings) -> Callable[..., Tensor]:
    """`function`, run again in backward instead of keeping what it saves, where its name is among those recomputed."""
    if name not in around.recomputed:
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def to_fp32(x: Tensor) -> Tensor:
    """x in at least fp32: runs in fp64 stay exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add a gradient to the parameter's main_grad where it has one, else to its grad."""
    main: Any = getattr(parameter, "main_grad", None)
    if main is not None:
        main.add_(grad)
    elif parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply(*arguments)`, typed."""
    result: Tensor = cast(Any, function).apply(*arguments)
    return result


class Enter(torch.autograd.Function):
    """Bring a sequence shard to all tensor-parallel ranks; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        return peers.enter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.enter_grad(grad), None


class Leave(torch.autograd.Function):
    """Sum the tensor-parallel ranks' parts and shard the sequence again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        return peers.leave(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.leave_grad(grad.contiguous()), None


class LeaveByView(torch.autograd.Function):
    """Sum the tensor-parallel ranks' parts; the sequence shard is a view of the sum and keeps all of it alive."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        return peers.all_reduce(y).chunk(peers.size)[peers.rank]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.all_gather(grad.contiguous()), None


class HiddenToSequence(torch.autograd.Function):
    """[seq, batch, hidden/tp] → [seq/tp, batch, hidden]; without sequence parallelism → [seq, batch, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        whole = peers.all_gather(x.movedim(-1, 0).contiguous()).movedim(0, -1)
        return (whole.chunk(peers.size)[peers.rank] if peers.sequence_parallel else whole).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        peers = ctx.peers
        whole = peers.all_gather(grad.contiguous()) if peers.sequence_parallel else grad
        return whole.chunk(peers.size, dim=-1)[peers.rank].contiguous(), None


class Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: ExpertPeers, sent: Tensor, received: Tensor) -> Tensor:
        ctx.peers, ctx.sent, ctx.received = peers, sent, received
        return peers.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.exchange(grad, ctx.received, ctx.sent), None, None, None


class VocabularyCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of fp32 logits [tokens, vocab/tp] sharded over tp (Megatron-LM `cross_entropy.py`)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorPeers) -> Tensor:
        rows = logits.shape[1]
        local = labels - tp.rank * rows
        local = local.where((local >= 0) & (local < rows), -1)
        logits = logits - tp.maximum(logits.amax(1)).unsqueeze(1)
        target = logits.gather(1, local.clamp(min=0).unsqueeze(1)).squeeze(1)
        target = tp.all_reduce(target.where(local >= 0, 0.0))
        total = tp.all_reduce(logits.exp_().sum(1))
        ctx.save_for_backward(logits.div_(total.unsqueeze(1)), local)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local = ctx.saved_tensors
        minus_one = -(local >= 0).to(softmax.dtype).unsqueeze(1)
        logits_grad = softmax.scatter_add(1, local.clamp(min=0).unsqueeze(1), minus_one)
        return logits_grad.mul_(grad / softmax.shape[0]), None, None
