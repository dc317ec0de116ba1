"""The memory explorer's answer for a candidate: tensors at the peak and the curve of each stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from planner.answer import Plan, PricedLayout, StageMemory
from planner.answer.memory import MemoryAnswer, MemoryOfStage, MemoryTensor
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.memory_curve import MemoryCurve, memory_curves
from planner.layout.seconds import STEADY_ROUNDS
from planner.layout.tensors.alive import Alive, tensors_at_peak
from planner.layout.tensors.room import changes
from planner.schedule.orders import SCHEDULES
from planner.schedule.replay import replay
from planner.schedule.timeline import Timeline

MAX_ACTIONS = 200_000
"""The most actions of a step that are shown; of longer ones, a step of fewer micro-batches with the same peaks."""


def shown(candidate: Candidate) -> Candidate:
    """The candidate, or one of fewer micro-batches, which hold as much at their peak, where a step is too long to show.

    Raises SpecError for a long step whose schedule holds all of its micro-batches at once.
    """
    shape, num_actions = candidate.shape, 2 * candidate.num_microbatches * len(candidate.placement)
    if num_actions <= MAX_ACTIONS:
        return candidate
    pp = int(shape.pp)
    few = STEADY_ROUNDS[1] * pp + candidate.num_microbatches % pp
    if SCHEDULES[candidate.schedule].holds_all or candidate.made_order is not None:
        raise SpecError(
            f"a step has {num_actions:,} actions in {candidate.order_name}, too many to show its memory",
            "plan with fewer micro-batches, such as a smaller --global-batch-size",
        )
    fewer = replace(shape, num_microbatches=few)
    return replace(candidate, table=replace(candidate.table, shape=fewer))


def explore(plan: Plan, layout: PricedLayout, candidate: Candidate, stages: Iterable[int]) -> MemoryAnswer:
    """The memory of some stages of a plan's layout, which `candidate` prices."""
    timeline = replay(candidate.order, candidate.durations)
    curves = memory_curves(candidate, timeline)
    return MemoryAnswer(
        model=plan.model.name,
        layout=str(layout.parallelism),
        step_s=layout.step.step_s,
        num_microbatches=candidate.num_microbatches,
        stages=tuple(_stage(plan, layout, candidate, timeline, curves[stage]) for stage in stages),
        changes=tuple(changes(candidate, layout)),
    )


def _stage(
    plan: Plan, layout: PricedLayout, candidate: Candidate, timeline: Timeline, curve: MemoryCurve
) -> MemoryOfStage:
    return MemoryOfStage(
        stage=curve.rank,
        peak_bytes=curve.peak_bytes,
        peak_s=curve.peak_s,
        capacity_bytes=round(plan.cluster.hardware.memory_bytes),
        chunks=layout.stages[curve.rank].chunks,
        memory=_memory(layout, candidate, curve.rank),
        tensors=tuple(map(as_tensor, tensors_at_peak(candidate, timeline, curve.rank))),
        curve=tuple(zip(curve.times_s.tolist(), map(int, curve.allocated_bytes.tolist()), strict=True)),
        curve_activations_bytes=tuple(map(int, curve.activations_bytes.tolist())),
    )


def _memory(layout: PricedLayout, candidate: Candidate, stage: int) -> StageMemory:
    """The stage's items as they are priced now; an older version may have written others into the plan."""
    planned, now = layout.stages[stage].memory, candidate.memory[stage]
    names = StageMemory.model_fields.keys() - {"total_bytes_interval", "frozen_weights_bytes"}
    return planned.model_copy(update={name: getattr(now, name) for name in names})


def as_tensor(alive: Alive) -> MemoryTensor:
    """A tensor as the answer has it."""
    held, life = alive.row.held, alive.row.life
    note = held.note
    if held.dims is not None and any(size % 1 for size in held.dims):
        note = "its size is a mean over ranks: the shape is rounded up, the bytes are not"
    return MemoryTensor(
        name=held.name,
        item=alive.item,
        part=alive.row.part,
        layer=alive.row.layer,
        microbatch=life.microbatch,
        shape=(alive.num_bytes,) if held.dims is None else tuple(map(ceil, held.dims)),
        dtype=held.dtype or "uint8",
        bytes=alive.num_bytes,
        from_s=life.from_s,
        to_s=life.to_s,
        made_by=life.made_by,
        freed_by=life.freed_by,
        remade_by=held.modules,
        note=note,
    )
