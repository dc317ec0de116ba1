"""ZeRO-3 by torch's own fully_shard: a rank keeps its rows of every parameter, a layer is gathered while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import ProbeError
from planner.probe.model.chunk import Chunk
from planner.probe.model.mlp import Experts
from planner.probe.model.weights import local
from planner.probe.rank.gradients import ADAM, GradientShard, ReplicaExchange, Sharding, allocate_moments
from planner.probe.run import ProbeRun

MARKS = ("shard", "partial", "expert", "replica")
"""Marks of parameters, which are copied because sharding replaces the parameters."""


def require_fully_shard(run: ProbeRun) -> None:
    """Raise ProbeError if the run is one of ZeRO-3 and torch's fully_shard is older than what the ranks need of it: to
    sum gradients instead of averaging them, to leave some parameters out, and to emulate peers."""
    from torch.distributed.fsdp import FSDPModule

    needed = ("set_gradient_divide_factor", "set_custom_all_gather")
    if run.fully_sharded and not all(hasattr(FSDPModule, name) for name in needed):
        raise ProbeError(
            f"zero_stage 3: fully_shard of torch {torch.__version__} can neither sum gradients nor emulate peers",
            "install torch 2.9 or newer, or plan with --zero-stage 1",
        )


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

    marks = {name: {mark: getattr(p, mark) for mark in MARKS if hasattr(p, mark)} for name, p in _named(chunk)}
    experts = [module for module in chunk.modules() if isinstance(module, Experts)]
    unshared = {p for module in experts for p in module.parameters()} if expert.group is None else set()
    for _, parameter in _named(chunk):
        if parameter not in unshared:
            parameter.data = parameter.data.to(grad_dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=grad_dtype, cast_forward_inputs=False)
    is_meta = next(chunk.parameters()).is_meta
    # weights that both ends share are the whole chunk's
    shared = chunk.model.tie_word_embeddings and chunk.head is not None and chunk.embedding is not None
    ends = [] if shared else [part for part in (chunk.embedding, chunk.mtp_embedding, chunk.head) if part is not None]
    units: list[tuple[nn.Module, Sharding]] = [(module, expert) for module in experts if expert.group is not None]
    units += [(module, dense) for module in (*chunk.layers.values(), *chunk.mtp, *ends, chunk)]
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
        for mark, value in marks[name].items():
            setattr(parameter, mark, value)


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
        self.parameters, self.counted, self.sharding = [*counted, *others], counted, sharding
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

    def exchanges(self) -> Iterator[ReplicaExchange]:
        """The exchange that fully_shard makes for each layer, here for the largest parameter: a gather of its rows."""
        rows = local(max(self.parameters, key=lambda parameter: parameter.numel())).detach()
        gathered = rows.new_empty(self.sharding.size * rows.numel())
        yield ReplicaExchange(
            "weight all-gather", gathered.nbytes, 1,
            lambda: dist.all_gather_into_tensor(gathered, rows.flatten(), group=self.sharding.group),
        )  # fmt: skip
