"""Seconds of a step: a split replayed in its schedule's order, and what comes beside the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.layout.outside_pipeline import ends_of
from planner.layout.split import Split, stage_costs
from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule, placement
from planner.schedule.replay import Durations, makespan_s, replay
from planner.schedule.timeline import Timeline
from planner.shape import FloatArray

STEADY_ROUNDS = (3, 4)
"""Rounds of pp micro-batches after which a pipeline repeats itself: the search replays these and extrapolates; what is
reported is replayed in full."""
SETTLED = 1e-3
"""How much slower than its busiest rank a pipeline may be that repeats itself."""


def durations_of(table: CostTable, costs: list[PartCost], pricing: Pricing) -> Durations:
    """Seconds of every virtual stage as the replay takes them, the trainer's host time per micro-batch included."""
    host_s = pricing.runtime.microbatch_overhead_s / 2
    runtime = pricing.runtime
    overlaps = runtime.interleaved_p2p_overlap if int(table.shape.vpp) > 1 else runtime.p2p_overlap
    return Durations(
        forward_s=[float(cost.forward_total_s) + host_s for cost in costs],
        input_grad_s=[float(cost.input_grad_total_s) + host_s for cost in costs],
        weight_grad_s=[float(cost.weight_grad_s) for cost in costs],
        p2p_s=float(table.p2p_s),
        blocking_p2p=not overlaps,
        activation_bytes=[float(cost.live_bytes) for cost in costs],
    )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the replay says of one step's pipeline; arrays are per rank."""

    num_microbatches: int
    makespan_s: float
    busy_s: FloatArray
    transfer_s: FloatArray
    """Time a rank waits for transfers under way."""
    in_flight_microbatches: FloatArray

    @property
    def bubble_fraction(self) -> float:
        """Idle share over all ranks."""
        return 1 - float(self.busy_s.mean()) / self.makespan_s if self.makespan_s else 0.0


def run_pipeline(
    table: CostTable, durations: Durations, schedule: str, exact: bool = True, order: Schedule | None = None
) -> Pipeline:
    """Replay one step; unless `exact`, a few rounds of it, the rest like the last of them."""
    if order is not None:
        return _pipeline(replay(order, durations))
    shape = table.shape
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    makespan = None if exact else _extrapolated_s(table, durations, schedule)
    if makespan is None:
        return _pipeline(replay(build_schedule(schedule, pp, vpp, wanted), durations))
    rounds = _pipeline(replay(build_schedule(schedule, pp, vpp, STEADY_ROUNDS[1] * pp), durations))
    times = wanted / rounds.num_microbatches
    busy = rounds.busy_s * times
    # the fill's transfers are no more for a longer step: what a rank does not compute is the most it can wait
    transfer = np.minimum(rounds.transfer_s * times, np.maximum(makespan - busy, 0.0))
    return replace(rounds, num_microbatches=wanted, makespan_s=makespan, busy_s=busy, transfer_s=transfer)


def _extrapolated_s(table: CostTable, durations: Durations, schedule: str) -> float | None:
    """The makespan from two short replays, where beyond them every further micro-batch adds the same; else None."""
    shape = table.shape
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    short, long = (rounds * pp for rounds in STEADY_ROUNDS)
    if pp == 1 or wanted <= long or wanted % pp:
        return None
    few, more = (makespan_s(build_schedule(schedule, pp, vpp, m), durations) for m in (short, long))
    slope = (more - few) / (long - short)
    return more + slope * (wanted - long) if _is_settled(slope, durations, placement_of(table, schedule)) else None


def _is_settled(slope_s: float, durations: Durations, placement: Sequence[int]) -> bool:
    """Whether a further micro-batch takes as long as the rank that is busiest with it: till then the pace may change.

    A rank that waits for its transfers is busy with them too: of the two turns a micro-batch (forward to backward and
    back), the first and the last rank exchange something in one.
    """
    busy = [0.0] * (max(placement) + 1)
    parts = zip(placement, durations.forward_s, durations.input_grad_s, durations.weight_grad_s, strict=True)
    for rank, *seconds in parts:
        busy[rank] += sum(seconds)
    if durations.blocking_p2p and len(placement) == len(busy):
        turns = [1 if rank in (0, len(busy) - 1) else 2 for rank in range(len(busy))]
        busy = [t + n * float(durations.p2p_s) for t, n in zip(busy, turns, strict=True)]  # type: ignore[arg-type]
    return max(busy) * (1 - 1e-9) <= slope_s <= max(busy) * (1 + SETTLED)


def _pipeline(timeline: Timeline) -> Pipeline:
    return Pipeline(
        num_microbatches=timeline.schedule.num_microbatches,
        makespan_s=timeline.makespan_s,
        busy_s=timeline.busy_s,
        transfer_s=timeline.idle_s["transfer"],
        in_flight_microbatches=timeline.peak_in_flight_microbatches,
    )


def step_s(
    pricing: Pricing, table: CostTable, split: Split, schedule: str, rank_factors: Sequence[float] = ()
) -> float:
    """Seconds of one step: what the search compares, without the report around it."""
    ranks_of = placement_of(table, schedule)
    costs = stage_costs(table, pricing.model, split, ranks_of, rank_factors)
    durations = durations_of(table, costs, pricing)
    pipeline = _extrapolated_s(table, durations, schedule)
    if pipeline is None:
        pipeline = makespan_s(build_order(table, schedule), durations)
    return pipeline + sum(ends_of(pricing, table, cost_by_rank(costs, ranks_of), schedule))


def cost_by_rank(costs: Sequence[PartCost], placement: Sequence[int]) -> list[PartCost]:
    """Costs of all chunks of each rank together."""
    totals: dict[int, PartCost] = {}
    for cost, rank in zip(costs, placement, strict=True):
        totals[rank] = totals[rank] + cost if rank in totals else cost
    return [totals[rank] for rank in range(len(totals))]


def placement_of(table: CostTable, schedule: str) -> tuple[int, ...]:
    return placement(schedule, int(table.shape.pp), int(table.shape.vpp))


def build_order(table: CostTable, schedule: str) -> Schedule:
    """The whole step's action lists."""
    shape = table.shape
    return build_schedule(schedule, int(shape.pp), int(shape.vpp), int(shape.num_microbatches))
