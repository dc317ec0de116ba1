"""The memory explorer: per stage the tensors that are alive at its peak, who makes and frees them, and its memory over
the step; and the changes of a layout that would make room, each priced.

The tensors add up to the peak, item by item; what no list of tensors names is a row of its own that says why. Sizes are
in bytes, times in seconds from the start of the step. `plan memory --json` prints the answer's types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import ceil, floor
from typing import Literal, NamedTuple

from pydantic import AliasChoices, ConfigDict, Field

from planner.answer import Count, Plan, PositiveSeconds, PricedLayout, StageMemory
from planner.answer.layout import Seconds
from planner.errors import SpecError
from planner.layout.candidate import FULL, Candidate
from planner.layout.memory_curve import (
    STATICS,
    Held,
    MemoryCurve,
    Part,
    backward_tensors,
    fullest_backward,
    held,
    loss_tensors,
    memory_curves,
    parameters,
    parts_of,
)
from planner.layout.price import ITEMS
from planner.layout.seconds import STEADY_ROUNDS
from planner.layout.variation import Variation, varied
from planner.physics.cost import PartCost
from planner.physics.memory import constants
from planner.physics.operators import Saved
from planner.physics.stage_memory import (
    buffers,
    copied_gradients_bytes,
    fixed_workspace_bytes,
    moment_bytes,
    products_workspace_bytes,
)
from planner.record import record
from planner.schedule.actions import ActionList
from planner.schedule.orders import SCHEDULES
from planner.schedule.replay import Timeline, replay
from planner.specs.base import NonNegativeInt, Spec
from planner.specs.units import gib

MemoryItem = Literal["weights", "gradients", "optimizer", "activations", "logits", "workspace"]
"""The item of `StageMemory` that a tensor counts to; the items add up to the peak."""
Needed = dict[MemoryItem, list[Held]]


class MemoryTensor(Spec):
    """A tensor that is alive at a stage's peak."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    """The operator and the tensor that it keeps, or the parameter: `qkv: qkv`, `experts up: weight`."""
    item: MemoryItem
    part: str = ""
    """The part of the stage that it belongs to: `layer`, `embedding`, `head`, `mtp`, `buffers`."""
    layer: Count | None = None
    """The decoder layer; null for what belongs to none."""
    microbatch: Count | None = None
    """The micro-batch; null for what belongs to none."""
    shape: tuple[int, ...]
    """The tensor's dimensions on this rank; for a row that is a sum its bytes, and its `note` says of what."""
    dtype: str
    """Such as `bf16`, `fp32`, `int64`; `uint8` for a row that is a sum."""
    bytes: NonNegativeInt
    from_s: Seconds = Field(serialization_alias="from", validation_alias=AliasChoices("from", "from_s"))
    """The time when it is made; 0 for what is there before the step."""
    to_s: Seconds = Field(serialization_alias="to", validation_alias=AliasChoices("to", "to_s"))
    """The time when it is freed; the end of the step for what outlives it."""
    made_by: str = ""
    """The pass that makes it, such as `forward of micro-batch 3`; empty for what is there before the step."""
    freed_by: str = ""
    """The pass that frees it, such as `backward of micro-batch 3`; empty for what outlives the step."""
    remade_by: tuple[str, ...] = ()
    """Modules that would make it again in the backward, if they were recomputed; none where no module does."""
    note: str = ""
    """The reason for a row that is no tensor of its own."""

    @property
    def sizes(self) -> str:
        """Shape and dtype in words; empty for a row that is a sum."""
        is_sum = self.dtype == "uint8" and self.shape == (self.bytes,)
        return "" if is_sum else f" {list(self.shape)} {self.dtype}"


class MemoryOfStage(Spec):
    """A stage's peak, what is alive then, and its memory over the step."""

    stage: Count
    peak_bytes: Count
    """The stage's `peak_allocated_bytes`; the tensors add up to it."""
    peak_s: Seconds
    """The first time when so much is allocated."""
    capacity_bytes: Count
    """The GPU's memory."""
    chunks: tuple[tuple[int, int], ...]
    """[first layer, last layer exclusive) of each of its virtual stages."""
    memory: StageMemory
    """The plan's own items, which the tensors of each item add up to."""
    tensors: tuple[MemoryTensor, ...]
    curve: tuple[tuple[float, int], ...]
    """Time in seconds, and the bytes allocated from then on; the last entry is the end of the step."""
    curve_activations_bytes: tuple[int, ...]
    """The part of each entry of the curve that micro-batches in flight hold."""


class MemoryChange(Spec):
    """A change of the layout that would make room, with the step that it would give."""

    change: str
    """The change in words, such as `recompute mlp`."""
    modules: tuple[str, ...] = ()
    """The modules that are recomputed then; `full` for whole layers."""
    step_s: PositiveSeconds
    fits: bool
    peak_bytes: tuple[int, ...]
    """The peak of each stage."""


class MemoryAnswer(Spec):
    """The memory of a plan's stages, or of one of them."""

    schema_version: Literal[1] = 1
    model: str
    layout: str
    step_s: PositiveSeconds
    num_microbatches: Count
    """Micro-batches of the step that the curves show: the plan's, or fewer of a step too long to show."""
    stages: tuple[MemoryOfStage, ...]
    changes: tuple[MemoryChange, ...] = ()
    """Changes that free memory on the fullest stage, the shortest step first."""


BACKWARDS = {"B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Passes of a backward in words."""
UNNAMED = "the formula counts other bytes than those of the tensors that are listed"


@record
class Life:
    """The time in which a tensor exists, and the passes that make and free it; no pass for permanent ones."""

    from_s: float
    to_s: float
    made_by: str = ""
    freed_by: str = ""
    microbatch: int | None = None


class Stay(NamedTuple):
    """Tensors that come and go together: those that a pass needs meanwhile, or that a stage keeps of a micro-batch."""

    first: int
    """The place among the rank's actions of the pass that makes them; `last` is that of the one that frees them."""
    last: int
    life: Life
    rows: Needed


def as_tensor(row: Held, life: Life, item: MemoryItem, num_bytes: int) -> MemoryTensor:
    """A row as the answer has it, in whole bytes."""
    note = row.note
    if row.dims is not None and any(size % 1 for size in row.dims):
        note = "its size is a mean over ranks: the shape is rounded up, the bytes are not"
    return MemoryTensor(
        name=row.name, item=item, part=row.part, layer=row.layer, microbatch=life.microbatch,
        shape=(num_bytes,) if row.dims is None else tuple(map(ceil, row.dims)), dtype=row.dtype or "uint8",
        bytes=num_bytes, from_s=life.from_s, to_s=life.to_s, made_by=life.made_by, freed_by=life.freed_by,
        remade_by=row.modules, note=note,
    )  # fmt: skip


def tensors_at_peak(candidate: Candidate, timeline: Timeline, rank: int) -> list[MemoryTensor]:
    """All tensors of a rank when the most activations are held, in the backward that follows."""
    pricing, shape, memory = candidate.pricing, candidate.shape, candidate.memory[rank]
    parts, always = parts_of(candidate, rank), Life(0.0, timeline.makespan_s + sum(candidate.outside))
    totals: dict[MemoryItem, int] = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "logits": memory.logits_bytes,
        "workspace": memory.workspace_bytes,
    }
    rows: dict[MemoryItem, list[tuple[Held, Life]]] = {item: [] for item in totals}
    fullest = fullest_backward(candidate, ActionList.of(timeline.schedule.ranks[rank]))
    for stay in stays(candidate, timeline, rank, parts):
        if stay.first <= fullest <= stay.last:
            for item, needed in stay.rows.items():
                rows[item] += [(row, stay.life) for row in needed]
    gone = chain(rows["activations"], rows["logits"], rows["workspace"])
    rows["workspace"] += copies_of_gradients(candidate, timeline, rank, sum(row.num_bytes for row, _ in gone))
    for item, own in STATICS.items():
        listed = (
            row.of(part)
            for part in parts
            for one in parameters(part.items, pricing.model.hidden_size)
            for row in own(pricing, shape, one)
        )
        rows[item] += [(row, always) for row in listed]
    for item, kept in (
        ("workspace", buffers(pricing, candidate.table)),
        ("weights", constants(pricing.model, shape, pricing.runtime)),
    ):
        rows[item] += [(replace(held(one), part="buffers"), always) for one in kept]
    return [one for item, total in totals.items() for one in rounded(item, rows[item], total, always)]


def stays(candidate: Candidate, timeline: Timeline, rank: int, parts: Sequence[Part]) -> Iterator[Stay]:
    """All that the passes of a rank make and free again, in the order in which it is freed."""
    actions = ActionList.of(timeline.schedule.ranks[rank])
    own = {stage: [part for part in parts if part.stage == stage] for stage in sorted(set(actions.stage.tolist()))}
    kept = {stage: kept_rows(candidate, some, stage) for stage, some in own.items()}
    needed = {stage: moment_rows(candidate, some, candidate.costs[stage]) for stage, some in own.items()}
    at_peak = moment_rows(candidate, parts, candidate.rank_costs[rank])
    fullest, made = fullest_backward(candidate, actions), dict[tuple[int, int], tuple[int, float]]()
    spans = zip(actions, timeline.start_s[rank].tolist(), timeline.end_s[rank].tolist(), strict=True)
    for index, ((kind, stage, microbatch), start_s, end_s) in enumerate(spans):
        if kind == "F":
            made[stage, microbatch] = index, start_s
            continue
        name = f"{BACKWARDS[kind]} of micro-batch {microbatch}"
        life = Life(start_s, end_s, name, name, microbatch)
        yield Stay(index, index, life, at_peak if index == fullest else needed[stage])
        if kind != "I":
            first, from_s = made[stage, microbatch]
            life = Life(from_s, end_s, f"forward of micro-batch {microbatch}", name, microbatch)
            yield Stay(first, index, life, {"activations": kept[stage]})


def kept_rows(candidate: Candidate, parts: Sequence[Part], stage: int) -> list[Held]:
    """The rows that the parts of a virtual stage keep of a micro-batch."""
    pricing, shape = candidate.pricing, candidate.shape
    rows = [row.of(part) for part in parts for row in part.kept(pricing, shape)]
    if pricing.runtime.is_runner and stage != len(candidate.placement) - 1:
        sent = Saved("sent on", (shape.shard_tokens, pricing.model.residual_size))
        rows.append(replace(held(sent), part="stage"))
    assert candidate.durations.activation_bytes is not None
    total = candidate.durations.activation_bytes[stage]
    missing = total - sum(row.num_bytes for row in rows)
    if missing < -1:
        return [Held("tensors of a chunk", total, note=f"counted together: {UNNAMED}", part="stage")]
    return [*rows, Held("others", missing, note=UNNAMED, part="stage")] if missing > 1 else rows


def moment_rows(candidate: Candidate, parts: Sequence[Part], cost: PartCost) -> Needed:
    """The rows that the loss of some parts needs, or those of their fullest backward in its place, at `cost`."""
    pricing, shape = candidate.pricing, candidate.shape
    logits_bytes, backward_bytes = moment_bytes(cost)
    if logits_bytes:
        return {"logits": [replace(row, part="head") for row in loss_tensors(pricing, shape, parts)]}
    if not backward_bytes:
        return {}
    part, rows = backward_tensors(pricing, shape, parts)
    return {"workspace": [row.of(part) for row in rows]}


def copies_of_gradients(
    candidate: Candidate, timeline: Timeline, rank: int, gone_bytes: float = 0.0
) -> Iterator[tuple[Held, Life]]:
    """The bytes of an optimizer's copies of gradients beyond buffers and all that is gone when it runs."""
    copies = copied_gradients_bytes(candidate.pricing, candidate.table, candidate.rank_costs[rank])
    buffers = fixed_workspace_bytes(candidate.pricing, candidate.table)
    stays = products_workspace_bytes(candidate.pricing.cluster.hardware.architecture)
    more = copies + stays - buffers - gone_bytes
    if more > 0:
        start_s = timeline.makespan_s + candidate.outside.exposed_dp_s
        of_tensor = bool(candidate.pricing.runtime.optimizer_row.workspace[0])
        what = "fp32 copies of the largest weight and its gradient" if of_tensor else "fp32 copies of gradients"
        note = f"{gib(copies):.1f} GiB of copies take the place of activations, which are gone then"
        life = Life(start_s, start_s + candidate.outside.optimizer_s, "optimizer", "optimizer")
        yield Held(f"{what}, beyond what is free", more, note=note), life


def rounded(
    item: MemoryItem, rows: Sequence[tuple[Held, Life]], total_bytes: int, always: Life
) -> Iterator[MemoryTensor]:
    """The rows in whole bytes, which add up to `total_bytes`; a row more where they miss more than rounding does."""
    missing = total_bytes - sum(row.num_bytes for row, _ in rows)
    if abs(missing) > 2:
        rows = [*rows, (Held("others", missing, note=UNNAMED), always)]
    before, exact = 0, 0.0
    for place, (row, life) in enumerate(rows, 1):
        exact += row.num_bytes
        upto = total_bytes if place == len(rows) else floor(exact + 0.5)
        yield as_tensor(row, life, item, upto - before)
        before = upto


LEAST_FRACTION = 0.01
"""Least share of a stage's memory that a change has to free."""


def changes(candidate: Candidate) -> list[MemoryChange]:
    """The changes of one setting that free memory on the fullest stage, the shortest step first.

    Seconds and bytes are those of the same layers per stage; a search may find more. An order that was made to measure
    is not changed.
    """
    if candidate.made_order is not None:
        return []
    fullest = max(range(len(candidate.memory)), key=lambda rank: candidate.memory[rank].total_bytes)
    worth_bytes = (1 - LEAST_FRACTION) * candidate.memory[fullest].total_bytes
    found = []
    for one in _variations(candidate):
        changed = varied(candidate, one)
        if changed is not None and changed.memory[fullest].total_bytes < worth_bytes:
            peaks = tuple(stage.peak_allocated_bytes for stage in changed.memory)
            change = MemoryChange(
                change=one.says, modules=one.options, step_s=changed.step_s, fits=changed.fits, peak_bytes=peaks
            )
            found.append(change)
    return sorted(found, key=lambda change: change.step_s)


def _variations(candidate: Candidate) -> Iterator[Variation]:
    """One module more recomputed, or all layers; half the micro-batch; twice the ranks of tp or cp."""
    pricing, split, shape = candidate.pricing, candidate.split, candidate.shape
    runtime = pricing.runtime
    own = pricing.selective_modules if split.base == "selective" else ()
    known = runtime.recomputable_modules if runtime.has_sequence_parallel and split.base != FULL else ()
    for module in (name for name in known if name not in own):
        modules = tuple(name for name in known if name in {*own, module})
        yield Variation(f"recompute {module}", (module,), mode="selective", modules=modules)
    if runtime.recomputes_layers and split.mtp_mode != FULL:
        yield Variation("recompute all layers", (FULL,), mode=FULL)
    twice = {"num_microbatches": 2 * candidate.num_microbatches}
    size, dp, cp = int(shape.micro_batch_size), int(shape.dp), int(shape.cp)
    if size % 2 == 0:
        yield Variation(f"micro-batch {size // 2}", (), shape={"micro_batch_size": size // 2, **twice})
    if dp % 2 == 0 and shape.shard_size == dp * cp:
        for axis, ranks in (("tp", int(shape.tp)), ("cp", cp)):
            sizes = {axis: 2 * ranks, "dp": dp // 2, "shard_size": dp * cp // (2 if axis == "tp" else 1), **twice}
            if axis == "tp":
                sizes |= {"sequence_parallel": 1} | ({} if pricing.model.moe else {"etp": 2 * ranks})
            yield Variation(f"{axis} {2 * ranks} × dp {dp // 2}", (), shape=sizes)


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
        changes=tuple(changes(candidate)),
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
        tensors=tuple(tensors_at_peak(candidate, timeline, curve.rank)),
        curve=tuple(zip(curve.times_s.tolist(), map(int, curve.allocated_bytes.tolist()), strict=True)),
        curve_activations_bytes=tuple(map(int, curve.activations_bytes.tolist())),
    )


def _memory(layout: PricedLayout, candidate: Candidate, stage: int) -> StageMemory:
    """The stage's items as they are priced now; an older version may have written others into the plan."""
    planned, now = layout.stages[stage].memory, candidate.memory[stage]
    return planned.model_copy(update={name: getattr(now, name) for name in ITEMS})


class Event(NamedTuple):
    """A tensor is made, or freed."""

    time_s: float
    is_made: bool
    tensor: int
    """Its place among the tensors."""


def step_of(candidate: Candidate, timeline: Timeline, curve: MemoryCurve) -> tuple[list[MemoryTensor], list[Event]]:
    """Everything that a rank makes and frees, in order; what outlives the step is made first and not freed.

    Fractions of a byte are left out, and the last tensor of the peak makes up for them there.
    """
    rank = curve.rank
    tensors = [tensor for tensor in tensors_at_peak(candidate, timeline, rank) if not tensor.freed_by]
    for stay in stays(candidate, timeline, rank, parts_of(candidate, rank)):
        for item, rows in stay.rows.items():
            tensors += (as_tensor(row, stay.life, item, floor(row.num_bytes)) for row in rows)
    copies = copies_of_gradients(candidate, timeline, rank)
    tensors += (as_tensor(row, life, "workspace", floor(row.num_bytes)) for row, life in copies)
    events = [Event(one.from_s, True, place) for place, one in enumerate(tensors)]
    events += [Event(one.to_s, False, place) for place, one in enumerate(tensors) if one.freed_by]
    # what is freed at a time makes room for what is made then
    events.sort(key=lambda event: event[:2])
    for _ in range(2):  # what is taken from one of two equal peaks shows the other
        sizes = [tensors[event.tensor].bytes * (1 if event.is_made else -1) for event in events]
        held_bytes = list(accumulate(sizes))
        most = max(held_bytes)
        last = events[held_bytes.index(most)].tensor
        more = curve.peak_bytes - most
        tensors[last] = tensors[last].model_copy(update={"bytes": tensors[last].bytes + more})
    return tensors, events
