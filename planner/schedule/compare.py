"""Compares all schedules on the same ranks, and prices slow ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.errors import SpecError
from planner.record import record
from planner.schedule.actions import Schedule
from planner.schedule.builders import v_placement
from planner.schedule.orders import SCHEDULES, build_schedule, violation
from planner.schedule.replay import Durations, Timeline, makespan_s, replay
from planner.schedule.synthesis import Synthesis, synthesize


@record
class RankSeconds(Durations):
    """Seconds of one micro-batch on each rank, over all of its chunks; a schedule with vpp chunks cuts them evenly."""

    def durations(self, stage_to_rank: Sequence[int], num_directions: int = 1) -> Durations:
        """Durations of each virtual stage: a rank's seconds divided by its number of chunks.

        Where ranks hold two copies of the model, these are the stages of the first copy.
        """
        ranks = stage_to_rank[: len(stage_to_rank) // num_directions]
        vpp = len(ranks) // len(self.forward_s)
        forward_s, input_grad_s, weight_grad_s = (
            [seconds[rank] / vpp for rank in ranks]
            for seconds in (self.forward_s, self.input_grad_s, self.weight_grad_s)
        )
        return replace(self, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)

    def replayed(self, schedule: Schedule) -> Timeline:
        """Timeline of the schedule on these ranks."""
        return replay(schedule, self.durations(schedule.stage_to_rank, schedule.num_directions))


@record
class ScheduleComparison:
    """One schedule on these ranks; `refusal` says why it has no timeline where it is not defined for them."""

    name: str
    vpp: int
    timeline: Timeline | None
    step_s: float = 0.0
    """Seconds of a step: the makespan, or the seconds that one more step adds where steps follow without a flush."""
    refusal: SpecError | None = None

    @property
    def bubble_fraction(self) -> float:
        """Idle share of step_s, over all ranks."""
        return 1 - float(self.timeline.busy_s.mean()) / self.step_s if self.timeline is not None else 0.0


def compare(seconds: RankSeconds, num_microbatches: int, vpp: int | None = None) -> list[ScheduleComparison]:
    """Replay every schedule that trains; schedules with chunks take `vpp` of them, or the nearest number they allow."""
    pp = len(seconds.forward_s)
    rows = []
    for kind in SCHEDULES.values():
        if kind.name == "forward-only" or not kind.min_pp <= pp <= kind.max_pp:
            continue
        chunks = min(max(vpp or kind.min_vpp, kind.min_vpp), kind.max_vpp)
        refusal = violation(kind.name, pp, chunks, num_microbatches)
        if refusal is not None:
            rows.append(ScheduleComparison(kind.name, chunks, None, refusal=refusal))
            continue
        schedule = build_schedule(kind.name, pp, chunks, num_microbatches)
        timeline = seconds.replayed(schedule)
        step_s = timeline.makespan_s
        if schedule.asynchronous:
            twice = build_schedule(kind.name, pp, chunks, 2 * num_microbatches)
            step_s = seconds.replayed(twice).makespan_s - timeline.makespan_s
        rows.append(ScheduleComparison(kind.name, chunks, timeline, step_s))
    return rows


@record
class StragglerCost:
    """Seconds of a step with slow ranks: as they are, without slowness, and with layers moved off the slow ranks."""

    even_s: float
    """Makespan with no rank slow."""
    slow_s: float
    rebalanced_s: float
    """Makespan when each rank holds work in proportion to its speed."""


def straggler_cost(schedule: Schedule, seconds: RankSeconds) -> StragglerCost:
    """Price the slow ranks of `seconds`.

    After rebalancing, rank r with factor s_r has the share (1/s_r) / Σ(1/s) of all work, so that all ranks take equally
    long. This is the best that moving layers, or parts of layers, could do.
    """
    speed = np.array([1 / seconds.slow_ranks.get(rank, 1.0) for rank in range(schedule.pp)])
    work_s = np.array([seconds.forward_s, seconds.input_grad_s, seconds.weight_grad_s])
    share = speed / speed.sum() * work_s.sum() / work_s.sum(axis=0)
    forward_s, input_grad_s, weight_grad_s = (tuple(row.tolist()) for row in work_s * share)
    rebalanced = replace(seconds, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)

    def step_s(ranks: RankSeconds) -> float:
        return makespan_s(schedule, ranks.durations(schedule.stage_to_rank, schedule.num_directions))

    return StragglerCost(step_s(replace(seconds, slow_ranks={})), step_s(seconds), step_s(rebalanced))


def find_order(
    seconds: RankSeconds, num_microbatches: int, vpp: int = 1, in_flight_microbatches: float | None = None
) -> Synthesis:
    """Best order found for these ranks with at most `in_flight_microbatches` in flight on each.

    With two chunks per rank, both placements are tried and the faster one counts.
    """
    pp = len(seconds.forward_s)
    limits = None if in_flight_microbatches is None else [in_flight_microbatches * vpp] * pp
    placements = [tuple(range(pp)) * vpp, *([v_placement(pp)] if vpp == 2 and pp > 1 else [])]
    orders = [synthesize(seconds.durations(ranks), ranks, num_microbatches, limits) for ranks in placements]
    return min(orders, key=lambda synthesis: synthesis.makespan_s)
