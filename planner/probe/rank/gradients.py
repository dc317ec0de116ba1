"""The work after the pipeline: gradients summed over ranks, their global norm, and a sharded AdamW (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.probe.torch_build import on_gpu

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(slots=True)
class Sharding:
    """The ranks that hold replicas of a kind of parameter, and this rank's number among them.

    Without a group nothing is exchanged: the rank is alone, or its replicas are emulated (size > 1).
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    zero: bool = True
    """True if optimizer state is sharded over the replicas (ZeRO-1); else each replica has all of it."""
    stands_for: int = 1
    """Number of the plan's ranks that each of these represents. A rank sums gradients for all of them, and holds the
    first one's shard."""


class GradientShard(NamedTuple):
    """The part of a parameter's summed gradient that this rank holds."""

    parameter: nn.Parameter
    where: slice
    """The elements of the flattened parameter that it covers."""
    gradient: Tensor


class ReplicaExchange(NamedTuple):
    """An exchange among replicas that can be measured by itself."""

    name: str
    num_bytes: int
    passes: int
    """The number of times that the bytes pass each rank: 1 for a gather or a scatter, 2 for a sum."""
    call: Callable[[], object]


def allocate_moments(optimizer: torch.optim.AdamW) -> None:
    """Allocate the state that the optimizer would otherwise allocate at its first step, without any gradient."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }


def collect_gradients(parameter: nn.Parameter) -> None:
    """Add each gradient to the parameter's main_grad as soon as backward makes it, and free it."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # None: a postponed weight gradient
            cast(Any, parameter).main_grad.add_(parameter.grad)
            parameter.grad = None

    cast(Any, parameter).register_post_accumulate_grad_hook(add)


class FlatParameters:
    """Parameters of one kind in one flat buffer: weights, gradients in `grad_dtype`, and a shard of optimizer state.

    The parameters in `counted`, whose squares this rank adds to the global norm, come first. The buffer is padded to a
    multiple of the shards. Master weights and Adam moments exist for this rank's shard only. The part that a rank sums
    and sends to the others is longer than its shard where it represents several ranks.
    """

    def __init__(
        self,
        counted: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        sharding: Sharding,
        grad_dtype: torch.dtype,
        learning_rate: float,
    ) -> None:
        self.parameters, self.sharding = [*counted, *others], sharding
        first = self.parameters[0]
        total = sum(p.numel() for p in self.parameters)
        self.num_counted = sum(p.numel() for p in counted)
        size, rank = (sharding.size, sharding.rank) if sharding.zero else (1, 0)
        num_shards = size * sharding.stands_for
        shard_size = -(-total // num_shards)
        padded, part_size = shard_size * num_shards, shard_size * sharding.stands_for
        self.grads = torch.zeros(padded, dtype=grad_dtype, device=first.device)
        self.weights = torch.zeros(padded, dtype=first.dtype, device=first.device)
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            self.weights[start:end].copy_(parameter.detach().flatten())
            parameter.data = self.weights[start:end].view_as(parameter)
            cast(Any, parameter).main_grad = self.grads[start:end].view_as(parameter)
            collect_gradients(parameter)
            start = end
        self.part = slice(rank * part_size, (rank + 1) * part_size)
        self.shard = slice(self.part.start, self.part.start + shard_size)
        self.master = nn.Parameter(self.weights[self.shard].to(grad_dtype, copy=True))
        self.optimizer = torch.optim.AdamW([self.master], lr=learning_rate, fused=True, **cast(Any, ADAM))
        allocate_moments(self.optimizer)

    def reduce(self) -> None:
        """Sum the gradients over the replicas. Each rank keeps its part of the sum, or all of it."""
        if self.sharding.group is None:
            return
        if on_gpu(self.grads) and self.sharding.zero:
            dist.reduce_scatter_tensor(self.grads[self.part], self.grads, group=self.sharding.group)
        else:  # gloo has no reduce-scatter in every torch this runs on
            dist.all_reduce(self.grads, group=self.sharding.group)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the counted parameters in this rank's part. Without shards only the first rank returns
        them."""
        if not self.sharding.zero and self.sharding.rank:
            return torch.zeros((), dtype=self.grads.dtype, device=self.grads.device)
        counted = self.grads[self.part.start : max(self.part.start, min(self.part.stop, self.num_counted))]
        norm: Tensor = torch.linalg.vector_norm(counted)  # no temporary as large as the gradients
        return norm.square()

    def step(self, scale: Tensor) -> None:
        """One AdamW step on the shard with gradients times `scale`; gradients are zeroed."""
        self.master.grad = self.grads[self.shard].mul_(scale)
        self.optimizer.step()
        self.master.grad = None
        self.weights[self.shard].copy_(self.master.detach())
        self.forget()

    def gather(self) -> None:
        """Gather the updated weights of all ranks."""
        if self.sharding.group is not None and self.sharding.zero:
            part = self.weights[self.part].clone()
            dist.all_gather_into_tensor(self.weights, part, group=self.sharding.group)

    def forget(self) -> None:
        """Set the gradients to zero."""
        self.grads.zero_()

    def gradient_shards(self) -> Iterator[GradientShard]:
        """This rank's shard, parameter by parameter."""
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            first, last = max(start, self.shard.start), min(end, self.shard.stop)
            if first < last:
                yield GradientShard(parameter, slice(first - start, last - start), self.grads[first:last])
            start = end

    def exchanges(self) -> Iterator[ReplicaExchange]:
        """The reduction of all gradients, and the gathering of all weights if each rank updates a part of them."""
        is_sum = not on_gpu(self.grads) or not self.sharding.zero  # gloo sums where NCCL scatters too
        name = f"gradient {'all-reduce' if is_sum else 'reduce-scatter'}"
        yield ReplicaExchange(name, self.grads.nbytes, 2 if is_sum else 1, self.reduce)
        self.grads.zero_()
        if self.sharding.zero:
            yield ReplicaExchange("weight all-gather", self.weights.nbytes, 1, self.gather)


def all_reduce_flat(tensors: Iterable[Tensor], group: Any) -> None:
    """Sum several tensors over a group with one exchange."""
    tensors = list(tensors)
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def clip_scale(squared_norm: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The global norm, and the factor that brings gradients down to `max_norm` (0: no clipping), as torch clips."""
    norm = squared_norm.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return norm, scale
