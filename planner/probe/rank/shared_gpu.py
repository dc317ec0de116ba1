"""Ranks that share a GPU: NCCL takes them for ranks of different hosts, or gloo carries messages through the host.

NCCL refuses two ranks of one host on one GPU (`Duplicate GPU detected`), MPS or not (NVIDIA/nccl issue 418). It tells
hosts apart by NCCL_HOSTID. Ranks that give different ones exchange over a loopback socket, at 2.6 GB/s where that was
timed (NCCL 2.29, one RTX 5090).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from planner.probe.rank.messages import Message
from planner.probe.rank.wires import GroupWires
from planner.schedule.actions import Schedule


def as_another_host(rank: int) -> dict[str, str]:
    """Environment variables by which NCCL (and RCCL, which has NCCL's) takes a rank for one of a host of its own."""
    return {
        "NCCL_HOSTID": f"plan-probe-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.31 asks for it (NVIDIA/nccl issue 1716), older ones ignore it
    }


class HostWires(GroupWires):
    """Exchanges between stages on GPUs over gloo, which sends no GPU's memory: messages pass through the host's."""

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        global_rank: Callable[[int], int],
        groups: Mapping[tuple[int, int], Any],
        empty: Callable[[], Tensor],
    ) -> None:
        super().__init__(schedule, pp_rank, global_rank, groups, self.empty_on_host)
        self.empty_on_device, self.on_host, self.device = empty, torch.empty(0), ""

    def empty_on_host(self) -> Tensor:
        """A buffer for one message. The first one asks the device for the shape."""
        if not self.device:
            message = self.empty_on_device()
            self.on_host, self.device = torch.empty_like(message, device="cpu"), str(message.device)
        return torch.empty_like(self.on_host)

    def send(self, message: Message, tensor: Tensor) -> None:
        stays = self.schedule.stage_to_rank[message.stage] == self.pp_rank
        super().send(message, tensor if stays else tensor.cpu())

    def receive(self, message: Message) -> Tensor:
        return super().receive(message).to(self.device)
