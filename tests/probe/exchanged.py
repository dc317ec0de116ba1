"""Exchanges of ranks on fake GPUs, written down in the order in which each rank asks for them, and run to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fake_gpus import is_on_host

from planner.probe.torch_build import GATHER, SCATTER

BY_ALL = (
    "all_reduce", GATHER, SCATTER, "all_to_all_single", "broadcast", "barrier",
    "broadcast_object_list", "all_gather_object",
)  # fmt: skip
"""Exchanges in which every rank of a group takes part."""
BLOCKING = {"send": "isend", "recv": "irecv"}
"""Exchanges of two ranks that are waited for at once, by those that are not."""


class Exchange(NamedTuple):
    """One call of a rank. Those of two ranks have the peer, those of all ranks of a group none."""

    name: str
    group: tuple[int, ...]
    what: tuple[Any, ...]
    """Sizes and dtypes of what is exchanged, which must be the same on all ranks that take part."""
    peer: int | None = None
    waits_for: int | None = None
    """The number among this rank's calls of the one that is waited for here."""


class Recorder:
    """The calls of one rank."""

    def __init__(self) -> None:
        self.calls: list[Exchange] = []

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (*BY_ALL, *BLOCKING, *BLOCKING.values()):
            monkeypatch.setattr(dist, name, self._recorded(name, getattr(dist, name)))

    def _recorded(self, name: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            group = tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD))
            is_pair = name not in BY_ALL
            sent = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            assert not any(map(is_on_host, sent)), f"NCCL takes no tensor in the host's memory: {name}"
            what = () if name.endswith(("object", "list", "barrier")) else (sent[0].numel(), sent[0].dtype)
            peer = args[1] if is_pair else None
            self.calls.append(Exchange(BLOCKING.get(name, name), group, what, peer))
            number, result = len(self.calls) - 1, call(*args, **kwargs)
            if name in BLOCKING:
                self.calls.append(Exchange("wait", group, (), peer, number))
            return _Waited(self, number, result) if name in BLOCKING.values() else result

        return recorded


class _Waited:
    """The work of an exchange of two ranks; waiting for it is a call too."""

    def __init__(self, recorder: Recorder, number: int, work: Any) -> None:
        self.recorder, self.number, self.work = recorder, number, work

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        call = self.recorder.calls[self.number]
        self.recorder.calls.append(Exchange("wait", call.group, (), call.peer, self.number))
        self.work.wait()


def stuck(ranks: Sequence[Sequence[Exchange]]) -> list[str]:
    """The call at which each rank stands when no rank can go on; nothing where all come to their end.

    An exchange of all ranks of a group goes on when all of them stand at it, an exchange of two when both have asked
    for it and one of them waits. On a channel between two ranks messages come in the order in which they were sent.
    """
    at = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(ranks):
            while at[rank] < len(calls) and _can_go_on(ranks, at, rank):
                call = calls[at[rank]]
                for member in call.group if call.name in BY_ALL else (rank,):
                    at[member] += 1
                moved = True
    return [f"rank {rank}: {calls[at[rank]]}" for rank, calls in enumerate(ranks) if at[rank] < len(calls)]


def _can_go_on(ranks: Sequence[Sequence[Exchange]], at: Sequence[int], rank: int) -> bool:
    call = ranks[rank][at[rank]]
    if call.name in BY_ALL:
        return all(at[member] < len(ranks[member]) and ranks[member][at[member]] == call for member in call.group)
    if call.waits_for is None:
        return True
    mine, peer = ranks[rank][call.waits_for], call.peer
    assert peer is not None
    other = {"isend": "irecv", "irecv": "isend"}[mine.name]
    number = sum(_same_channel(mine, mine.name, c) and c.peer == peer for c in ranks[rank][: call.waits_for])
    asked = [c for c in ranks[peer][: at[peer]] if _same_channel(mine, other, c) and c.peer == rank]
    return len(asked) > number and asked[number].what == mine.what


def _same_channel(mine: Exchange, name: str, call: Exchange) -> bool:
    return (call.name, call.group) == (name, mine.group)
