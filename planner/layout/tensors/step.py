"""Every tensor of a rank over the whole step, in the order in which they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import NamedTuple

from planner.answer.memory import MemoryItem, MemoryTensor
from planner.layout.candidate import Candidate
from planner.layout.memory_curve import MemoryCurve, fullest_backward
from planner.layout.tensors.alive import (
    BACKWARDS,
    Alive,
    Life,
    Row,
    copies_of_gradients,
    kept_rows,
    lives_of,
    moment_rows,
    tensors_at_peak,
)
from planner.layout.tensors.explore import as_tensor
from planner.layout.tensors.parts import Part, parts_of
from planner.physics.cost import PartCost
from planner.physics.stage_memory import moment_bytes
from planner.schedule.actions import ActionList
from planner.schedule.timeline import Timeline


class Event(NamedTuple):
    """A tensor is made, or freed."""

    time_s: float
    is_made: bool
    tensor: int
    """Its place among the tensors."""


@dataclass(slots=True)
class Step:
    """The tensors of a rank's step, and when they come and go."""

    tensors: list[MemoryTensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def make(self, row: Row, item: MemoryItem, num_bytes: int) -> int:
        """Note that a tensor is made; its place."""
        self.tensors.append(as_tensor(Alive(row, item, num_bytes)))
        self.events.append(Event(row.life.from_s, True, len(self.tensors) - 1))
        return len(self.tensors) - 1

    def free(self, places: Sequence[int]) -> None:
        """Note that tensors are freed, when their lives end."""
        self.events += [Event(self.tensors[place].to_s, False, place) for place in places]

    def peak(self) -> tuple[int, int]:
        """The most bytes at once, and the tensor that was made last then."""
        most = total = last = 0
        for event in self.events:
            total += self.tensors[event.tensor].bytes * (1 if event.is_made else -1)
            if total > most:
                most, last = total, event.tensor
        return most, last


def step_of(candidate: Candidate, timeline: Timeline, curve: MemoryCurve) -> Step:
    """Everything that a rank makes and frees, in order; what outlives the step is made first and not freed.

    Fractions of a byte are left out, and the last tensor of the peak makes up for them there.
    """
    step, rank = Step(), curve.rank
    for alive in tensors_at_peak(candidate, timeline, rank):
        if not alive.row.life.freed_by:
            step.make(alive.row, alive.item, alive.num_bytes)
    _passes(step, candidate, timeline, rank)
    for row in copies_of_gradients(candidate, timeline, rank):
        step.free([step.make(row, "workspace", floor(row.held.num_bytes))])
    # a rank's passes in their order, but for pairs that run at the same time
    step.events.sort(key=lambda event: event.time_s)
    for _ in range(2):  # what is taken from one of two equal peaks shows the other
        most, last = step.peak()
        tensor = step.tensors[last]
        step.tensors[last] = tensor.model_copy(update={"bytes": tensor.bytes + curve.peak_bytes - most})
    return step


def _passes(step: Step, candidate: Candidate, timeline: Timeline, rank: int) -> None:
    """Note all that forwards make and backwards free, and all that these need meanwhile."""
    parts, actions = parts_of(candidate, rank), ActionList.of(timeline.schedule.ranks[rank])
    stages = sorted(set(actions.stage.tolist()))
    kept = {stage: kept_rows(candidate, parts, Life(0.0, 0.0, stage=stage)) for stage in stages}
    needed = {
        stage: _needed(candidate, [part for part in parts if part.stage == stage], candidate.costs[stage])
        for stage in kept
    }
    at_peak = _needed(candidate, parts, candidate.rank_costs[rank])
    lives = {(life.stage, life.microbatch): life for life in lives_of(timeline, rank)}
    fullest, places = fullest_backward(candidate, actions), dict[tuple[int, int], list[int]]()
    spans = zip(actions, timeline.start_s[rank].tolist(), timeline.end_s[rank].tolist(), strict=True)
    for index, ((kind, stage, microbatch), start_s, end_s) in enumerate(spans):
        if kind == "F":
            life = lives[stage, microbatch]
            made = (replace(row, life=life) for row in kept[stage])
            places[stage, microbatch] = [step.make(row, "activations", floor(row.held.num_bytes)) for row in made]
            continue
        name = f"{BACKWARDS[kind]} of micro-batch {microbatch}"
        life = Life(start_s, end_s, name, name, microbatch, stage)
        for item, rows in (at_peak if index == fullest else needed[stage]).items():
            for row in rows:
                step.free([step.make(replace(row, life=life), item, floor(row.held.num_bytes))])
        if kind != "I":
            step.free(places.pop((stage, microbatch)))


def _needed(candidate: Candidate, parts: Sequence[Part], cost: PartCost) -> dict[MemoryItem, list[Row]]:
    """The rows that some parts need for a moment, by item."""
    if not sum(moment_bytes(cost)):
        return {}
    logits, workspace = moment_rows(candidate, parts, cost)
    return {"logits": logits, "workspace": workspace}
