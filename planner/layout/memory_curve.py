"""Memory of each rank over a step, replayed: a curve whose maximum is the peak of the plan, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.layout.candidate import Candidate
from planner.physics.stage_memory import between_updates_bytes, fixed_workspace_bytes, moment_bytes
from planner.schedule.actions import HELD_BY_PLACE, ActionList, F
from planner.schedule.timeline import Timeline
from planner.shape import FloatArray


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes that a rank's tensors take from each time on, until the next.

    Weights, gradients, optimizer and buffers are there all the time. A forward adds the activations of its micro-batch
    when it starts, and whatever frees them (a backward, or its weight gradients) does so when it ends. Every backward
    has the bytes that it needs for a moment while it runs; the logits are there from the end of the last forward, if
    its backward comes next. Some trainers' optimizers copy gradients.

    The peak of a plan is the most that is held plus the most that a backward needs, on ranks of several chunks too,
    where these two may belong to different ones. So the first backward that runs while the most is held has the largest
    need of all of the rank's backwards here, and each other that of its own chunk.
    """

    rank: int
    times_s: FloatArray
    """Times when something changes, from 0 to the end of the step; two are the same where a peak lasts no time."""
    allocated_bytes: FloatArray
    """All bytes of tensors from each time on."""
    activations_bytes: FloatArray
    """The part of it that micro-batches in flight hold."""
    moment_bytes: FloatArray
    """The part of it that logits, backwards or the optimizer need for a moment."""
    reserved_bytes: int
    """Bytes of the driver, the communicators and the allocator, beside all of these."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors: `peak_allocated_bytes` of the stage."""
        return int(self.allocated_bytes.max())

    @property
    def peak_s(self) -> float:
        """The first time when so much is allocated."""
        return float(self.times_s[self.allocated_bytes.argmax()])


def memory_curves(
    candidate: Candidate, timeline: Timeline, ranks: Iterable[int] | None = None
) -> tuple[MemoryCurve, ...]:
    """The curve of each rank, or of some; `timeline` is the replay of the candidate's whole order."""
    return tuple(
        _curve(candidate, timeline, rank) for rank in (range(timeline.schedule.pp) if ranks is None else ranks)
    )


class _Change(NamedTuple):
    time_s: float
    activations_bytes: float
    moment_bytes: float


def _curve(candidate: Candidate, timeline: Timeline, rank: int) -> MemoryCurve:
    memory, end_s = candidate.memory[rank], timeline.makespan_s + sum(candidate.outside)
    fixed = min(round(fixed_workspace_bytes(candidate.pricing, candidate.table)), memory.workspace_bytes)
    rows = np.array([(0.0, 0.0, 0.0), *_changes(candidate, timeline, rank, fixed), (end_s, 0.0, 0.0)])
    # a rank's actions in their order, but for pairs that run at the same time: what ends at a time stays before what
    # starts then
    times_s, activations, moments = rows[np.argsort(rows[:, 0], kind="stable")].T
    activations, moments = np.rint(np.cumsum(activations)), np.rint(np.cumsum(moments))
    base = memory.peak_allocated_bytes - memory.activations_bytes - memory.logits_bytes - memory.workspace_bytes + fixed
    # items of the peak are rounded one by one, and long sums of fractions are not the last bit of short ones
    activations = _settled(activations, memory.activations_bytes)
    allocated = _settled(base + activations + moments, memory.peak_allocated_bytes)
    kept = _turning_points(times_s, allocated)
    return MemoryCurve(
        rank=rank,
        times_s=times_s[kept],
        allocated_bytes=allocated[kept],
        activations_bytes=activations[kept],
        moment_bytes=(allocated - base - activations)[kept],
        reserved_bytes=memory.reserved_bytes,
    )


def _settled(values: FloatArray, most: int) -> FloatArray:
    """The values, of which those within two bytes of `most` are it."""
    return np.where(np.abs(values - most) <= 2, float(most), values)


def _turning_points(times_s: FloatArray, values: FloatArray) -> npt.NDArray[np.bool_]:
    """True for what lasts, and for peaks that last no time; what is freed when as much is taken is no dip."""
    before = np.concatenate(([0.0], values[:-1]))
    lasts = np.concatenate((times_s[1:] > times_s[:-1], [True]))
    behind = np.concatenate((values[1:], [np.inf]))
    kept: npt.NDArray[np.bool_] = lasts | (values > np.maximum(before, behind))
    return kept


def _changes(candidate: Candidate, timeline: Timeline, rank: int, fixed_bytes: float) -> Iterator[_Change]:
    """All changes of a rank's memory in the order of its actions, and those of its optimizer."""
    actions = ActionList.of(timeline.schedule.ranks[rank])
    changes = _held_changes(candidate, actions)
    fullest = fullest_backward(candidate, actions)
    own, of_rank = [sum(moment_bytes(cost)) for cost in candidate.costs], sum(moment_bytes(candidate.rank_costs[rank]))
    spans = zip(actions, changes.tolist(), timeline.start_s[rank].tolist(), timeline.end_s[rank].tolist(), strict=True)
    logits, done_s = 0.0, 0.0
    for index, (action, change, start_s, end_s) in enumerate(spans):
        if logits and actions[index - 1][1:] == action[1:]:
            yield _Change(done_s, 0.0, logits)
            yield _Change(start_s, 0.0, -logits)
        if action.kind == "F":
            yield _Change(start_s, change, 0.0)
            logits, done_s = float(candidate.costs[action.stage].logits_bytes), end_s
            continue
        moment = of_rank if index == fullest else own[action.stage]
        yield _Change(start_s, 0.0, moment)
        yield _Change(end_s, change, -moment)
        logits = 0.0
    copies = between_updates_bytes(candidate.pricing, candidate.table, candidate.rank_costs[rank]) - fixed_bytes
    if copies > 0:
        update_s = timeline.makespan_s + candidate.outside.exposed_dp_s
        yield _Change(update_s, 0.0, copies)
        yield _Change(update_s + candidate.outside.optimizer_s, 0.0, -copies)


def fullest_backward(candidate: Candidate, actions: ActionList) -> int:
    """The index of a rank's first backward that runs while the most is held."""
    fullest = int(np.cumsum(_held_changes(candidate, actions)).argmax())
    return fullest + int((actions.kind[fullest:] != F).argmax())


def _held_changes(candidate: Candidate, actions: ActionList) -> FloatArray:
    """Bytes that each action of a rank adds to what is held."""
    held = candidate.durations.activation_bytes
    assert held is not None
    changes: FloatArray = HELD_BY_PLACE[actions.kind] * np.asarray(held)[actions.stage]
    return changes
