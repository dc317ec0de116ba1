"""An order made to measure: after the shape and the split are chosen, look for a better order of its actions."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import Infeasible
from planner.layout.outside_pipeline import ends_of
from planner.layout.room import room_bytes
from planner.layout.seconds import build_order, cost_by_rank, durations_of
from planner.layout.split import stage_costs
from planner.schedule.orders import placement
from planner.schedule.replay import makespan_s
from planner.schedule.synthesis import synthesize
from planner.search.branch import Found

AUTO = "auto"
MAX_ACTIONS = 24_000
"""Orders of more actions than this are left as they are: looking for a better one would take longer than the plan."""


def made_to_measure(found: Found) -> Found:
    """`found` with the best order for its own stage times and memory, or as it was where no better one is found."""
    pricing, shape = found.pricing, found.table.shape
    pp, vpp, steps = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    if pp == 1 or 3 * pp * vpp * steps > MAX_ACTIONS:
        return found
    ranks = placement(found.schedule, pp, vpp)
    costs = stage_costs(found.table, pricing.model, found.split, ranks)
    durations = durations_of(found.table, costs, pricing)
    room = room_bytes(pricing, found.table, costs, ranks)
    try:
        better = synthesize(durations, pp, steps, max_activation_bytes=room, stage_to_rank=ranks)
    except Infeasible:
        return found
    saved = makespan_s(build_order(found.table, found.schedule), durations) - better.makespan_s
    # its chunks may all end with the last micro-batch, and hide less of what they exchange
    ranks_costs = cost_by_rank(costs, ranks)
    saved += sum(ends_of(pricing, found.table, ranks_costs, found.schedule))
    saved -= sum(ends_of(pricing, found.table, ranks_costs, AUTO))
    if saved <= 0:
        return found
    order = replace(better.schedule, name=AUTO)
    return replace(found, step_s=found.step_s - saved, order=order)
