"""The same ranks under every schedule, and what a slow one costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.errors import SpecError
from planner.schedule.actions import Schedule
from planner.schedule.orders import SCHEDULES, build_schedule, violation
from planner.schedule.replay import Durations, makespan_s, replay
from planner.schedule.synthesis import Synthesis, placements, synthesize
from planner.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """One micro-batch on each rank through all of its chunks, to be cut evenly into as many as a schedule wants."""

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    p2p_s: float = 0.0
    blocking_p2p: bool = False
    microbatch_sizes: tuple[float, ...] | None = None
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def durations(self, stage_to_rank: Sequence[int], num_directions: int = 1) -> Durations:
        """Per virtual stage: a rank's seconds over its chunks. With two copies of the model, those of the first."""
        ranks = stage_to_rank[: len(stage_to_rank) // num_directions]
        vpp = len(ranks) // len(self.forward_s)

        def cut(seconds: tuple[float, ...]) -> list[float]:
            return [seconds[rank] / vpp for rank in ranks]

        return Durations(
            cut(self.forward_s),
            cut(self.input_grad_s),
            cut(self.weight_grad_s),
            p2p_s=self.p2p_s,
            blocking_p2p=self.blocking_p2p,
            microbatch_sizes=self.microbatch_sizes,
            slow_ranks=self.slow_ranks,
            slow_links=self.slow_links,
        )

    def replayed(self, schedule: Schedule) -> Timeline:
        """The schedule on these ranks."""
        return replay(schedule, self.durations(schedule.stage_to_rank, schedule.num_directions))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One schedule over these ranks; `refusal` says why where it is not defined for them."""

    name: str
    vpp: int
    timeline: Timeline | None
    step_s: float = 0.0
    """What a step takes: the makespan, or what one more step adds where steps follow without a flush."""
    refusal: SpecError | None = None

    @property
    def bubble_fraction(self) -> float:
        """Idle share of step_s, over all ranks."""
        return 1 - float(self.timeline.busy_s.mean()) / self.step_s if self.timeline is not None else 0.0


def compare(seconds: RankSeconds, num_microbatches: int, vpp: int | None = None) -> list[Comparison]:
    """Replay every schedule that trains; those with chunks take `vpp` where they can, else the fewest they need."""
    pp = len(seconds.forward_s)
    rows = []
    for kind in SCHEDULES.values():
        if kind.name == "forward-only" or not kind.min_pp <= pp <= kind.max_pp:
            continue
        chunks = min(max(vpp or kind.min_vpp, kind.min_vpp), kind.max_vpp)
        refusal = violation(kind.name, pp, chunks, num_microbatches)
        if refusal is not None:
            rows.append(Comparison(kind.name, chunks, None, refusal=refusal))
            continue
        schedule = build_schedule(kind.name, pp, chunks, num_microbatches)
        timeline = seconds.replayed(schedule)
        step_s = timeline.makespan_s
        if schedule.asynchronous:
            twice = build_schedule(kind.name, pp, chunks, 2 * num_microbatches)
            step_s = seconds.replayed(twice).makespan_s - timeline.makespan_s
        rows.append(Comparison(kind.name, chunks, timeline, step_s))
    return rows


@dataclass(frozen=True, slots=True)
class StragglerCost:
    """What slow ranks cost, and what moving layers off them gives back."""

    even_s: float
    """Makespan with no rank slow."""
    slow_s: float
    rebalanced_s: float
    """Makespan when each rank holds work in proportion to its speed."""


def straggler_cost(schedule: Schedule, seconds: RankSeconds) -> StragglerCost:
    """Price seconds.slow_ranks.

    Rebalanced, rank r with factor s_r takes the share (1/s_r) / Σ(1/s) of all work, so that all ranks are equally long:
    the best that moving layers (in parts, if need be) could do.
    """
    speed = np.array([1 / seconds.slow_ranks.get(rank, 1.0) for rank in range(schedule.pp)])
    whole = np.array([seconds.forward_s, seconds.input_grad_s, seconds.weight_grad_s])
    share = speed / speed.sum() * whole.sum() / whole.sum(axis=0)
    forward_s, input_grad_s, weight_grad_s = (tuple(row.tolist()) for row in whole * share)
    rebalanced = replace(seconds, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)

    def step_s(ranks: RankSeconds) -> float:
        return makespan_s(schedule, ranks.durations(schedule.stage_to_rank, schedule.num_directions))

    return StragglerCost(step_s(replace(seconds, slow_ranks={})), step_s(seconds), step_s(rebalanced))


def find_order(
    seconds: RankSeconds, num_microbatches: int, vpp: int = 1, in_flight_microbatches: float | None = None
) -> Synthesis:
    """Best order found for these ranks with at most so many whole micro-batches in flight on each; with two chunks per
    rank in whichever placement is faster."""
    pp = len(seconds.forward_s)
    limits = None if in_flight_microbatches is None else [in_flight_microbatches * vpp] * pp
    found = [
        synthesize(
            seconds.durations(placement),
            pp,
            num_microbatches,
            max_activation_bytes=limits,
            stage_to_rank=placement,
        )
        for placement in placements(pp, pp * vpp)
    ]
    return min(found, key=lambda synthesis: synthesis.makespan_s)
