"""The parts of a pipeline's step that are drawn: a short step whole, of a long one its steady state, begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import reprice, with_microbatches
from planner.report.format import percent, seconds
from planner.schedule.actions import F
from planner.schedule.replay import FloatArray, Timeline

LONG = 400_000
"""Actions of a step beyond which a shorter one is replayed: more take a second."""


def shown_step(plan: Plan) -> Candidate:
    """The plan's best layout, or a shorter step of the same pipeline where a replay would take long."""
    layout, num_microbatches = plan.parallelism, plan.parallelism.num_microbatches
    drawn = num_microbatches
    if not plan.best.actions:
        rounds = LONG // (3 * layout.pp * layout.vpp * layout.pp)
        drawn = min(drawn, max(2, rounds) * layout.pp + num_microbatches % layout.pp)
    return reprice(plan, with_microbatches(plan.best, drawn))


WHOLE, WINDOW, MOST = 80, 40, 1_600
"""Bars of a rank up to which a step is drawn whole, bars of a rank in a window, and the most bars of one window: in 11
inches they still bear the number of their micro-batch."""

Mask = npt.NDArray[np.bool_]


class Window(NamedTuple):
    """A part of a step and its title."""

    title: str
    from_s: float
    to_s: float


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A replayed step as arrays along all of its actions."""

    timeline: Timeline

    @property
    def start_s(self) -> FloatArray:
        """Time when each action starts."""
        return self.timeline.timing.start_s

    @property
    def end_s(self) -> FloatArray:
        """Time when each action ends."""
        return self.timeline.timing.end_s

    @property
    def rank(self) -> npt.NDArray[np.int32]:
        """Rank of each action."""
        return self.timeline.graph.rank

    @cached_property
    def rows(self) -> FloatArray:
        """Height of each action in the drawing: its rank."""
        return self.rank.astype(np.float64)

    @cached_property
    def is_forward(self) -> Mask:
        """True for forwards."""
        forward: Mask = self.timeline.graph.kind == F
        return forward

    @cached_property
    def chunk(self) -> npt.NDArray[np.int32]:
        """Number of the chunk that each action works on, counted on its rank from 0."""
        return np.array(self.timeline.schedule.stage_to_chunk, dtype=np.int32)[self.timeline.graph.stage]

    @cached_property
    def num_chunks(self) -> int:
        """The most chunks of a rank."""
        return max(self.timeline.schedule.stage_to_chunk) + 1

    @cached_property
    def turns_s(self) -> FloatArray:
        """Times, per rank, of the first action that is no forward; the step's end where there is none."""
        firsts = np.full(self.timeline.schedule.pp, self.timeline.makespan_s)
        np.minimum.at(firsts, self.rank[~self.is_forward], self.start_s[~self.is_forward])
        return firsts

    @cached_property
    def last_forwards_s(self) -> FloatArray:
        """Times, per rank, of the end of the last forward."""
        lasts = np.zeros(self.timeline.schedule.pp)
        np.maximum.at(lasts, self.rank[self.is_forward], self.end_s[self.is_forward])
        return lasts

    @cached_property
    def first_s(self) -> FloatArray:
        """Times, per rank, of its first action."""
        return np.array([float(start_s.min()) for start_s in self.timeline.start_s])

    @cached_property
    def final_s(self) -> FloatArray:
        """Times, per rank, of the end of its last action."""
        return np.array([float(end_s.max()) for end_s in self.timeline.end_s])

    @property
    def steady_s(self) -> tuple[float, float]:
        """Time from which all ranks have run a backward, and time of the first rank's last forward."""
        return float(self.turns_s.max()), float(self.last_forwards_s.min())

    def windows(self) -> list[Window]:
        """The whole step, or its steady state, beginning and end."""
        makespan_s, ranks = self.timeline.makespan_s, self.timeline.schedule.pp
        most = int(np.bincount(self.rank).max(initial=0))
        if most <= WHOLE and len(self.rank) <= MOST:
            return [Window("whole step", 0.0, makespan_s)]
        long_s = makespan_s / most * min(WINDOW, max(MOST // ranks, 8))
        fill_s, drain_s = self.steady_s
        middle_s = (fill_s + drain_s) / 2
        from_s = min(max(middle_s - long_s / 2, 0.0), makespan_s - long_s)
        middle = Window("from forwards to backwards", from_s, from_s + long_s)
        if fill_s + long_s < drain_s:
            from_s = self._round_between(fill_s, middle_s, from_s)
            middle = Window("steady state", from_s, from_s + long_s)
        begin_s, end_s = (min(max(long_s / 2, 1.1 * slant_s), 1.6 * long_s) for slant_s in self._slants_s)
        return [middle, Window("beginning", 0.0, begin_s), Window("end", makespan_s - end_s, makespan_s)]

    @property
    def _slants_s(self) -> tuple[float, float]:
        """Seconds until the last rank has begun, and from the first rank's end on."""
        begun_s = max(float(start_s[0]) for start_s in self.timeline.start_s)
        return begun_s, self.timeline.makespan_s - min(float(end_s.max()) for end_s in self.timeline.end_s)

    def _round_between(self, from_s: float, to_s: float, otherwise_s: float) -> float:
        """The last time between both at which the busiest rank begins a round of forwards on its first chunk."""
        rank = int(self.timeline.busy_s.argmax())
        own = (self.rank == rank) & self.is_forward
        order = np.argsort(self.start_s[own], kind="stable")
        starts_s, chunks = self.start_s[own][order], self.chunk[own][order]
        begins = (chunks == 0) & (np.append(-1, chunks[:-1]) != 0)
        between = starts_s[begins & (starts_s >= from_s) & (starts_s <= to_s)]
        return float(between[-1]) if len(between) else otherwise_s


def caption(step: DrawnStep, windows: list[Window], bubble_fraction: float | None, num_microbatches: int) -> str:
    """The sentences that say what is drawn, and what the step is made of.

    `bubble_fraction` is the plan's own, and `num_microbatches` that of its step where the timeline is of a shorter one.
    """
    timeline, schedule = step.timeline, step.timeline.schedule
    makespan_s, (fill_s, drain_s) = timeline.makespan_s, step.steady_s
    idle = f", of which ranks idle {percent(timeline.bubble_fraction)}"
    if bubble_fraction is not None:
        idle = f"; the pipeline bubble is {percent(bubble_fraction)} of the step"
    each = f" in {step.num_chunks} chunks each" if step.num_chunks > 1 else ""
    on = f"{schedule.pp} ranks" if schedule.pp > 1 else "1 rank"
    says = f"{schedule.name}, {schedule.num_microbatches} micro-batches on {on}{each}: "
    says += f"{seconds(makespan_s)}{idle}."
    if num_microbatches > schedule.num_microbatches:
        says += f" The plan's step has {num_microbatches} micro-batches, and the others repeat the steady state."
    if fill_s < drain_s:
        parts = (fill_s, drain_s - fill_s, makespan_s - drain_s)
        fill, steady, drain = (seconds(part_s, makespan_s) for part_s in parts)
        says += (
            f" It fills for {fill}, until all ranks have begun a backward, is steady for {steady}, and drains for "
            f"{drain}, from the first rank's last forward on."
        )
    if len(windows) > 1:
        spans = (f"{window.title} ({seconds(window.to_s - window.from_s)})" for window in windows)
        says += f" Drawn: {', '.join(spans)}."
    return says + " Zoomed, it has the numbers of the micro-batches."
