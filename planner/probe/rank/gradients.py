"""The work after the pipeline: gradients summed over ranks, their global norm, and AdamW, sharded as ZeRO-1 or ZeRO-3.

ZeRO-3 is torch's own fully_shard: a rank keeps its rows of every parameter, and a layer is gathered while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from planner.probe.model.chunk import Chunk, local
from planner.probe.model.layers import Experts
from planner.probe.model.peers import marks_of
from planner.probe.torch_build import gather_whole, on_gpu, scatter_sum

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


class RankExchange(NamedTuple):
    """An exchange among ranks that can be measured by itself."""

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
        self.parameters = [*counted, *others]
        self.sharding = sharding
        first = self.parameters[0]
        total = sum(p.numel() for p in self.parameters)
        self.num_counted = sum(p.numel() for p in counted)
        size, rank = (sharding.size, sharding.rank) if sharding.zero else (1, 0)
        num_shards = size * sharding.stands_for
        shard_size = -(-total // num_shards)
        padded = shard_size * num_shards
        part_size = shard_size * sharding.stands_for
        self.grads = torch.zeros(padded, dtype=grad_dtype, device=first.device)
        self.weights = torch.zeros(padded, dtype=first.dtype, device=first.device)
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = (torch.split(flat[:total], sizes) for flat in (self.weights, self.grads))
        for parameter, weights, grads in zip(self.parameters, *parts, strict=True):
            weights.copy_(parameter.detach().flatten())
            parameter.data = weights.view_as(parameter)
            cast(Any, parameter).main_grad = grads.view_as(parameter)
            collect_gradients(parameter)
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
            scatter_sum(self.grads[self.part], self.grads, self.sharding.group)
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
            gather_whole(self.weights, part, self.sharding.group)

    def forget(self) -> None:
        """Set the gradients to zero."""
        self.grads.zero_()

    def gradient_shards(self) -> Iterator[GradientShard]:
        """This rank's shard, parameter by parameter."""
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            first = max(start, self.shard.start)
            last = min(end, self.shard.stop)
            if first < last:
                yield GradientShard(parameter, slice(first - start, last - start), self.grads[first:last])
            start = end

    def exchanges(self) -> Iterator[RankExchange]:
        """The reduction of all gradients, and the gathering of all weights if each rank updates a part of them."""
        is_sum = not on_gpu(self.grads) or not self.sharding.zero  # gloo sums where NCCL scatters too
        name = f"gradient {'all-reduce' if is_sum else 'reduce-scatter'}"
        yield RankExchange(name, self.grads.nbytes, 2 if is_sum else 1, self.reduce)
        self.grads.zero_()
        if self.sharding.zero:
            yield RankExchange("weight all-gather", self.weights.nbytes, 1, self.gather)


def all_reduce_flat(tensors: Iterable[Tensor], group: Any) -> None:
    """Sum several tensors over a group with one exchange."""
    tensors = list(tensors)
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def clip_scale(squared_norm: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The global norm, and the factor that brings gradients down to `max_norm` (0: no clipping), as torch clips."""
    norm = squared_norm.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return norm, scale


def shard_chunk(
    chunk: Chunk,
    dense: Sharding,
    expert: Sharding,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    gathers_again: bool,
    device: str,
) -> None:
    """Keep only this rank's rows of each parameter, in `grad_dtype`. Layers are gathered in `dtype` and gradients are
    summed.

    Experts are sharded over the ranks that hold the same ones, and stay whole where no other rank holds them. A layer's
    weights are freed after its forward and gathered again for its backward, or (pipelines) kept till then. A chunk on
    the meta device is given memory for its rows alone, and no values.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    marks = {name: marks_of(parameter) for name, parameter in _named(chunk)}
    experts = [module for module in chunk.modules() if isinstance(module, Experts)]
    unshared = {p for module in experts for p in module.parameters()} if expert.group is None else set()
    for _, parameter in _named(chunk):
        if parameter not in unshared:
            parameter.data = parameter.data.to(grad_dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=grad_dtype, cast_forward_inputs=False)
    is_meta = next(chunk.parameters()).is_meta
    # weights that both ends share, or layers, are the whole chunk's
    shared = chunk.model.tie_word_embeddings and chunk.head is not None and chunk.embedding is not None
    ends = [] if shared else [part for part in (chunk.embedding, chunk.mtp_embedding, chunk.head) if part is not None]
    units = [(module, expert) for module in experts if expert.group is not None]
    layers = () if chunk.model.traced is not None and chunk.model.traced.is_looped else chunk.layers.values()
    units += [(module, dense) for module in (*layers, *chunk.mtp, *ends, chunk)]
    for module, sharding in units:
        with _disable_current_modes():  # a rehearsal's tensors have no values, and a mesh needs its ranks
            mesh = DeviceMesh.from_group(sharding.group, torch.device(device).type)
        unit = cast(Any, fully_shard)(
            module, mesh=mesh, reshard_after_forward=gathers_again, mp_policy=policy, ignored_params=unshared
        )
        unit.set_gradient_divide_factor(1.0)  # losses are weighted already: gradients are summed
    if is_meta:
        chunk.to_empty(device=device)
        if shared and chunk.head is not None and chunk.embedding is not None:
            chunk.head.output.weight = chunk.embedding.weight  # given memory of its own before
    for name, parameter in _named(chunk):
        cast(Any, parameter).marks = marks[name]  # sharding has replaced the parameter


def _named(chunk: Chunk) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(chunk.named_parameters(remove_duplicate=False))


class ShardedParameters:
    """The rows of parameters that this rank holds, with their gradients and optimizer state; used like
    `FlatParameters`.

    Gradients are reduced right after each backward, so that `reduce` has nothing left to do.
    """

    def __init__(
        self, counted: Sequence[nn.Parameter], others: Sequence[nn.Parameter], sharding: Sharding, learning_rate: float
    ) -> None:
        self.parameters = [*counted, *others]
        self.counted = counted
        self.sharding = sharding
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, fused=True, **cast(Any, ADAM))
        allocate_moments(self.optimizer)

    def reduce(self) -> None:
        """Do nothing: each backward has reduced its gradients already."""

    def squared_norm(self) -> Tensor:
        """Sum of squares of this rank's rows, of counted parameters only."""
        rows = [local(parameter.grad) for parameter in self.counted if parameter.grad is not None]
        first = local(self.parameters[0])
        norms = [cast(Tensor, torch.linalg.vector_norm(row)) for row in rows if row.numel()]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=first.dtype, device=first.device)

    def step(self, scale: Tensor) -> None:
        """One AdamW step on this rank's rows with gradients times `scale`; gradients are freed."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(scale)
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def gather(self) -> None:
        """Do nothing: each pass gathers the weights that it needs."""

    def gradient_shards(self) -> Iterator[GradientShard]:
        """This rank's part of each parameter's gradient."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                rows = -(-parameter.shape[0] // self.sharding.size)
                width = parameter[0].numel() if parameter.dim() > 1 else 1
                gradient = local(parameter.grad).flatten()
                first = min(self.sharding.rank * rows, parameter.shape[0]) * width
                yield GradientShard(parameter, slice(first, first + gradient.numel()), gradient)

    def exchanges(self) -> Iterator[RankExchange]:
        """The exchange that fully_shard makes for each layer, here for the largest parameter: a gather of its rows."""
        rows = local(max(self.parameters, key=lambda parameter: parameter.numel())).detach()
        gathered = rows.new_empty(self.sharding.size * rows.numel())
        yield RankExchange(
            "weight all-gather", gathered.nbytes, 1,
            lambda: gather_whole(gathered, rows.flatten(), self.sharding.group),
        )  # fmt: skip
