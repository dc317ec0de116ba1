"""The tensors that are alive at a rank's peak: what they are, who made them when, and who frees them when.

They add up to the peak, item by item. What no list of tensors names is a row of its own that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor

from planner.answer.memory import MemoryItem
from planner.layout.candidate import Candidate
from planner.layout.memory_curve import fullest_backward
from planner.layout.tensors import moment, parameters
from planner.layout.tensors.kept import Held, held
from planner.layout.tensors.parts import Part, parts_of
from planner.physics.cost import PartCost
from planner.physics.memory import constants
from planner.physics.operators import Saved
from planner.physics.stage_memory import copied_gradients_bytes, fixed_workspace_bytes, moment_bytes
from planner.schedule.actions import ActionList
from planner.schedule.timeline import Timeline
from planner.specs.units import gib

BACKWARDS = {"B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Passes of a backward in words."""
UNNAMED = "the formula counts other bytes than those of the tensors that are listed"


@dataclass(frozen=True, slots=True)
class Life:
    """When something is there, and which passes make and free it; no pass for what is there all the time."""

    from_s: float
    to_s: float
    made_by: str = ""
    freed_by: str = ""
    microbatch: int | None = None
    stage: int | None = None
    """The virtual stage whose passes these are."""


NOW = Life(0.0, 0.0)
"""The life of what is not placed in time yet."""


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor with its life and its part; its bytes are not rounded yet."""

    held: Held
    life: Life
    part: str = ""
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """A tensor at the peak, in whole bytes."""

    row: Row
    item: MemoryItem
    num_bytes: int


def tensors_at_peak(candidate: Candidate, timeline: Timeline, rank: int) -> list[Alive]:
    """All tensors of a rank when the most activations are held, in the backward that follows."""
    pricing, shape, memory = candidate.pricing, candidate.shape, candidate.memory[rank]
    parts, always = parts_of(candidate, rank), Life(0.0, timeline.makespan_s + sum(candidate.outside))
    lives, peak = lives_at_peak(candidate, timeline, rank)
    activations = [row for life in lives for row in kept_rows(candidate, parts, life)]
    needed = moment_rows(candidate, parts, candidate.rank_costs[rank])
    logits, workspace = ([replace(row, life=peak) for row in rows] for rows in needed)
    workspace += copies_of_gradients(candidate, timeline, rank, activations + logits + workspace)
    workspace += [Row(held, always, "buffers") for held in moment.fixed(pricing, candidate.table)]
    constant = [Row(held(one), always, "buffers") for one in constants(pricing.model, shape, pricing.runtime)]
    statics = {
        what: [Row(held, always, part.name, part.layer) for part in parts for held in rows(pricing, shape, part.items)]
        for what, rows in parameters.STATICS.items()
    }
    listed: tuple[tuple[MemoryItem, list[Row], int], ...] = (
        ("weights", statics["weights"] + constant, memory.weights_bytes),
        ("gradients", statics["gradients"], memory.gradients_bytes),
        ("optimizer", statics["optimizer"], memory.optimizer_bytes),
        ("activations", activations, memory.activations_bytes),
        ("logits", logits, memory.logits_bytes),
        ("workspace", workspace, memory.workspace_bytes),
    )
    return [alive for item, rows, total in listed for alive in rounded(item, rows, total, always)]


def lives_at_peak(candidate: Candidate, timeline: Timeline, rank: int) -> tuple[list[Life], Life]:
    """The micro-batches in flight on each virtual stage at the peak, and the backward that runs then."""
    lives = list(lives_of(timeline, rank))
    actions = ActionList.of(timeline.schedule.ranks[rank])
    index = fullest_backward(candidate, actions)
    kind, stage, microbatch = actions[index]
    start_s, end_s = float(timeline.start_s[rank][index]), float(timeline.end_s[rank][index])
    name = f"{BACKWARDS[kind]} of micro-batch {microbatch}"
    order = {(a.stage, a.microbatch, a.kind): place for place, a in enumerate(actions)}
    flying = [
        life
        for life in lives
        if order[life.stage, life.microbatch, "F"] < index  # type: ignore[index]
        and index <= max(order.get((life.stage, life.microbatch, way), -1) for way in "BW")  # type: ignore[arg-type]
    ]
    return flying, Life(start_s, end_s, name, name, microbatch, stage)


def lives_of(timeline: Timeline, rank: int) -> Iterator[Life]:
    """When each micro-batch's activations are there on each virtual stage of a rank."""
    starts: dict[tuple[int, int], float] = {}
    actions = timeline.schedule.ranks[rank]
    for action, start_s, end_s in zip(actions, timeline.start_s[rank], timeline.end_s[rank], strict=True):
        stage, microbatch = key = action.stage, action.microbatch
        if action.kind == "F":
            starts[key] = float(start_s)
        elif action.kind in "BW":
            made, freed = (f"{name} of micro-batch {microbatch}" for name in ("forward", BACKWARDS[action.kind]))
            yield Life(starts[key], float(end_s), made, freed, microbatch, stage)


def kept_rows(candidate: Candidate, parts: Sequence[Part], life: Life) -> list[Row]:
    """The rows that the parts of a virtual stage keep of a micro-batch."""
    pricing, shape, own = candidate.pricing, candidate.shape, [part for part in parts if part.stage == life.stage]
    rows = [Row(one, life, part.name, part.layer) for part in own for one in part.kept(pricing, shape)]
    if pricing.runtime.is_runner and life.stage != len(candidate.placement) - 1:
        rows.append(Row(held(Saved("sent on", (shape.shard_tokens, pricing.model.residual_size))), life, "stage"))
    assert candidate.durations.activation_bytes is not None
    assert life.stage is not None
    total = candidate.durations.activation_bytes[life.stage]
    missing = total - sum(row.held.num_bytes for row in rows)
    if missing < -1:
        return [Row(Held("tensors of a chunk", total, note=f"counted together: {UNNAMED}"), life, "stage")]
    return [*rows, Row(Held("others", missing, note=UNNAMED), life, "stage")] if missing > 1 else rows


def moment_rows(candidate: Candidate, parts: Sequence[Part], cost: PartCost) -> tuple[list[Row], list[Row]]:
    """The rows that the loss of some parts needs, and those of their fullest backward in its place, at `cost`."""
    pricing, shape = candidate.pricing, candidate.shape
    if moment_bytes(cost)[0]:
        return [Row(one, NOW, "head") for one in moment.loss(pricing, shape, parts)], []
    part, rows = moment.backward(pricing, shape, parts)
    return [], [Row(one, NOW, part.name, part.layer) for one in rows]


def copies_of_gradients(candidate: Candidate, timeline: Timeline, rank: int, gone: Sequence[Row] = ()) -> Iterator[Row]:
    """The bytes of an optimizer's copies of gradients beyond buffers and all that is gone when it runs."""
    copies = copied_gradients_bytes(candidate.pricing, candidate.table, candidate.rank_costs[rank])
    buffers = fixed_workspace_bytes(candidate.pricing, candidate.table)
    more = copies - buffers - sum(row.held.num_bytes for row in gone)
    if more > 0:
        start_s = timeline.makespan_s + candidate.outside.exposed_dp_s
        of_tensor = bool(candidate.pricing.runtime.optimizer_row.workspace[0])
        what = "fp32 copies of the largest weight and its gradient" if of_tensor else "fp32 copies of gradients"
        note = f"{gib(copies):.1f} GiB of copies take the place of activations, which are gone then"
        name = f"{what}, beyond what is free"
        life = Life(start_s, start_s + candidate.outside.optimizer_s, "optimizer", "optimizer")
        yield Row(Held(name, more, note=note), life)


def rounded(item: MemoryItem, rows: Sequence[Row], total_bytes: int, always: Life) -> Iterator[Alive]:
    """The rows in whole bytes, which add up to `total_bytes`; a row more where they miss more than rounding does."""
    missing = total_bytes - sum(row.held.num_bytes for row in rows)
    if abs(missing) > 2:
        rows = [*rows, Row(Held("others", missing, note=UNNAMED), always)]
    before, exact = 0, 0.0
    for place, row in enumerate(rows, 1):
        exact += row.held.num_bytes
        upto = total_bytes if place == len(rows) else floor(exact + 0.5)
        yield Alive(row, item, upto - before)
        before = upto
