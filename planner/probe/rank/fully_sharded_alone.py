"""ZeRO-3 of a rank alone: torch's fully_shard over a group that exists in name only, its peers copies of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def groups_of_one(*sizes: int) -> list[Any]:
    """For each size, a group in which this process is rank 0 and no other rank exists; None for size 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(sizes), store=FakeStore())
    return [dist.new_group(list(range(size))) if size > 1 else None for size in sizes]


def emulate_exchanges(module: nn.Module) -> None:
    """Replace exchanges by copies on the device: a gather of weights repeats this rank's rows, a scatter of gradients
    keeps this rank's part. `require_fully_shard` says whether torch's fully_shard can be given exchanges of one's own.
    """
    from torch.distributed.fsdp import FSDPModule

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(_RepeatedRows())  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_OwnPart())  # type: ignore[arg-type]


class _Emulated:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RepeatedRows(_Emulated):
    """Stands in for torch's `AllGather`: `input_tensor` is this rank's part of `output_tensor`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        output_tensor.view(group.size(), -1)[1:].copy_(input_tensor)


class _OwnPart(_Emulated):
    """Stands in for torch's `ReduceScatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])
