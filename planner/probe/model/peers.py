"""The peers with which a rank exchanges tensors inside a layer: none, a process group, or peers emulated on its device.

Activations are [seq, batch, hidden]; sequence parallelism shards their first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from planner.probe.torch_build import on_gpu


@dataclass(slots=True)
class TensorPeers:
    """The tensor-parallel (or context-parallel) group of a rank that is alone in it: an exchange returns its input."""

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
        if not on_gpu(x):  # gloo has no reduce-scatter in every torch this runs on
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
    """The expert-parallel group of a rank that is alone (size 1) or whose peers are emulated: its own rows come
    back."""

    size: int = 1
    rank: int = 0

    def counts(self, sent: Tensor) -> Tensor:
        """Number of rows that arrive, shape (size, local experts), given the rows sent to each expert, shape
        (num_experts,)."""
        local = sent.numel() // self.size
        return sent.view(self.size, local)

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
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

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self.group)
        return arrived


class VocabularyCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of fp32 logits [tokens, vocab/tp] sharded over tp.

    Each rank runs the kernel of a whole softmax over its own columns, as a rank without peers does. Ranks exchange
    three numbers a token, from which each learns how much of the sum over all columns is its own.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorPeers) -> Tensor:
        rows = logits.shape[1]
        local = labels - tp.rank * rows
        local = local.where((local >= 0) & (local < rows), -1)
        log_shares = logits.log_softmax(1)
        own_sums = logits[:, 0] - log_shares[:, 0]  # logarithms of sums of exponentials
        target = log_shares.gather(1, local.clamp(min=0).unsqueeze(1)).squeeze(1) + own_sums
        target = tp.all_reduce(target.where(local >= 0, 0.0))
        largest = tp.maximum(own_sums)
        sums = tp.all_reduce((own_sums - largest).exp()).log() + largest
        ctx.save_for_backward(log_shares, own_sums - sums, local)
        return (sums - target).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_shares, log_own_share, local = ctx.saved_tensors
        scale = grad / log_shares.shape[0]
        column, is_own = local.clamp(min=0).unsqueeze(1), (local >= 0).unsqueeze(1)
        # the kernel gives g − softmax · sum(g), so −share in one column gives softmax · share in all others
        own_share = scale * log_own_share.exp().unsqueeze(1)
        filled = torch.zeros_like(log_shares).scatter_(1, column, -own_share)
        logits_grad = torch.ops.aten._log_softmax_backward_data(filled, log_shares, 1, log_shares.dtype)
        logits_grad.scatter_add_(1, column, own_share - is_own.to(scale.dtype) * scale)
        return logits_grad, None, None


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply(*arguments)`, typed."""
    result: Tensor = cast(Any, function).apply(*arguments)
    return result
