"""Process groups of a rank, as trainers name them, and the sockets that gloo opened for each."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from small_gpt.job import Layout


@dataclass(slots=True)
class Groups:
    """A rank's group of each axis; None where the axis has one rank."""

    of: dict[str, Any] = field(default_factory=lambda: {"tp": None, "dp": None, "pp": None})
    sockets: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def make(cls, layout: Layout, rank: int) -> Groups:
        """Open all groups of a job: tensor ranks are neighbours, then data, then pipeline ranks."""
        groups = cls()
        axes = {
            "tp": (layout.tp, 1, "TENSOR_MODEL_PARALLEL_GROUP"),
            "dp": (layout.dp, layout.tp, "DATA_PARALLEL_GROUP"),
            "pp": (layout.pp, layout.tp * layout.dp, "PIPELINE_MODEL_PARALLEL_GROUP"),
        }
        for axis, (size, stride, description) in axes.items():
            firsts = [start for start in range(layout.num_ranks) if start // stride % size == 0]
            for first in firsts if size > 1 else ():
                ranks = [first + stride * place for place in range(size)]
                before = open_sockets()
                group = dist.new_group(ranks, group_desc=description)
                if rank in ranks:
                    groups.of[axis], groups.sockets[axis] = group, open_sockets() - before
        return groups


def open_sockets() -> set[int]:
    """The descriptors of this process that are sockets with a peer."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as candidate:
                candidate.getpeername()
                if candidate.family in (socket.AF_INET, socket.AF_INET6):
                    found.add(int(entry))
        except OSError:
            continue
    return found
