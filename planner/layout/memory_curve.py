"""Memory of each rank over a step, replayed: a curve whose maximum is the peak of the plan, to the byte.

Behind it stand the tensors: what the parts of a rank keep of a micro-batch, weights, gradients and optimizer states
operator by operator, as ZeRO shards them, and what is needed for a moment at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.layout.candidate import FULL, Candidate
from planner.physics import memory
from planner.physics.adapters import OF_ADAPTERS
from planner.physics.cost import PartCost
from planner.physics.layers import around_mtp_layer
from planner.physics.memory import GRAPH_POOL, Moment, is_decoder_layer, offloaded
from planner.physics.operators import BF16, FP32, NARROW_BYTES, Item, Operator, Saved, operators_of
from planner.physics.optimizers import states_of, tensors_of
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import between_updates_bytes, fixed_workspace_bytes, moment_bytes
from planner.record import record
from planner.schedule.actions import HELD_BY_PLACE, ActionList, F
from planner.schedule.replay import Timeline
from planner.shape import FloatArray, Shape
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.specs.units import gib
from planner.trainers.spec import RuntimeSpec


@record
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
    ranks = range(timeline.schedule.pp) if ranks is None else ranks
    return tuple(_curve(candidate, timeline, rank) for rank in ranks)


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


@record
class Held:
    """One kept tensor, or bytes that belong to no tensor, whose `note` says why."""

    name: str
    num_bytes: float
    dims: tuple[float, ...] | None = None
    dtype: str | None = None
    note: str = ""
    modules: tuple[str, ...] = ()
    """Modules that would make it again, if they were recomputed."""
    part: str = ""
    layer: int | None = None

    def of(self, part: Part) -> Held:
        """The row as one of a part of a stage."""
        return replace(self, part=part.name, layer=part.layer)


def held(tensor: Saved, dtype: str = "bf16", operator: str = "") -> Held:
    """A tensor of the physics as a row; products are computed in `dtype`."""
    num_bytes = float(tensor.bytes_in(dtype))
    name = tensor.name
    if operator:
        name = operator if operator.split()[-1] == tensor.name else f"{operator}: {tensor.name}"
    if tensor.dtype == "bytes":
        return Held(name, num_bytes, note="several tensors, counted together")
    dims = tuple(map(float, tensor.dims))
    stored = dtype if dtype in NARROW_BYTES and tensor.is_cast else tensor.dtype
    if stored == "bf16" and dtype == "fp16":
        stored = "fp16"
    dims = dims[1:] if len(dims) > 1 and dims[0] == 1 else dims
    return Held(name, num_bytes, dims, stored, modules=tensor.modules)


def kept_tensors(pricing: Pricing, shape: Shape, items: Sequence[Item], mode: Recompute = "none") -> list[Held]:
    """The rows that add up to the part's `live_bytes` under a recompute mode."""
    if mode == "full":
        tokens = shape.shard_tokens * (1 - pricing.offloaded_share) / pricing.layers_at_once(shape)
        rows = [held(Saved("layer input", (tokens, pricing.model.hidden_size)))]
    else:
        recomputed = frozenset(pricing.selective_modules if mode == "selective" else ())
        rows = [*_on_the_gpu(pricing, items, recomputed)]
    if pricing.runtime.cuda_graphs:
        more = (GRAPH_POOL - 1) * sum(row.num_bytes for row in rows)
        rows.append(Held("pool of the CUDA graph", more, note=f"a graph's pool is {GRAPH_POOL:g} times its tensors"))
    return rows


def _on_the_gpu(pricing: Pricing, items: Sequence[Item], recomputed: frozenset[str]) -> Iterator[Held]:
    """All tensors kept but those in host memory; of layers that are kept there whole, a share of each is away."""
    runtime, dtype = pricing.runtime, pricing.training.dtype
    leaving = offloaded(runtime.offload_modules)
    stays = [
        held(tensor, dtype, op.name)
        for op in operators_of(items)
        for tensor in op.kept(recomputed)
        if (op.name, tensor.name) not in leaving
    ]
    share = pricing.offloaded_share
    if not (share and is_decoder_layer(items)):
        yield from (row for row in stays if row.num_bytes)
        return
    note = f"{runtime.offloaded_layers} layers wait in host memory, counted as an equal share of each: {share:.0%}"
    yield Held("a layer's tensors", (1 - share) * sum(row.num_bytes for row in stays), note=note)


def without(rows: Iterable[Held], kept: Sequence[Held]) -> list[Held]:
    """The rows that are not among those kept, which a recomputed layer makes again; one if some are kept in part."""
    left, kept_in_part = list(rows), 0.0
    for row in kept:
        same = next(
            (
                one
                for one in left
                if one == row
                or (row.name == "layer input" and one.name.endswith(": input") and one.num_bytes == row.num_bytes)
            ),
            None,
        )
        if same is not None:
            left.remove(same)
        else:
            kept_in_part += row.num_bytes
    if not kept_in_part:
        return left
    total = sum(row.num_bytes for row in left) - kept_in_part
    return [Held("recomputed tensors", total, note="counted together, since some are kept in part")]


@record
class Part:
    """A part of one virtual stage, with the operators that its price is the sum of."""

    name: str
    """`layer`, `embedding`, `mtp`, `mtp embedding` or `head`."""
    stage: int
    """The virtual stage."""
    cost: PartCost
    before: tuple[Item, ...] = ()
    """Operators outside of decoder layers, and those in front of one."""
    layer_items: tuple[Item, ...] = ()
    """Operators of its decoder layer, to which the recompute `mode` applies."""
    behind: tuple[Item, ...] = ()
    layer: int | None = None
    """Number of the decoder layer."""
    mode: Recompute = "none"

    @property
    def items(self) -> tuple[Item, ...]:
        """All of its operators."""
        return (*self.before, *self.layer_items, *self.behind)

    def kept(self, pricing: Pricing, shape: Shape) -> list[Held]:
        """The rows that add up to what the part keeps of a micro-batch."""
        if self.mode != "none":
            layer = kept_tensors(pricing, shape, self.layer_items, self.mode)
            layer = layer if self.mode == FULL else _gone_with_layer(layer)
            others = (*self.before, *self.behind)
            return layer + (kept_tensors(pricing, shape, others) if others else [])
        rows = kept_tensors(pricing, shape, self.items)
        if self.name == "layer":
            return _gone_with_layer(rows)
        if self.name == "head":
            logits = memory.overwritten_logits(self.items, pricing.runtime)
            gone = {held(each, operator="cross-entropy").name for each in logits}
            rows = [row for row in rows if row.name not in gone]
        return rows


def _gone_with_layer(rows: list[Held]) -> list[Held]:
    """Rows of what a layer keeps, marked as gone where the layer is recomputed whole: all but its input."""
    given = next((row for row in rows if row.name.endswith(": input")), None)
    return [row if row is given else replace(row, modules=(*row.modules, FULL)) for row in rows]


def parts_of(candidate: Candidate, rank: int) -> list[Part]:
    """All parts of a rank, in the order in which a micro-batch meets them."""
    pricing = candidate.pricing
    layers = {kind: pricing.layer(kind, candidate.shape) for kind in pricing.model.kinds}
    stages = (stage for stage, at in enumerate(candidate.placement) if at == rank)
    return [part for stage in stages for part in _parts(candidate, stage, layers)]


def _parts(candidate: Candidate, stage: int, layers: dict[LayerKind, tuple[Item, ...]]) -> Iterator[Part]:
    table, split, pricing, shape = candidate.table, candidate.split, candidate.pricing, candidate.shape
    model = pricing.model
    others = dict(candidate.parts_beside_layers(stage))
    if "embedding" in others:
        yield Part("embedding", stage, others["embedding"], pricing.embedding_items(shape))
    for layer, kind, mode in split.layer_modes(model, stage):
        yield Part("layer", stage, table.layers[kind, mode], (), layers[kind], (), layer, mode)
    if "mtp" in others:
        mode = split.mtp_mode if split.mtp_mode in table.mtp_recomputed else "none"
        around = around_mtp_layer(model, shape, pricing.runtime)
        before, behind = (pricing.as_trained(items, shape) for items in around)
        inner = tuple(chain.from_iterable(layers[kind] for kind in model.predicting_layers))
        block = Part("mtp", stage, others["mtp"], before, inner, behind, mode=mode)
        yield from [block] * model.num_nextn_predict_layers
        if int(candidate.shape.pp) > 1:
            yield Part("mtp embedding", stage, PartCost(), pricing.lookup_items(shape))
    if "head" in others:
        shares_embedding = candidate.is_folded and model.tie_word_embeddings
        yield Part("head", stage, others["head"], pricing.head_items(shape, shares_embedding))


STATES = {12: "master, exp_avg, exp_avg_sq", 8: "exp_avg, exp_avg_sq"}
"""Optimizer states in fp32, by their bytes per parameter."""
Rows = Callable[[Pricing, Shape, "Parameter"], Iterator[Held]]
_WIDTHS = {BF16: "bf16", FP32: "fp32"}


class Parameter(NamedTuple):
    """A weight of an operator, or its bias, as this rank would hold it whole."""

    operator: Operator
    name: str
    dims: tuple[float, ...]

    @property
    def dense(self) -> float:
        """Parameters that are no experts'."""
        return 0.0 if self.operator.expert else prod(self.dims)

    @property
    def expert(self) -> float:
        """Parameters of routed experts."""
        return prod(self.dims) if self.operator.expert else 0.0

    def held(self, runtime: RuntimeSpec) -> float:
        """Those that are no experts', of which `weight_shards` ranks hold a part each."""
        return self.dense / runtime.weight_shards


def weights(pricing: Pricing, shape: Shape, one: Parameter) -> Iterator[Held]:
    """The rows of a parameter that add up to its part of `weights_bytes`."""
    runtime, dtype = pricing.runtime, pricing.training.dtype
    if not one.operator.trained:
        yield _frozen(one, shape, pricing)
        return
    dense, expert = one.held(runtime), one.expert
    wide = 0.0 if one.operator.is_cast else dense + expert
    gathered = float(memory.gathered_weights_bytes(dense + expert, shape, runtime))
    total, plain = (
        float(memory.weights_bytes(dense, expert, shape, runtime, name, wide)) - gathered for name in (dtype, "bf16")
    )
    elements = plain / runtime.weight_bytes
    copies = 0 if wide else memory.cast_copies(runtime, dtype)
    cast = copies * elements * NARROW_BYTES.get(dtype, 0.0)
    if cast:
        own = one.dims if elements == prod(one.dims) else (elements,)
        yield Held(f"{one.name} cast", cast, (copies, *own) if copies > 1 else own, dtype)
    if total > cast:
        yield _row(one, "", total - cast, runtime.weight_bytes)
    if gathered:
        yield _row(one, " gathered", gathered, BF16)
    if runtime.copies_weights and not one.operator.name.endswith(OF_ADAPTERS):
        frozen = memory.frozen_bytes(one.dense, expert, one.dense if wide else 0.0, shape, runtime, dtype)
        yield Held(f"{one.name} of the reference", float(frozen), note="a second copy, frozen")


def _frozen(one: Parameter, shape: Shape, pricing: Pricing) -> Held:
    """The row of a weight that adapters leave as it is, in as many bits as it is kept in."""
    runtime = pricing.runtime
    wide = 0.0 if one.operator.is_cast else one.dense + one.expert
    dtype = pricing.training.dtype
    total = float(memory.frozen_bytes(one.dense, one.expert, wide, shape, runtime, dtype))
    width = runtime.frozen_wide_bytes if wide else memory.frozen_weight_bytes(runtime, dtype)
    if width in _WIDTHS:
        return _row(one, " frozen", total, int(width))
    return Held(f"{one.name} frozen", total, note=f"{width:.3g} bytes a parameter, with the scales of its blocks")


def gradients(pricing: Pricing, shape: Shape, one: Parameter) -> Iterator[Held]:
    """The same of `gradients_bytes`."""
    if one.operator.trained:
        total = float(memory.gradients_bytes(one.held(pricing.runtime), one.expert, shape, pricing.runtime))
        yield _row(one, " gradient", total, pricing.runtime.gradient_bytes, "with a 16-bit gradient beside the sum")


def optimizer(pricing: Pricing, shape: Shape, one: Parameter) -> Iterator[Held]:
    """The same of `optimizer_bytes`."""
    runtime = pricing.runtime
    states = STATES.get(runtime.optimizer_bytes)
    if not one.operator.trained:
        return
    total = float(memory.optimizer_bytes(one.dense, one.expert, shape, runtime, _states_bytes(pricing, one)))
    if not total:  # offloaded, all of it
        return
    is_plain = runtime.optimizer == "adamw" and not (runtime.master_remainders or runtime.optimizer_offload_fraction)
    if states is None or not is_plain:
        note = f"{total / prod(one.dims):.3g} bytes on this rank for each parameter"
        yield Held(f"{one.name} optimizer states", total, note=note)
        return
    dims = (runtime.optimizer_bytes // FP32, total / runtime.optimizer_bytes)
    yield Held(f"{one.name} {states}", total, dims, "fp32")


def _states_bytes(pricing: Pricing, one: Parameter) -> tuple[float, float]:
    """Bytes of the states of an optimizer other than AdamW, for a weight that is no expert's and for one that is."""
    op = one.operator
    if pricing.runtime.optimizer == "adamw":
        return 0.0, 0.0
    tensors = [each for each in tensors_of(op, pricing.model.hidden_size) if float(each.elements) > 0]
    own = tensors[-1] if one.name.endswith(" bias") else tensors[0]
    kept = float(states_of(own, pricing.runtime).resident_bytes)
    return (0.0, kept) if op.expert else (kept, 0.0)


def parameters(items: Sequence[Item], hidden_size: int) -> Iterator[Parameter]:
    """The weights of all operators, and their biases."""
    for op in operators_of(items):
        number = float(op.parameters)
        dims = tuple(map(float, (op.count, op.n, op.k) if op.expert else (op.n, op.k)))
        if not number:
            continue
        if op.kind == "gemm" and prod(dims) <= number:
            yield Parameter(op, f"{op.name} weight", dims)
            if number > prod(dims):
                yield Parameter(op, f"{op.name} bias", (number - prod(dims),))
            continue
        # tables of rows as wide as the hidden state; norms with a bias are two of them
        is_table = number > hidden_size and number % hidden_size == 0
        yield Parameter(op, f"{op.name} weight", (number / hidden_size, hidden_size) if is_table else (number,))


def _row(one: Parameter, what: str, num_bytes: float, width: int, copies: str = "") -> Held:
    """A row whose shape is the weight's own where the rank has all of it, and flat where it has a shard."""
    elements, dtype, whole = num_bytes / width, _WIDTHS.get(width), prod(one.dims)
    if dtype is None or elements > whole:
        return Held(f"{one.name}{what}", num_bytes, note=f"{num_bytes / whole:.3g} bytes a parameter: {copies}")
    return Held(f"{one.name}{what}", num_bytes, one.dims if elements == whole else (elements,), dtype)


STATICS: dict[Literal["weights", "gradients", "optimizer"], Rows] = {
    "weights": weights,
    "gradients": gradients,
    "optimizer": optimizer,
}
"""The rows of a parameter by each item that outlives the step; gradients and states are of those that are trained."""


def loss_tensors(pricing: Pricing, shape: Shape, parts: Sequence[Part]) -> list[Held]:
    """The tensors of the loss of a rank's head."""
    head = next(part for part in parts if part.name == "head")
    layer = pricing.layer(pricing.model.layers[-1], shape)
    return [held(tensor) for tensor in memory.loss_tensors(head.items, layer, pricing.runtime)]


def backward_tensors(pricing: Pricing, shape: Shape, parts: Sequence[Part]) -> tuple[Part, list[Held]]:
    """The part whose backward needs the most beside what is held, and what that is."""
    worst = max(parts, key=lambda part: float(part.cost.transient_bytes))
    if worst.name == "head" and pricing.runtime.fused_cross_entropy:
        return worst, loss_tensors(pricing, shape, parts)
    heads = (part.cost.live_bytes for part in parts if part.name == "head" and part is not worst)
    gone_bytes = float(sum(heads)) if pricing.runtime.counts_moments else 0.0
    return worst, [*_recomputed(pricing, shape, worst), *_own(pricing, worst.items, gone_bytes)]


def _recomputed(pricing: Pricing, shape: Shape, part: Part) -> Iterator[Held]:
    """Tensors that the layer's forward gives once more, and those that comes back from host memory."""
    if part.mode != "none":
        plain = kept_tensors(pricing, shape, part.layer_items)
        together = float(pricing.layers_at_once(shape)) if part.mode == FULL else 1.0
        again = without(plain, kept_tensors(pricing, shape, part.layer_items, part.mode))
        yield from (replace(row, num_bytes=together * row.num_bytes) for row in again)


def _own(pricing: Pricing, items: Sequence[Item], gone_bytes: float) -> Iterator[Held]:
    """The working set of the operator whose backward needs most, gradients that stay empty, what was in host memory.

    `gone_bytes` are those that the head kept and that a layer's backward finds free (`Pricing.table`).
    """
    runtime = pricing.runtime
    moment = max(memory.moments(items, runtime), key=lambda one: float(one.num_bytes), default=None)
    if moment is not None and moment.num_bytes > 0:
        yield from _working(moment, gone_bytes)
    yield from (held(tensor) for tensor in memory.unused_gradients(items, runtime))
    away = float(pricing.offloaded_bytes_of(items))
    if away:
        yield Held("back from host memory", away, note="tensors that waited there come back for the backward")


def _working(moment: Moment, gone_bytes: float) -> Iterator[Held]:
    op, freed = moment.operator, float(moment.freed_bytes) + gone_bytes
    if not freed:
        yield from (held(tensor, operator=op.name) for tensor in moment.working)
        return
    names = ", ".join(tensor.name for tensor in moment.working)
    note = f"{names}; less {gib(freed):.2f} GiB that operators behind it kept, whose backward is done then"
    yield Held(f"{op.name}: working set", float(moment.num_bytes) - gone_bytes, note=note)
