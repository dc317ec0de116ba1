"""An order made to measure: once the shape and the split are chosen, the search looks for a better order of actions."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.schedule.replay import makespan_s

AUTO = "auto"
MAX_ACTIONS = 24_000
"""Most actions of an order that is improved; with more, looking for a better order would take longer than the plan."""


def made_to_measure(candidate: Candidate) -> Candidate:
    """The candidate with the best order for its own stage times and memory, or unchanged if no order is better.

    In an order made to measure all chunks may end with the last micro-batch. They then hide less of their exchanges,
    so the seconds of the whole step decide which order is better.
    """
    shape = candidate.shape
    pp, vpp, num_microbatches = int(shape.pp), int(shape.vpp), candidate.num_microbatches
    if pp == 1 or 3 * pp * vpp * num_microbatches > MAX_ACTIONS:
        return candidate
    from planner.schedule.synthesis import synthesize

    room, ranks = candidate.activation_room_bytes, candidate.placement
    try:
        better = synthesize(candidate.durations, pp, num_microbatches, max_activation_bytes=room, stage_to_rank=ranks)
    except Infeasible:
        return candidate
    made = replace(candidate, made_order=replace(better.schedule, name=AUTO))
    named_s = makespan_s(candidate.order, candidate.durations) + sum(candidate.outside)
    return made if made.step_s < named_s else candidate
