"""How ranks come together: a handshake before anything connects them, then the process groups of a rank.

In the handshake they exchange versions, devices and what they are to run, and a mismatch is named. The groups are the
ranks with which a rank shares layers, gradients, parameters, and messages.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import planner
from planner.errors import ProbeError
from planner.probe.model.peers import ExpertGroup, ExpertPeers, GroupPeers, Surroundings, TensorPeers
from planner.probe.rank.gradients import Sharding
from planner.probe.run import Place, ProbeRun, traffic


class Identity(NamedTuple):
    """The properties of a rank that it tells before anything connects it to others."""

    host: str
    device: str
    """The unique id of the GPU, which no other rank may have; empty on a CPU."""
    address: str
    """The port at which it answers when it is rung: host|port; empty where its launcher watches it."""
    same: dict[str, str]
    """The versions that all ranks must share, and every field of the run, long ones by a hash."""


def what_runs(run: ProbeRun) -> dict[str, str]:
    """The versions and the fields of a run, as ranks compare them."""
    fields = run.model_dump(mode="json")
    model = {f"model.{name}": value for name, value in fields.pop("model").items()}
    texts = {name: json.dumps(value) for name, value in {**fields, **model}.items()}
    shown = {name: text if len(text) <= MOST_SHOWN else _hash(text) for name, text in texts.items()}
    return {"torch": torch.__version__, "planner": planner.__version__, **shown}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


MOST_SHOWN, MOST_NAMED = 40, 3
"""The longest value that is shown as it is; the most fields that a disagreement names."""
POLL_S, LINGER_S = 0.05, 10.0
"""Pauses of ranks that wait in the store; seconds that rank 0, which may host it, stays until all have heard it."""


def require_agreement(store: Any, rank: int, world_size: int, own: Identity, limit_s: float) -> list[str]:
    """The addresses of all ranks, once they agree. Raises ProbeError on every rank if two do not fit together, or
    one has not come within `limit_s`: NCCL would fail or hang."""
    store.set(f"rank {rank}", json.dumps(own))
    if rank == 0:
        missing = _not_come(store, world_size, limit_s)
        everyone = [] if missing else [Identity(*json.loads(store.get(f"rank {n}"))) for n in range(world_size)]
        refused = missing or disagreement(everyone) or ""
        if not store.check(["verdict"]):
            store.set("verdict", json.dumps([refused, [one.address for one in everyone]]))
    deadline = time.monotonic() + limit_s + LINGER_S
    while not store.check(["verdict"]):
        if time.monotonic() > deadline:
            raise ProbeError(f"rank 0, which judges if the ranks agree, has said nothing for {limit_s:.0f} s")
        time.sleep(POLL_S)
    refused, addresses = json.loads(store.get("verdict"))
    store.set(f"heard {rank}", "")
    if refused:
        _linger(store, rank, world_size)
        raise ProbeError(refused)
    return list(addresses)


def _not_come(store: Any, world_size: int, limit_s: float) -> str:
    """The ranks that have not come in time, in words; empty where all have, or one has refused already."""
    deadline = time.monotonic() + limit_s
    while missing := [n for n in range(world_size) if not store.check([f"rank {n}"])]:
        if store.check(["verdict"]):
            return "refused"
        if time.monotonic() > deadline:
            named = ", ".join(map(str, missing[:MOST_LISTED])) + (", …" if len(missing) > MOST_LISTED else "")
            ranks = f"ranks {named} of {world_size} have" if len(missing) > 1 else f"rank {named} of {world_size} has"
            return f"{ranks} not come in {limit_s:.0f} s"
        time.sleep(POLL_S)
    return ""


MOST_LISTED = 8


def refuse_all(store: Any, rank: int, world_size: int, message: str) -> None:
    """Have all ranks end with a message, in place of agreement."""
    store.set("verdict", json.dumps([message, []]))
    store.set(f"heard {rank}", "")
    _linger(store, rank, world_size)


def _linger(store: Any, rank: int, world_size: int) -> None:
    """Wait on rank 0 until the others have heard the verdict."""
    deadline = time.monotonic() + LINGER_S
    others = [f"heard {n}" for n in range(1, world_size)] if rank == 0 else []
    while not all(store.check([name]) for name in others) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def disagreement(everyone: Sequence[Identity]) -> str | None:
    """The first mismatch in words: something that two ranks do not share, or a GPU that they do (NCCL refuses that),
    or an interface that leads to no other machine; else None."""
    devices, first = dict[tuple[str, str], int](), everyone[0]
    for rank, one in enumerate(everyone):
        differ = [name for name in first.same if one.same.get(name) != first.same[name]]
        if differ:
            named = [f"{name} {one.same.get(name)}, not {first.same[name]}" for name in differ[:MOST_NAMED]]
            more = f" and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
            return f"rank {rank} on {one.host} has {'; '.join(named)}{more} as rank 0 on {first.host}"
        if one.device and (one.host, one.device) in devices:
            return f"ranks {devices[one.host, one.device]} and {rank} share one GPU ({one.device} of {one.host})"
        devices[one.host, one.device] = rank
        if _place(one) != _place(first):
            for name in INTERFACES:
                if os.environ.get(name, "").startswith("lo"):
                    return f"{name}={os.environ[name]} leads to no other machine: rank {rank} is on {_place(one)}"
    return None


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _place(one: Identity) -> str:
    return one.address.partition("|")[0] or one.host


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
