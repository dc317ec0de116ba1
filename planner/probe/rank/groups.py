"""How ranks come together: a handshake, the process groups of a rank, and the progress that each of them tells.

In the handshake they exchange versions, devices and what they are to run, and a mismatch is named. The groups are the
ranks with which a rank shares layers, gradients, parameters, and messages. Progress, results and failures are words in
the store in which the ranks have met; whoever watches them reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from planner.distribution import __version__
from planner.errors import ProbeError
from planner.probe.model.peers import ExpertGroup, ExpertPeers, GroupPeers, Surroundings, TensorPeers
from planner.probe.rank.gradients import Sharding
from planner.probe.result import RankFailure, RankResult
from planner.probe.run import Place, ProbeRun, Purpose, group_keys, groups_of
from planner.specs.base import Named

PROGRESS, RESULT, FAILURE = "progress {}", "result {}", "failure {}"
"""The keys of a rank's words in the store."""
MEET_S, START_TIMEOUT_S = 30.0, 60.0
"""The shortest timeouts of ranks that meet, and of the phases before the first step: on a busy machine, processes start
and build slowly."""
BEAT_S, SILENT_S = 0.5, 10.0
"""Seconds between two signs of life of a rank's process, and without any after which no other rank need stand still
for it to count as stopped."""
WAITING = "(waiting)"
"""The end of an action's text while the rank waits for others. Elsewhere it computes, and others may wait for it."""
SILENT_HINT = "a signal (SIGSTOP), a debugger or a machine that hangs stops a process"


class Progress(NamedTuple):
    """The phase of a rank, its present action, when that began, and its process's last sign of life (seconds of one
    monotonic clock)."""

    phase: str
    detail: str
    since_s: float
    beat_s: float

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)

    def stands_still(self, timeout_s: float) -> bool:
        """True if nothing has moved for `timeout_s`, or for START_TIMEOUT_S where the steps have not begun."""
        steps_have_begun = self.phase.startswith(("warm-up", "step"))
        return self.still_s > (timeout_s if steps_have_begun else max(timeout_s, START_TIMEOUT_S))

    @property
    def still_s(self) -> float:
        """Seconds since the rank last moved."""
        return time.monotonic() - self.since_s

    @property
    def waits(self) -> bool:
        """True if the rank waits for others."""
        return WAITING in self.detail

    @property
    def silent_s(self) -> float:
        """Seconds since the process's last sign of life."""
        return time.monotonic() - self.beat_s

    def is_silent(self, timeout_s: float) -> bool:
        """True if the process itself gives no more signs of life: it is stopped or gone, or its machine is."""
        return self.silent_s > max(4 * BEAT_S, timeout_s / 2)

    def hang(self, timeout_s: float) -> str:
        """How the rank stands still, in words that follow its name."""
        if self.is_silent(timeout_s):
            return f"has stopped in {self}: no sign of life for {self.silent_s:.0f} s"
        return f"{'waits in vain' if self.waits else 'hangs'} in {self}: no progress for {self.still_s:.0f} s"


def hanging_rank(ranks: Mapping[int, Progress], timeout_s: float) -> int | None:
    """The rank that keeps the others from moving, or None while no rank stands still or another one still computes.

    A process that has stopped comes first, in whatever phase; then a rank that computes, then one that waits; among
    equals the first to stand still.
    """
    running = {rank: progress for rank, progress in ranks.items() if progress.phase != "done"}
    stuck = {rank: progress for rank, progress in running.items() if progress.stands_still(timeout_s)}
    silent = [rank for rank, progress in running.items() if progress.is_silent(timeout_s)]
    if silent and (stuck or any(running[rank].silent_s > SILENT_S for rank in silent)):
        return min(silent, key=lambda rank: running[rank].beat_s)
    if not stuck or any(not progress.waits for rank, progress in running.items() if rank not in stuck):
        return None
    return min(stuck, key=lambda rank: (stuck[rank].waits, stuck[rank].since_s))


def in_words(phase: str, detail: str) -> str:
    separator = " " if detail.startswith("(") else ", at "
    return f"{phase}{separator}{detail}" if detail else phase


class Status:
    """The phase of this rank and its present action, of which the store is told at each phase and every BEAT_S, also
    while the rank computes or waits."""

    def __init__(self, store: Any, rank: int) -> None:
        """The connection is this status's own: others wait for ranks."""
        self.store, self.key, self.num_moves = store, PROGRESS.format(rank), 0
        self._telling = threading.Lock()
        self.enter("start")
        threading.Thread(target=self._beat, daemon=True).start()

    def enter(self, phase: str, detail: str = "") -> None:
        """Begin a phase; its timeout starts now."""
        self.phase = phase
        self.at(detail)
        self._tell()

    def at(self, detail: object) -> None:
        """Record an action within the phase."""
        self.detail = str(detail).replace("|", "/")
        self.num_moves += 1

    def _tell(self) -> None:
        # one after the other, so that no word of an older phase comes behind the last one
        with self._telling, suppress(RuntimeError):  # who hosts the store is gone
            self.store.set(self.key, f"{self.phase}|{self.detail}|{self.num_moves}|{time.monotonic():.3f}")

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._tell()

    def __str__(self) -> str:
        return in_words(self.phase, self.detail)


class Heard:
    """The progress that ranks have told, in seconds of the clock of who hears it: those of their machines differ, and
    what counts is when their words changed."""

    def __init__(self, store: Any, ranks: Iterable[int]) -> None:
        now_s = time.monotonic()
        self.store = store
        self.progress = {rank: Progress("start", "", now_s, now_s) for rank in ranks}
        self.words = dict[int, list[str]]()

    def listen(self) -> None:
        """Hear what the ranks tell now."""
        for rank, last in self.progress.items():
            key, now_s = PROGRESS.format(rank), time.monotonic()
            if rank not in self.words and not self.store.check([key]):
                self.progress[rank] = last._replace(beat_s=now_s)  # its process starts
                continue
            told, before = self.store.get(key).decode().split("|"), self.words.get(rank, [])
            since_s = last.since_s if before[:3] == told[:3] else now_s
            self.progress[rank] = Progress(told[0], told[1], since_s, last.beat_s if before == told else now_s)
            self.words[rank] = told


def listening(host: str, port: int = 0) -> socket.socket:
    """A port at this machine's own address alone where ranks meet there, else at all: the name by which others know it
    may lead itself to another."""
    if host == "localhost" or host.startswith("127."):
        return socket.create_server((host, port))
    two = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if two else socket.AF_INET, dualstack_ipv6=two)


def tcp_store(host: str, port: int, timeout_s: float, is_host: bool = False) -> Any:
    """A connection to the store in which ranks meet, or the store itself (`is_host`), whose port 0 takes a free one."""
    limit, own = timedelta(seconds=timeout_s), listening(host, port).detach() if is_host else None
    return cast(Any, dist).TCPStore(
        host, port, is_master=is_host, timeout=limit, wait_for_workers=False, master_listen_fd=own
    )


def results_in(store: Any, ranks: Iterable[int]) -> tuple[RankResult, ...]:
    """The measurements that ranks have left in their store."""
    return tuple(RankResult.model_validate_json(store.get(RESULT.format(rank))) for rank in ranks)


def failures_in(store: Any, ranks: Iterable[int]) -> list[RankFailure]:
    """The records of those ranks that have failed."""
    keys = [key for key in map(FAILURE.format, ranks) if store.check([key])]
    return [RankFailure.model_validate_json(store.get(key)) for key in keys]


class Identity(NamedTuple):
    """The properties of a rank that it tells before anything connects it to others."""

    host: str
    device: str
    """The unique id of the GPU, which no other rank may have; empty on a CPU."""
    address: str
    """The port at which it answers when it is rung: host|port; empty where its launcher watches it."""
    same: Named
    """The versions that all ranks must share, and every field of the run, long ones by a hash."""


def what_runs(run: ProbeRun) -> Named:
    """The versions and the fields of a run, as ranks compare them."""
    fields = run.model_dump(mode="json")
    model = {f"model.{name}": value for name, value in fields.pop("model").items()}
    texts = {name: json.dumps(value) for name, value in {**fields, **model}.items()}
    shown = {
        name: text if len(text) <= MOST_SHOWN else hashlib.sha256(text.encode()).hexdigest()[:12]
        for name, text in texts.items()
    }
    return {"torch": torch.__version__, "planner": __version__, **shown}


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
    devices = dict[tuple[str, str], int]()
    first = everyone[0]
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


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The ranks around one, and the process groups that it shares with them, where it runs among others."""

    place: Place
    around: Surroundings
    dense: Sharding
    expert: Sharding
    joined: Mapping[Purpose, Any] = field(default_factory=dict)
    """The groups of wires and of replicas, whose pipeline ranks hold the same parameters."""
    alone: bool = False
    """No other rank runs, so that nobody else holds what this one does."""

    @classmethod
    def of(cls, run: ProbeRun, rank: int, timeout: timedelta | None = None) -> RankGroups:
        """The groups of one rank. Every rank creates all groups of all ranks, because torch requires it."""
        made = {key: dist.new_group(list(key[1]), timeout=timeout) for key in group_keys(run)}
        own = groups_of(run, run.place(rank))
        groups = {purpose: made.get((purpose, ranks)) for purpose, ranks in own.items()}

        def member(axis: str) -> tuple[int, int, Any]:
            """Size of a group, this rank's number in it, and the group."""
            ranks = own.get((axis, ()), (rank,))
            return len(ranks), ranks.index(rank), groups.get((axis, ()))

        def peers(axis: str, sequence_parallel: bool = False) -> TensorPeers:
            size, number, group = member(axis)
            return GroupPeers(size, number, sequence_parallel, group) if size > 1 else TensorPeers()

        def sharding(axis: str) -> Sharding:
            size, number, group = member(axis)
            return Sharding(group, size, number, run.zero, run.dp_stands_for)

        experts = ExpertGroup(*member("ep")) if run.ep > 1 else ExpertPeers()
        around = run_surroundings(run, peers("tp", run.sequence_parallel), experts, peers("cp"))
        return cls(run.place(rank), around, sharding("dp"), sharding("expert_dp"), groups)


def run_surroundings(run: ProbeRun, tp: TensorPeers, ep: ExpertPeers, cp: TensorPeers) -> Surroundings:
    """The values that all modules of a run's stage share."""
    return Surroundings(
        tp=tp, ep=ep, cp=cp, balanced_routing=run.balanced_routing, recomputed=frozenset(run.recompute_modules)
    )
