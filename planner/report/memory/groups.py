"""Tensors that differ in their layer and their micro-batch only, as one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.answer.memory import MemoryChange, MemoryTensor


class TensorGroup(NamedTuple):
    """Tensors of one name, shape and item."""

    first: MemoryTensor
    number: int
    num_layers: int
    num_microbatches: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The tensor, its shape and its dtype."""
        return f"{self.first.name}{self.first.sizes}"

    @property
    def holders(self) -> str:
        """`8 layers × 16 micro-batches`, or what they are of."""
        layers, passes = self.num_layers, self.num_microbatches
        parts = [_plural(layers, "layer")] if layers else [self.first.part] if self.first.part else []
        if passes:
            parts.append(_plural(passes, "micro-batch", "es"))
        whole = max(layers, 1) * max(passes, 1) == self.number
        return " × ".join(parts) if whole else f"{self.number:,} in {', '.join(parts)}"

    def cheapest(self, changes: Iterable[MemoryChange]) -> MemoryChange | None:
        """The change with the shortest step that would make these tensors again instead of keeping them."""
        removing = [change for change in changes if {*self.first.remade_by} & {*change.modules}]
        return min(removing, key=lambda change: change.step_s, default=None)


def _plural(number: int, name: str, ending: str = "s") -> str:
    return f"{number:,} {name}{ending if number > 1 else ''}"


def grouped(tensors: Sequence[MemoryTensor]) -> list[TensorGroup]:
    """The groups of some tensors, the largest first."""
    found: dict[tuple[object, ...], list[MemoryTensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.item, tensor.part, tensor.name, tensor.shape, tensor.dtype), []).append(tensor)
    groups = [
        TensorGroup(
            first=members[0],
            number=len(members),
            num_layers=len({tensor.layer for tensor in members} - {None}),
            num_microbatches=len({tensor.microbatch for tensor in members} - {None}),
            num_bytes=sum(tensor.bytes for tensor in members),
        )
        for members in found.values()
    ]
    return sorted(groups, key=lambda group: -group.num_bytes)
