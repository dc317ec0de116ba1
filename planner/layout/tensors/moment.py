"""The tensors that a rank needs for a moment at its peak: the loss, or a part's backward, and its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.layout.tensors.kept import Held, held, kept_tensors, without
from planner.layout.tensors.parts import Part
from planner.physics import memory
from planner.physics.cost import CostTable
from planner.physics.memory import Moment
from planner.physics.operators import Item
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import buffers
from planner.shape import Shape
from planner.specs.units import gib


def loss(pricing: Pricing, shape: Shape, parts: Sequence[Part]) -> list[Held]:
    """The tensors of the loss of a rank's head."""
    head = next(part for part in parts if part.name == "head")
    return [held(tensor) for tensor in pricing.loss_tensors(head.items, shape)]


def backward(pricing: Pricing, shape: Shape, parts: Sequence[Part]) -> tuple[Part, list[Held]]:
    """The part whose backward needs the most beside what is held, and what that is."""
    worst = max(parts, key=lambda part: float(part.cost.transient_bytes))
    if worst.name == "head" and pricing.runtime.fused_cross_entropy:
        return worst, loss(pricing, shape, parts)
    return worst, [*_recomputed(pricing, shape, worst), *_own(pricing, shape, worst.items)]


def _recomputed(pricing: Pricing, shape: Shape, part: Part) -> Iterator[Held]:
    """Tensors that the layer's forward gives once more, and those that comes back from host memory."""
    if part.mode != "none":
        plain = kept_tensors(pricing, shape, part.layer_items)
        yield from without(plain, kept_tensors(pricing, shape, part.layer_items, part.mode))


def _own(pricing: Pricing, shape: Shape, items: Sequence[Item]) -> Iterator[Held]:
    """The working set of the operator whose backward needs most, gradients that stay empty, what was in host memory."""
    runtime = pricing.runtime
    moment = max(memory.moments(items, runtime), key=lambda one: float(one.num_bytes), default=None)
    if moment is not None and moment.num_bytes > 0:
        yield from _working(moment)
    yield from (held(tensor) for tensor in memory.unused_gradients(items, runtime))
    away = float(pricing.offloaded_bytes_of(items))
    if away:
        yield Held("back from host memory", away, note="tensors that waited there come back for the backward")


def _working(moment: Moment) -> Iterator[Held]:
    op, freed = moment.operator, float(moment.freed_bytes)
    if not freed:
        yield from (held(tensor, operator=op.name) for tensor in moment.working)
        return
    names = ", ".join(tensor.name for tensor in moment.working)
    note = f"{names}; less {gib(freed):.2f} GiB that operators behind it kept, whose backward is done then"
    yield Held(f"{op.name}: working set", float(moment.num_bytes), note=note)


def fixed(pricing: Pricing, table: CostTable) -> list[Held]:
    """Buffers that every rank has, however many micro-batches are in flight."""
    return [held(tensor) for tensor in buffers(pricing, table)]
