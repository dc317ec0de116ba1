"""A rank's stages without any other rank: neighbours and the peers of tp, cp and ep are emulated on its device.

Received activations and gradients are random, made on the device, and weights stay as they were drawn: operands that
have grown or died take other power than those of training. A gather repeats the shard, a reduce-scatter keeps its first
part; experts get equal shares. Optimizer state is that of one data-parallel shard, and under ZeRO-3, by torch's
fully_shard over a group that exists in name only, weights and gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.probe.model.peers import EmulatedPeers, ExpertPeers, Surroundings
from planner.probe.rank.gradients import Sharding
from planner.probe.rank.pipeline import EmulatedWires
from planner.probe.rank.training import RankTrainer
from planner.probe.run import ProbeRun

LEARNING_RATE = 1e-9
"""The optimizer does all its work and moves no weight: nobody's loss makes the gradients."""


def groups_of_one(*sizes: int) -> list[Any]:
    """For each size, a group in which this process is rank 0 and no other rank exists; None for size 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(sizes), store=FakeStore())
    return [dist.new_group(list(range(size))) if size > 1 else None for size in sizes]


def emulate_exchanges(module: nn.Module) -> None:
    """Replace exchanges by copies on the device: a gather of weights repeats this rank's rows, a scatter of gradients
    keeps this rank's part. `require_fully_shard` says whether torch's fully_shard can be given exchanges of one's own.
    """
    from torch.distributed.fsdp import FSDPModule

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(_RepeatedRows())  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_OwnPart())  # type: ignore[arg-type]


class _Emulated:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RepeatedRows(_Emulated):
    """Stands in for torch's `AllGather`: `input_tensor` is this rank's part of `output_tensor`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        output_tensor.view(group.size(), -1)[1:].copy_(input_tensor)


class _OwnPart(_Emulated):
    """Stands in for torch's `ReduceScatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])


def trainer_alone(run: ProbeRun, rank: int, device: str) -> RankTrainer:
    """A rank's stages among emulated peers."""
    place = run.place(rank)
    around = Surroundings(
        tp=EmulatedPeers(run.tp, 0, run.sequence_parallel),
        ep=ExpertPeers(run.ep),
        cp=EmulatedPeers(run.cp),
        balanced_routing=run.balanced_routing,
        recomputed=frozenset(run.recompute_modules),
    )
    trainer: RankTrainer

    sizes = run.dp * run.cp, run.dp * run.cp * run.tp // run.ep
    is_sharded = run.fully_sharded and sizes[0] > 1
    groups = groups_of_one(*sizes) if is_sharded else (None, None)
    dense, expert = (Sharding(group, size, zero=run.zero) for group, size in zip(groups, sizes, strict=True))
    trainer = RankTrainer(
        run.model_copy(update={"learning_rate": LEARNING_RATE}),
        place.pp,
        around,
        EmulatedWires(run.stages_of(place.pp), lambda kind: trainer.empty().normal_()),
        device,
        dense,
        expert,
        holders=lambda name, stage: (place.pp,),
    )
    for chunk in trainer.chunks.values() if is_sharded else ():
        emulate_exchanges(chunk)
    return trainer
