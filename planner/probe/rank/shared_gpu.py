"""Ranks that share a GPU: NCCL takes them for ranks of different hosts, or gloo carries messages through the host.

NCCL refuses two ranks of one host on one GPU (`Duplicate GPU detected`), MPS or not (NVIDIA/nccl issue 418). It tells
hosts apart by NCCL_HOSTID. Ranks that give different ones exchange over a loopback socket, at 2.6 GB/s where that was
timed (NCCL 2.29, one RTX 5090).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from planner.probe.rank.messages import Message
from planner.probe.rank.wires import GroupWires


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

    @cached_property
    def like(self) -> tuple[Tensor, str]:
        """A message in the host's memory, and the device that it belongs to."""
        message = self.make()
        return torch.empty_like(message, device="cpu"), str(message.device)

    def empty(self) -> Tensor:
        return torch.empty_like(self.like[0])

    def send(self, message: Message, tensor: Tensor) -> None:
        stays = self.schedule.stage_to_rank[message.stage] == self.pp_rank
        super().send(message, tensor if stays else tensor.cpu())

    def receive(self, message: Message) -> Tensor:
        return super().receive(message).to(self.like[1])
