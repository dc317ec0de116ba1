"""The ranks with which a module exchanges tensors, and what all modules of a stage share.

Peers are none, a process group, or emulated on the device. Activations are [seq, batch, hidden]; sequence parallelism
shards their first dimension. Of the 2·cp equal chunks of a sequence rank r of cp holds chunks r and 2·cp − 1 − r, so
that causal attention is the same work on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.probe.torch_build import gather_whole, on_gpu, scatter_sum

Sections = tuple[tuple[int, int], ...]
"""The parts of a fused weight along one dimension, each cut by itself: (whole width, width on a rank)."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The place of a parameter in the whole model, and what its gradient is."""

    shard: tuple[int, Sections] | None = None
    """The dimension along which it is cut out of the whole one, and its sections."""
    partial: Literal["", "sequence", "always"] = ""
    """Its gradient is the sum over tensor-parallel ranks, because each of them sees a part of the input alone: a shard
    of the sequence under sequence parallelism, or (`always`) some of the heads."""
    expert: bool = False
    """It is of experts, of which each rank holds its own."""
    replica: str = ""
    """Other ranks (or chunks) hold it too, under this name, and it must stay equal on all of them."""


def mark(parameter: Tensor | None, **marks: Any) -> None:
    """Add marks to a parameter, where there is one."""
    if parameter is not None:
        parameter.marks = replace(marks_of(parameter), **marks)  # type: ignore[attr-defined]


def marks_of(parameter: Tensor) -> Marks:
    """The marks of a parameter."""
    marks: Marks = getattr(parameter, "marks", Marks())
    return marks


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

    reduce_scatter = all_reduce = maximum = all_gather

    def local_rows(self, tokens: Tensor, num_rows: int) -> Tensor:
        """Rows of tokens in this rank's part of the embedding; below 0 or from `num_rows` on where a peer has them."""
        return tokens - self.rank * num_rows

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

    def local_rows(self, tokens: Tensor, num_rows: int) -> Tensor:
        """Rows of this rank for all tokens: a peer's would be zeros, whose gradient each norm multiplies by hundreds,
        until it is not finite."""
        return tokens % num_rows

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels % logits.shape[1])


@dataclass(slots=True)
class GroupPeers(TensorPeers):
    """A torch.distributed process group."""

    group: dist.ProcessGroup | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        gather_whole(gathered, x.contiguous(), self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if not on_gpu(x):  # gloo has no reduce-scatter in every torch this runs on
            return self.all_reduce(x).chunk(self.size)[self.rank].clone()
        shard = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        scatter_sum(shard, x.contiguous(), self.group)
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
        column = local.clamp(min=0).unsqueeze(1)
        is_own = (local >= 0).unsqueeze(1)
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


Way = Callable[[Tensor], Tensor]


class Exchange(torch.autograd.Function):
    """An exchange among peers, and the one that its gradient takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def enter(x: Tensor, peers: TensorPeers) -> Tensor:
    """A sequence shard brought to all tensor-parallel ranks; its gradient is summed over them."""
    return apply(Exchange, x, peers.enter, peers.enter_grad)


def leave(y: Tensor, peers: TensorPeers) -> Tensor:
    """The sum of the tensor-parallel ranks' parts, the sequence sharded again."""
    return apply(Exchange, y, peers.leave, lambda grad: peers.leave_grad(grad.contiguous()))


def leave_by_view(y: Tensor, peers: TensorPeers) -> Tensor:
    """The same sum, of which the sequence shard is a view that keeps all of it alive."""
    own = lambda x: peers.all_reduce(x).chunk(peers.size)[peers.rank]  # noqa: E731
    return apply(Exchange, y, own, lambda grad: peers.all_gather(grad.contiguous()))


def hidden_to_sequence(x: Tensor, peers: TensorPeers) -> Tensor:
    """[seq, batch, hidden/tp] → [seq/tp, batch, hidden]; without sequence parallelism → [seq, batch, hidden]."""

    def there(x: Tensor) -> Tensor:
        whole = peers.all_gather(x.movedim(-1, 0).contiguous()).movedim(0, -1)
        return (whole.chunk(peers.size)[peers.rank] if peers.sequence_parallel else whole).contiguous()

    def back(grad: Tensor) -> Tensor:
        whole = peers.all_gather(grad.contiguous()) if peers.sequence_parallel else grad
        return whole.chunk(peers.size, dim=-1)[peers.rank].contiguous()

    return apply(Exchange, x, there, back)


def expert_all_to_all(rows: Tensor, peers: ExpertPeers, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all of rows; the gradient goes back the same way."""
    there = partial(peers.exchange, sent=sent, received=received)
    return apply(Exchange, rows, there, partial(peers.exchange, sent=received, received=sent))


def shard(sequence: Tensor, cp: TensorPeers) -> Tensor:
    """This rank's two chunks, side by side, of a tensor that has a row for each token of a sequence."""
    if cp.size == 1:
        return sequence
    chunks = sequence.chunk(2 * cp.size)
    return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]))


def gather(x: Tensor, cp: TensorPeers) -> Tensor:
    """The rows of all ranks in the sequence's order: [seq/cp, …] → [seq, …]."""
    if cp.size == 1:
        return x
    chunks = cp.all_gather(x).chunk(2 * cp.size)
    return torch.cat((*chunks[::2], *chunks[:0:-2]))


def scatter(x: Tensor, cp: TensorPeers) -> Tensor:
    """This rank's rows of the sum over all ranks: [seq, …] → [seq/cp, …]."""
    chunks = x.chunk(2 * cp.size)
    pairs = zip(chunks[: cp.size], reversed(chunks), strict=False)
    return cp.reduce_scatter(torch.cat([chunk for pair in pairs for chunk in pair]))


def chunk_ends(q: Tensor, cp: TensorPeers) -> Sequence[int]:
    """The positions in the sequence at which this rank's two chunks end, or its only one."""
    chunk = q.shape[0] // 2
    return [len(q)] if cp.size == 1 else [(cp.rank + 1) * chunk, (2 * cp.size - cp.rank) * chunk]


@dataclass(slots=True)
class Surroundings:
    """The values that all modules of a stage share: peers, modules to recompute, and the list of postponed weight
    gradients."""

    tp: TensorPeers = field(default_factory=TensorPeers)
    ep: ExpertPeers = field(default_factory=ExpertPeers)
    cp: TensorPeers = field(default_factory=TensorPeers)
    """The ranks over which each sequence is split."""
    balanced_routing: bool = False
    """Every expert gets the same number of rows, whatever the router says."""
    recomputed: frozenset[str] = frozenset()
    """Modules of a layer that are recomputed in backward: core_attn, mlp, moe, shared_experts."""
    postponed: list[Callable[[], None]] | None = None
    """The list that collects a backward's weight-gradient products when a schedule splits them off; None: they run at
    once."""

    def weight_gradient(self, weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
        """The gradient of `weight`, or None after its computation was put on the list of postponed ones."""
        if self.postponed is None:
            return product()
        self.postponed.append(lambda: accumulate(weight, product()))
        return None


def recomputable(name: str, function: Callable[..., Tensor], around: Surroundings) -> Callable[..., Tensor]:
    """`function` itself, or a version that is recomputed in backward if `name` is among the modules to recompute."""
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
