"""How ranks come together: a handshake before anything connects them, then the process groups of a rank.

In the handshake they exchange versions and devices, and a mismatch is named. The groups are the ranks with which a rank
shares layers, gradients, parameters, and messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch.distributed as dist

from planner.probe.model.peers import ExpertGroup, ExpertPeers, GroupPeers, Surroundings, TensorPeers
from planner.probe.rank.gradients import Sharding
from planner.probe.run import Place, ProbeRun, traffic

AGREED = "agreed"


class Identity(NamedTuple):
    """The properties of a rank that others must share (torch's version) or must not share (the device)."""

    torch_version: str
    host: str
    device: str
    """The unique id of the GPU; empty on a CPU."""


def require_agreement(store: Any, rank: int, world_size: int, identity: Identity) -> None:
    """Raise RuntimeError on every rank if two ranks do not fit together. The ranks compare through the store, because
    NCCL would fail or hang."""
    store.set(f"rank {rank}", json.dumps(identity))
    if rank == 0:
        everyone = [Identity(*json.loads(store.get(f"rank {other}"))) for other in range(world_size)]
        store.set("verdict", disagreement(everyone) or AGREED)
    verdict = store.get("verdict").decode()
    if verdict != AGREED:
        raise RuntimeError(verdict)


def disagreement(everyone: Sequence[Identity]) -> str | None:
    """The first mismatch in words: different versions of torch, or two ranks on one GPU (NCCL refuses that); else
    None."""
    devices: dict[tuple[str, str], int] = {}
    for rank, (version, host, device) in enumerate(everyone):
        if version != everyone[0].torch_version:
            return f"rank {rank} on {host} runs torch {version}, rank 0 runs torch {everyone[0].torch_version}"
        if device and (host, device) in devices:
            return f"ranks {devices[host, device]} and {rank} share one GPU ({device} of {host})"
        devices[host, device] = rank
    return None


class RankGroups:
    """The process groups of one rank. Every rank creates all groups of all ranks, because torch requires it."""

    def __init__(self, run: ProbeRun, rank: int, timeout: timedelta | None = None) -> None:
        self.run, self.rank, self.place = run, rank, run.place(rank)
        groups = {key: dist.new_group(list(key[1]), timeout=timeout) for key in group_keys(run)}
        self.mine = {key: group for key, group in groups.items() if rank in key[1]}
        self.around = Surroundings(
            tp=self._tensor_peers(),
            ep=self._expert_peers(),
            cp=self._context_peers(),
            balanced_routing=run.balanced_routing,
            recomputed=frozenset(run.recompute_modules),
        )
        self.dense = self._sharding("dp", data_ranks(run, self.place))
        self.expert = self._sharding("expert_dp", expert_data_ranks(run, self.place))
        self.wires = {
            pair: self.mine[wire_key(run, self.place, pair)] for pair in traffic(run.order) if self.place.pp in pair
        }
        self.replicas = {
            holders: self.mine["replicas", pipeline_ranks(run, self.place, holders)]
            for holders in replica_sets(run)
            if self.place.pp in holders
        }

    def beside(self, pp_rank: int) -> int:
        """Global rank of the same coordinates on another pipeline rank."""
        return self.run.rank(self.place._replace(pp=pp_rank))

    def holders(self, name: str, stage: int) -> tuple[int, ...]:
        """Pipeline ranks that hold the parameter `name` of virtual stage `stage`, sorted."""
        return holders(self.run, name, stage)

    def _tensor_peers(self) -> TensorPeers:
        run, ranks = self.run, tensor_ranks(self.run, self.place)
        if run.tp == 1:
            return TensorPeers()
        return GroupPeers(run.tp, self.place.tp, run.sequence_parallel, self.mine["tp", ranks])

    def _context_peers(self) -> TensorPeers:
        run, ranks = self.run, context_ranks(self.run, self.place)
        return TensorPeers() if run.cp == 1 else GroupPeers(run.cp, self.place.cp, group=self.mine["cp", ranks])

    def _expert_peers(self) -> ExpertPeers:
        run, ranks = self.run, expert_ranks(self.run, self.place)
        return ExpertPeers() if run.ep == 1 else ExpertGroup(run.ep, ranks.index(self.rank), self.mine["ep", ranks])

    def _sharding(self, kind: str, ranks: tuple[int, ...]) -> Sharding:
        run, group = self.run, self.mine.get((kind, ranks))
        return Sharding(group, len(ranks), ranks.index(self.rank), run.zero, run.dp_stands_for)


GroupKey = tuple[str, tuple[int, ...]]
"""The purpose of a group, and its global ranks."""


def group_keys(run: ProbeRun) -> list[GroupKey]:
    """The keys of all groups of more than one rank, in the same order on all ranks."""
    keys: dict[GroupKey, None] = {}
    pairs, replicas = sorted(traffic(run.order)), replica_sets(run)
    for coordinates in product(range(run.pp), range(run.dp), range(run.cp), range(run.tp)):
        place = Place(*coordinates)
        keys["tp", tensor_ranks(run, place)] = None
        keys["cp", context_ranks(run, place)] = None
        keys["dp", data_ranks(run, place)] = None
        keys["ep", expert_ranks(run, place)] = None
        keys["expert_dp", expert_data_ranks(run, place)] = None
        for pair in pairs:
            keys[wire_key(run, place, pair)] = None
        for holding in replicas:
            keys["replicas", pipeline_ranks(run, place, holding)] = None
    return [key for key in keys if len(key[1]) > 1]


def wire_key(run: ProbeRun, place: Place, pair: tuple[int, int]) -> GroupKey:
    """The key of the channel from one pipeline rank to another. Each direction has its own channel."""
    direction = "up" if pair[0] < pair[1] else "down"
    return direction, pipeline_ranks(run, place, pair)


def tensor_ranks(run: ProbeRun, place: Place) -> tuple[int, ...]:
    return tuple(run.rank(place._replace(tp=tp)) for tp in range(run.tp))


def context_ranks(run: ProbeRun, place: Place) -> tuple[int, ...]:
    return tuple(run.rank(place._replace(cp=cp)) for cp in range(run.cp))


def data_ranks(run: ProbeRun, place: Place) -> tuple[int, ...]:
    """Ranks that apply the same weights to other tokens, over dp and cp."""
    return tuple(run.rank(place._replace(dp=dp, cp=cp)) for dp, cp in product(range(run.dp), range(run.cp)))


def expert_ranks(run: ProbeRun, place: Place) -> tuple[int, ...]:
    """Ranks that share a set of experts: neighbours within a stage, tp innermost."""
    stage, unit = _within_stage(run, place)
    first = unit // run.ep * run.ep
    return stage[first : first + run.ep]


def expert_data_ranks(run: ProbeRun, place: Place) -> tuple[int, ...]:
    """Ranks of the stage that hold the same experts."""
    stage, unit = _within_stage(run, place)
    return stage[unit % run.ep :: run.ep]


def _within_stage(run: ProbeRun, place: Place) -> tuple[tuple[int, ...], int]:
    """The ranks of the stage, and this rank's number among them."""
    coordinates = product(range(run.dp), range(run.cp), range(run.tp))
    stage = tuple(run.rank(Place(place.pp, *within)) for within in coordinates)
    return stage, (place.dp * run.cp + place.cp) * run.tp + place.tp


def pipeline_ranks(run: ProbeRun, place: Place, pp_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Global ranks with the same coordinates on several pipeline ranks, sorted."""
    return tuple(sorted(run.rank(place._replace(pp=pp)) for pp in pp_ranks))


def holders(run: ProbeRun, name: str, stage: int) -> tuple[int, ...]:
    """Pipeline ranks that hold the parameter `name` of virtual stage `stage`, sorted.

    Both copies of a bidirectional schedule hold it. An embedding is also held by the ranks of a tied head or of
    multi-token prediction.
    """
    n = len(run.chunks)
    stages = {stage % n + copy * n for copy in range(run.num_directions)}
    if name.startswith("embedding."):
        tied = run.model.tie_word_embeddings and name == "embedding.weight"
        for other in range(len(run.stage_to_rank)):
            chunk = run.chunk_of(other)
            if chunk.embedding or chunk.mtp or (tied and chunk.head):
                stages.add(other)
    return tuple(sorted({run.stage_to_rank[s] for s in stages}))


def replica_sets(run: ProbeRun) -> list[tuple[int, ...]]:
    """Sets of pipeline ranks that hold the same parameters, in the same order on all ranks."""
    sets = {holders(run, "layers", stage) for stage in range(len(run.stage_to_rank))}
    sets |= {holders(run, name, 0) for name in ("embedding.weight", "embedding.positions")}
    return sorted(ranks for ranks in sets if len(ranks) > 1)
