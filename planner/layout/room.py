"""Bytes of a split: what each rank holds at its worst moment, in the order of its schedule, and whether that fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.answer import StageMemory
from planner.layout.seconds import STEADY_ROUNDS, cost_by_rank, placement_of
from planner.layout.split import Split, stage_costs
from planner.physics.cost import CostTable, PartCost
from planner.physics.memory import constant_bytes, reserved_bytes, sharded_parameters
from planner.physics.operators import BF16, FP32
from planner.physics.pricing import Pricing
from planner.schedule.actions import HELD_BY_PLACE, ActionList, Schedule
from planner.schedule.orders import HOLDS_ALL, build_schedule
from planner.shape import FloatArray
from planner.specs.units import GIB

LEAST_SHORT_BYTES = 0.25 * GIB
"""Left free beyond what the program saw left, so that few programs are enough."""


def split_fits(pricing: Pricing, table: CostTable, split: Split, schedule: str) -> bool:
    """Whether every stage fits when the schedule's own order says what it holds in flight."""
    return max(excess_bytes(pricing, table, split, schedule)) <= 0


def excess_bytes(pricing: Pricing, table: CostTable, split: Split, schedule: str) -> list[float]:
    """What each rank needs beyond its memory, by the schedule's own order; negative where there is room."""
    ranks_of = placement_of(table, schedule)
    costs = stage_costs(table, pricing.model, split, ranks_of)
    order = few_rounds(table, schedule)
    peaks = peak_activation_bytes(order, [float(cost.live_bytes) for cost in costs])
    capacity = pricing.cluster.hardware.memory_bytes - pricing.headroom_bytes
    return [
        stage_memory(pricing, table, total, peak).total_bytes - capacity
        for total, peak in zip(cost_by_rank(costs, ranks_of), peaks, strict=True)
    ]


def shorter(short_bytes: Sequence[float], excess: Sequence[float], free_bytes: Sequence[float]) -> list[float]:
    """What the integer program is to leave free on each rank, where a split for which it saw `free_bytes` left exceeds
    the memory by `excess`: so much that the rank cannot hold the same again."""
    known = short_bytes or [0.0] * len(excess)
    return [
        short + (free + LEAST_SHORT_BYTES) * (more > 0)
        for short, more, free in zip(known, excess, free_bytes, strict=True)
    ]


def peak_activation_bytes(order: Schedule, live_bytes: list[float]) -> list[float]:
    """The most that micro-batches in flight hold on each rank, by the order of its actions (times do not matter)."""
    live = np.asarray(live_bytes)
    return [float(np.cumsum(sign * live[stage]).max()) for stage, sign in _held_changes(order)]


@lru_cache(maxsize=64)
def _held_changes(order: Schedule) -> tuple[tuple[npt.NDArray[np.int32], FloatArray], ...]:
    """Per rank, along its actions: the virtual stage, and +1 where an activation is kept, −1 where it is freed."""
    return tuple((actions.stage, HELD_BY_PLACE[actions.kind]) for actions in map(ActionList.of, order.ranks))


def few_rounds(table: CostTable, schedule: str) -> Schedule:
    """The schedule over as many micro-batches as it takes to hold all that it will ever hold."""
    shape = table.shape
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    few = STEADY_ROUNDS[0] * pp
    settles = few < wanted and wanted % pp == 0 and schedule not in HOLDS_ALL
    return build_schedule(schedule, pp, vpp, few if settles else wanted)


def room_bytes(pricing: Pricing, table: CostTable, costs: list[PartCost], ranks_of: Sequence[int]) -> list[float]:
    """What each rank has left for activations beside its static bytes and what an operator or the loss needs."""
    fixed = fixed_bytes(pricing, table)
    moments = [max(float(rank.transient_bytes), float(rank.logits_bytes)) for rank in cost_by_rank(costs, ranks_of)]
    static = [float(rank.static_bytes) for rank in cost_by_rank(costs, ranks_of)]
    return [float(table.usable_bytes) - fixed - a - b for a, b in zip(static, moments, strict=True)]


def stage_memory(pricing: Pricing, table: CostTable, total: PartCost, activations: float) -> StageMemory:
    """Bytes at the stage's worst moment: the loss with all activations held, or a layer's backward after it.

    `activations` is the most that micro-batches in flight hold. While the loss runs its logits come on top; afterwards
    they are gone and a layer's backward needs its transient bytes. The optimizer runs when all of these are gone.
    """
    constant = float(constant_bytes(pricing.model, table.shape, pricing.runtime))
    weights, gradients, optimizer = (
        round(float(b)) for b in (total.weights_bytes + constant, total.gradients_bytes, total.optimizer_bytes)
    )
    workspace = float(total.transient_bytes) + fixed_workspace_bytes(pricing, table)
    logits = float(total.logits_bytes)
    in_loss = 0 < float(total.transient_bytes) <= logits
    logits, workspace = (logits, workspace - float(total.transient_bytes)) if in_loss else (0.0, workspace)
    workspace += max(0.0, _gradients_copied_bytes(pricing, table, total) - activations - logits - workspace)
    items = [weights, gradients, optimizer, round(activations), round(logits), round(workspace)]
    allocated = sum(items)
    reserve = float(reserved_bytes(allocated, table.shape, pricing.cluster.hardware))
    reserved = round(reserve + pricing.runtime.reserved_gib * GIB)
    return StageMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=items[3],
        logits_bytes=items[4],
        workspace_bytes=items[5],
        reserved_bytes=reserved,
        peak_allocated_bytes=allocated,
        total_bytes=allocated + reserved,
    )


def _gradients_copied_bytes(pricing: Pricing, table: CostTable, total: PartCost) -> float:
    """fp32 copies that an optimizer makes of the 16-bit gradients of its shard."""
    runtime = pricing.runtime
    if not runtime.widens_gradients or runtime.gradient_bytes == FP32:
        return 0.0
    expert = total.expert_parameters
    return FP32 * float(sharded_parameters(total.parameters - expert, expert, table.shape))


def fixed_bytes(pricing: Pricing, table: CostTable) -> float:
    """What every rank holds whatever its layers: buffers, tables, token ids."""
    tables = constant_bytes(pricing.model, table.shape, pricing.runtime)
    return fixed_workspace_bytes(pricing, table) + float(tables)


def fixed_workspace_bytes(pricing: Pricing, table: CostTable) -> float:
    """Buffers of every rank: the gradient from the next stage; the two layers that unpipelined ZeRO-3 gathers.

    torch's stages have a buffer for every micro-batch, of each chunk's input and of its output's gradient (less one
    chunk's on the first rank and the last). What a micro-batch in flight has received is counted with its activations,
    but its outputs, which they keep, are not: as many.
    """
    shape, runtime = table.shape, pricing.runtime
    if int(shape.pp) > 1:
        sent = BF16 * float(shape.shard_tokens) * pricing.model.hidden_size
        num_buffers = (2 * int(shape.vpp) - (int(shape.pp) == 2)) * int(shape.num_microbatches)
        return sent * (num_buffers if runtime.has_torch_stages else 1)
    if int(shape.zero_stage) < 3:
        return 0.0
    # beside them, the gradients of the layer before, on their way to be scattered
    layer = max(float(part.parameters) for part in table.layers.values())
    return 2 * BF16 * layer + runtime.gradient_bytes * max(layer, float(table.head.parameters))
