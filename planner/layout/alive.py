"""The memory explorer: per stage the tensors that are alive at its peak, who makes and frees them, and its memory over
the step; and the changes of a layout that would make room, each priced.

The tensors add up to the peak, item by item; what no list of tensors names is a row of its own that says why. Sizes are
in bytes, times in seconds from the start of the step. `plan memory --json` prints the answer's types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    stage: int | None = None
    """The virtual stage whose passes these are."""


NOW = Life(0.0, 0.0)
"""The life of a tensor whose time is not known yet."""


@record
class LivingTensor:
    """A tensor with its life and its part; its bytes are not rounded yet."""

    held: Held
    life: Life
    part: str = ""
    layer: int | None = None

    def as_tensor(self, item: MemoryItem, num_bytes: int) -> MemoryTensor:
        """The tensor as the answer has it, in whole bytes."""
        held, life, note = self.held, self.life, self.held.note
        if held.dims is not None and any(size % 1 for size in held.dims):
            note = "its size is a mean over ranks: the shape is rounded up, the bytes are not"
        return MemoryTensor(
            name=held.name, item=item, part=self.part, layer=self.layer, microbatch=life.microbatch,
            shape=(num_bytes,) if held.dims is None else tuple(map(ceil, held.dims)), dtype=held.dtype or "uint8",
            bytes=num_bytes, from_s=life.from_s, to_s=life.to_s, made_by=life.made_by, freed_by=life.freed_by,
            remade_by=held.modules, note=note,
        )  # fmt: skip


def tensors_at_peak(candidate: Candidate, timeline: Timeline, rank: int) -> list[MemoryTensor]:
    """All tensors of a rank when the most activations are held, in the backward that follows."""
    pricing, shape, memory = candidate.pricing, candidate.shape, candidate.memory[rank]
    parts, always = parts_of(candidate, rank), Life(0.0, timeline.makespan_s + sum(candidate.outside))
    lives, peak = lives_at_peak(candidate, timeline, rank)
    activations = [row for life in lives for row in kept_rows(candidate, parts, life)]
    needed = moment_rows(candidate, parts, candidate.rank_costs[rank])
    logits, workspace = ([replace(row, life=peak) for row in rows] for rows in needed)
    workspace += copies_of_gradients(candidate, timeline, rank, activations + logits + workspace)
    workspace += [LivingTensor(held(one), always, "buffers") for one in buffers(pricing, candidate.table)]
    constant = [LivingTensor(held(one), always, "buffers") for one in constants(pricing.model, shape, pricing.runtime)]
    statics = {
        what: [
            LivingTensor(row, always, part.name, part.layer)
            for part in parts
            for one in parameters(part.items, pricing.model.hidden_size)
            for row in rows(pricing, shape, one)
        ]
        for what, rows in STATICS.items()
    }
    listed: tuple[tuple[MemoryItem, list[LivingTensor], int], ...] = (
        ("weights", statics["weights"] + constant, memory.weights_bytes),
        ("gradients", statics["gradients"], memory.gradients_bytes),
        ("optimizer", statics["optimizer"], memory.optimizer_bytes),
        ("activations", activations, memory.activations_bytes),
        ("logits", logits, memory.logits_bytes),
        ("workspace", workspace, memory.workspace_bytes),
    )
    return [tensor for item, rows, total in listed for tensor in rounded(item, rows, total, always)]


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


def kept_rows(candidate: Candidate, parts: Sequence[Part], life: Life) -> list[LivingTensor]:
    """The rows that the parts of a virtual stage keep of a micro-batch."""
    pricing, shape, own = candidate.pricing, candidate.shape, [part for part in parts if part.stage == life.stage]
    rows = [LivingTensor(one, life, part.name, part.layer) for part in own for one in part.kept(pricing, shape)]
    if pricing.runtime.is_runner and life.stage != len(candidate.placement) - 1:
        rows.append(
            LivingTensor(held(Saved("sent on", (shape.shard_tokens, pricing.model.residual_size))), life, "stage")
        )
    assert candidate.durations.activation_bytes is not None
    assert life.stage is not None
    total = candidate.durations.activation_bytes[life.stage]
    missing = total - sum(row.held.num_bytes for row in rows)
    if missing < -1:
        return [LivingTensor(Held("tensors of a chunk", total, note=f"counted together: {UNNAMED}"), life, "stage")]
    return [*rows, LivingTensor(Held("others", missing, note=UNNAMED), life, "stage")] if missing > 1 else rows


def moment_rows(
    candidate: Candidate, parts: Sequence[Part], cost: PartCost
) -> tuple[list[LivingTensor], list[LivingTensor]]:
    """The rows that the loss of some parts needs, and those of their fullest backward in its place, at `cost`."""
    pricing, shape = candidate.pricing, candidate.shape
    if moment_bytes(cost)[0]:
        return [LivingTensor(one, NOW, "head") for one in loss_tensors(pricing, shape, parts)], []
    part, rows = backward_tensors(pricing, shape, parts)
    return [], [LivingTensor(one, NOW, part.name, part.layer) for one in rows]


def copies_of_gradients(
    candidate: Candidate, timeline: Timeline, rank: int, gone: Sequence[LivingTensor] = ()
) -> Iterator[LivingTensor]:
    """The bytes of an optimizer's copies of gradients beyond buffers and all that is gone when it runs."""
    copies = copied_gradients_bytes(candidate.pricing, candidate.table, candidate.rank_costs[rank])
    buffers = fixed_workspace_bytes(candidate.pricing, candidate.table)
    stays = products_workspace_bytes(candidate.pricing.cluster.hardware.architecture)
    more = copies + stays - buffers - sum(row.held.num_bytes for row in gone)
    if more > 0:
        start_s = timeline.makespan_s + candidate.outside.exposed_dp_s
        of_tensor = bool(candidate.pricing.runtime.optimizer_row.workspace[0])
        what = "fp32 copies of the largest weight and its gradient" if of_tensor else "fp32 copies of gradients"
        note = f"{gib(copies):.1f} GiB of copies take the place of activations, which are gone then"
        name = f"{what}, beyond what is free"
        life = Life(start_s, start_s + candidate.outside.optimizer_s, "optimizer", "optimizer")
        yield LivingTensor(Held(name, more, note=note), life)


def rounded(item: MemoryItem, rows: Sequence[LivingTensor], total_bytes: int, always: Life) -> Iterator[MemoryTensor]:
    """The rows in whole bytes, which add up to `total_bytes`; a row more where they miss more than rounding does."""
    missing = total_bytes - sum(row.held.num_bytes for row in rows)
    if abs(missing) > 2:
        rows = [*rows, LivingTensor(Held("others", missing, note=UNNAMED), always)]
    before, exact = 0, 0.0
    for place, row in enumerate(rows, 1):
        exact += row.held.num_bytes
        upto = total_bytes if place == len(rows) else floor(exact + 0.5)
        yield row.as_tensor(item, upto - before)
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


@dataclass(slots=True)
class Step:
    """The tensors of a rank's step, and when they come and go."""

    tensors: list[MemoryTensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def make(self, tensor: MemoryTensor) -> int:
        """Note that a tensor is made; its place."""
        self.tensors.append(tensor)
        self.events.append(Event(tensor.from_s, True, len(self.tensors) - 1))
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
    for tensor in tensors_at_peak(candidate, timeline, rank):
        if not tensor.freed_by:
            step.make(tensor)
    _passes(step, candidate, timeline, rank)
    for row in copies_of_gradients(candidate, timeline, rank):
        step.free([step.make(row.as_tensor("workspace", floor(row.held.num_bytes)))])
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
            made = (replace(row, life=life).as_tensor("activations", floor(row.held.num_bytes)) for row in kept[stage])
            places[stage, microbatch] = [step.make(tensor) for tensor in made]
            continue
        name = f"{BACKWARDS[kind]} of micro-batch {microbatch}"
        life = Life(start_s, end_s, name, name, microbatch, stage)
        for item, rows in (at_peak if index == fullest else needed[stage]).items():
            for row in rows:
                step.free([step.make(replace(row, life=life).as_tensor(item, floor(row.held.num_bytes)))])
        if kind != "I":
            step.free(places.pop((stage, microbatch)))


def _needed(candidate: Candidate, parts: Sequence[Part], cost: PartCost) -> dict[MemoryItem, list[LivingTensor]]:
    """The rows that some parts need for a moment, by item."""
    if not sum(moment_bytes(cost)):
        return {}
    logits, workspace = moment_rows(candidate, parts, cost)
    return {"logits": logits, "workspace": workspace}
