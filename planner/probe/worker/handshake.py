"""Ranks that meet tell each other what they are, before anything connects them: what does not go together is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

AGREED = "agreed"


class Identity(NamedTuple):
    """What ranks must have in common, and what they may not."""

    torch_version: str
    host: str
    device: str
    """The GPU's own number; empty on a CPU."""


def compare(store: Any, rank: int, world_size: int, mine: Identity) -> None:
    """Raise on every rank where any two do not go together; through the store, before NCCL fails or hangs on it."""
    store.set(f"rank {rank}", json.dumps(mine))
    if rank == 0:
        everyone = [Identity(*json.loads(store.get(f"rank {other}"))) for other in range(world_size)]
        store.set("verdict", disagreement(everyone) or AGREED)
    verdict = store.get("verdict").decode()
    if verdict != AGREED:
        raise RuntimeError(verdict)


def disagreement(everyone: Sequence[Identity]) -> str | None:
    """Different versions of torch, or two ranks on one GPU (NCCL refuses that); None where there are none."""
    devices: dict[tuple[str, str], int] = {}
    for rank, (version, host, device) in enumerate(everyone):
        if version != everyone[0].torch_version:
            return f"rank {rank} on {host} runs torch {version}, rank 0 runs torch {everyone[0].torch_version}"
        if device and (host, device) in devices:
            return f"ranks {devices[host, device]} and {rank} share one GPU ({device} of {host})"
        devices[host, device] = rank
    return None
