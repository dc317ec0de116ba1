"""The handshake of ranks: before anything connects them they exchange versions and devices, and a mismatch is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

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
