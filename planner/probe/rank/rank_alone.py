"""A rank's stages without any other rank: neighbours and the peers of tp, cp and ep are emulated on its device.

Received activations are random and output gradients are ones, made on the device; a gather repeats the shard, a
reduce-scatter keeps its first part; experts get equal shares. Optimizer state is that of one data-parallel shard, and
under ZeRO-3 weights and gradients are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.probe.model.peers import EmulatedPeers, ExpertPeers
from planner.probe.model.surroundings import Surroundings
from planner.probe.rank.fully_sharded_alone import emulate_exchanges, groups_of_one
from planner.probe.rank.gradients import Sharding
from planner.probe.rank.training import Trainer
from planner.probe.rank.wires import EmulatedWires
from planner.probe.run import ProbeRun


def trainer_alone(run: ProbeRun, rank: int, device: str) -> Trainer:
    """A rank's stages among emulated peers."""
    place = run.place(rank)
    around = Surroundings(
        tp=EmulatedPeers(run.tp, 0, run.sequence_parallel),
        ep=ExpertPeers(run.ep),
        cp=EmulatedPeers(run.cp),
        balanced_routing=run.balanced_routing,
        recomputed=frozenset(run.recompute_modules),
    )
    trainer: Trainer

    def make(kind: str) -> Tensor:
        return trainer.empty().normal_() if kind == "F" else torch.ones_like(trainer.empty())

    sizes = run.dp * run.cp, run.dp * run.cp * run.tp // run.ep
    is_sharded = run.fully_sharded and sizes[0] > 1
    groups = groups_of_one(*sizes) if is_sharded else (None, None)
    dense, expert = (Sharding(group, size, zero=run.zero) for group, size in zip(groups, sizes, strict=True))
    trainer = Trainer(
        run,
        place.pp,
        around,
        EmulatedWires(run.stages_of(place.pp), make),
        device,
        dense,
        expert,
        holders=lambda name, stage: (place.pp,),
    )
    for chunk in trainer.chunks.values() if is_sharded else ():
        emulate_exchanges(chunk)
    return trainer
