"""Thousands of shapes at once, with the prices of their kernels, and the shapes among them that can fit at all.

The test for memory is a relaxation of the integer program, so no shape that could win is lost: ranks take any number
of layers that their memory allows, they recompute as cheaply in bytes as can be, and only together must they hold the
model.

Of the parts of a layer that the trainer can be told to recompute, every set counts that is worth it: no other saves as
many bytes for fewer seconds, on the kernels of the job itself. First one bound is worked out for all sets together
(`ModuleSets.together`), since for most shapes no set is fast enough; then each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import relaxed_peak_bytes, static_bytes
from planner.record import record
from planner.schedule.orders import SCHEDULES, placement
from planner.search.enumerate import scalar, schedules_tried
from planner.shape import BoolArray, FloatArray, IntArray, Number, Shape, distinct
from planner.specs.model import LayerKind
from planner.specs.training import Recompute, SearchLimits

Modules = tuple[str, ...]

MAX_SETS = 8
"""Most sets that are tried; if there are more, those that lie most evenly between saving nothing and all are tried."""
SAMPLES = (0.0, 0.5, 1.0)
"""Kernels on which sets are compared: those that keep the least, the median and the most bytes of a micro-batch."""
TINY = 1e-9
"""Largest relative difference of two sums that count as equal."""
NEGLIGIBLE = 1e-3
"""Share of a layer's kept bytes below which a module is not worth recomputing."""


def useful_sets(pricing: Pricing, table: CostTable) -> tuple[Modules, ...]:
    """The sets of modules that the search tries, in the trainer's order of modules; the pricing's own set comes first.

    Here the seconds and bytes of a set are taken as the sums over its modules. That decides only which sets are tried,
    not what they cost.
    """
    own = pricing.selective_modules
    if len(pricing.runtime.recomputable_modules) < 2:
        return (own,)
    table = table.take(_samples(pricing, table))
    saved, seconds = [], []
    modules = []
    for module in pricing.runtime.recomputable_modules:
        alone = pricing.recomputing((module,)).selective_table(table)
        saved_bytes, again_s = _changes(pricing, alone, "selective")
        if (saved_bytes > NEGLIGIBLE * _kept_bytes(pricing, table)).any():
            modules.append(module)
            saved.append(saved_bytes)
            seconds.append(again_s)
    sets = [chosen for size in range(1, len(modules) + 1) for chosen in combinations(range(len(modules)), size)]
    if not sets:
        return (own,)
    member = np.array([[index in chosen for index in range(len(modules))] for chosen in sets], dtype=float)
    saved_by_all, again_by_all_s = _changes(pricing, table, "full")
    useful = _undominated(
        np.vstack([member @ np.array(saved), saved_by_all]), np.vstack([member @ np.array(seconds), again_by_all_s])
    )
    names = [tuple(modules[index] for index in sets[number]) for number in useful if number < len(sets)]
    return (own, *(chosen for chosen in _spread(names) if set(chosen) != set(own)))


def _samples(pricing: Pricing, table: CostTable) -> IntArray:
    """Rows of the table to compare sets on."""
    ranked = np.argsort(_kept_bytes(pricing, table), kind="stable")
    return np.array(sorted({int(ranked[round(share * (len(ranked) - 1))]) for share in SAMPLES}))


def _kept_bytes(pricing: Pricing, table: CostTable) -> FloatArray:
    """Bytes of a micro-batch that all layers keep without recomputing."""
    return _over_layers(pricing, table, "none", "live_bytes")


def _changes(pricing: Pricing, table: CostTable, mode: Recompute) -> tuple[FloatArray, FloatArray]:
    """Bytes that all layers save, and seconds that they take longer, in a recompute mode of the table."""
    saved = _over_layers(pricing, table, "none", "live_bytes") - _over_layers(pricing, table, mode, "live_bytes")
    again = _over_layers(pricing, table, mode, "total_s") - _over_layers(pricing, table, "none", "total_s")
    return saved, again


def _over_layers(pricing: Pricing, table: CostTable, mode: Recompute, quantity: str) -> FloatArray:
    parts = [(table.layers[kind, mode], count) for kind, count in pricing.kind_counts.items()]
    return np.atleast_1d(np.asarray(sum(count * getattr(part, quantity) for part, count in parts), dtype=float))


def _undominated(saved: FloatArray, seconds: FloatArray) -> list[int]:
    """Rows (sets) that no other row beats in both bytes and seconds, in at least one column (kernel)."""
    useful = []
    for row in range(len(saved)):
        no_worse = (saved >= saved[row]) & (seconds <= seconds[row])
        better = (saved > saved[row] * (1 + TINY)) | (seconds < seconds[row] * (1 - TINY))
        earlier = np.arange(len(saved))[:, None] < row  # of equal sets the smallest stays
        if not (no_worse & (better | earlier)).any(axis=0).all():
            useful.append(row)
    return sorted(useful, key=lambda row: float(saved[row].sum()))


def _spread(sets: Sequence[Modules]) -> list[Modules]:
    """At most `MAX_SETS` of the sets, chosen evenly over their order."""
    if len(sets) <= MAX_SETS:
        return list(sets)
    return [sets[round(index)] for index in np.linspace(0, len(sets) - 1, MAX_SETS)]


@record(slots=False)
class ModuleSets:
    """The sets of modules that are tried, each with the prices of all kernels."""

    pricings: dict[Modules, Pricing]
    tables: dict[Modules, CostTable]

    @classmethod
    def of(cls, pricing: Pricing, table: CostTable, sets: Sequence[Modules]) -> ModuleSets:
        """Price the sets; `table` has the kernels in all modes, the selective one for the pricing's own set."""
        pricings = {modules: pricing.recomputing(modules) for modules in sets}
        return cls(pricings, {modules: priced_as.selective_table(table) for modules, priced_as in pricings.items()})

    @cached_property
    def together(self) -> CostTable:
        """A table for one lower bound of all sets: a mixture of its plain and full layers is no dearer than any set.

        A layer in its full mode keeps the least bytes of any set, and each byte saved costs the fewest seconds that
        any set takes for it. So the layers of a set cost no less than some mixture of plain layers with these. A layer
        in its selective mode has the longest backward of any set, and hides the most of an exchange.
        """
        tables = list(self.tables.values())
        layers, mtp, mtp_recomputed = dict(tables[0].layers), tables[0].mtp, tables[0].mtp_recomputed
        for kind in dict.fromkeys(kind for kind, _ in layers):
            plain, sets = layers[kind, "none"], [table.layers[kind, "selective"] for table in tables]
            layers[kind, "full"], layers[kind, "selective"] = _cheapest_mixture(plain, sets), _slowest(plain, sets)
        if mtp is not None and mtp_recomputed:
            sets = [table.mtp_recomputed["selective"] for table in tables]
            mtp_recomputed = {"full": _cheapest_mixture(mtp, sets), "selective": _slowest(mtp, sets)}
        return replace(tables[0], layers=layers, mtp_recomputed=mtp_recomputed)


def _cheapest_mixture(plain: PartCost, sets: Sequence[PartCost]) -> PartCost:
    """A part that keeps the least bytes of any of `sets`, at the fewest seconds per byte saved of any of them."""
    saved = np.array([np.asarray(plain.live_bytes - part.live_bytes, dtype=float) for part in sets])
    again = np.array([np.asarray(part.total_s - plain.total_s, dtype=float) for part in sets])
    s_per_byte = np.where(saved > 0, np.maximum(again, 0.0) / np.where(saved > 0, saved, 1.0), np.inf).min(axis=0)
    most = np.maximum(saved.max(axis=0), 0.0)
    return replace(
        plain,
        input_grad_s=plain.input_grad_s + np.where(np.isfinite(s_per_byte), s_per_byte, 0.0) * most,
        live_bytes=plain.live_bytes - most,
    )


def _slowest(plain: PartCost, sets: Sequence[PartCost]) -> PartCost:
    """A part whose backward is the longest of any of `sets`, and so hides the most of an exchange."""
    longest_s = np.max([np.asarray(part.backward_total_s, dtype=float) for part in sets], axis=0)
    return replace(plain, input_grad_s=plain.input_grad_s + longest_s - plain.backward_total_s)


_PRICES = (
    "forward_total_s", "input_grad_total_s", "weight_grad_s", "reduce_s", "gather_s", "optimizer_s", "live_bytes",
    "transient_bytes", "weights_bytes", "gradients_bytes", "optimizer_bytes",
)  # fmt: skip
"""All that a step and its memory are made of."""
_COUNTED = (
    "parameters", "expert_parameters", "wide_parameters", "frozen_parameters", "frozen_expert_parameters",
    "frozen_wide_parameters",
)  # fmt: skip
"""Fields of a part from which the bytes of its weights, gradients and optimizer are counted."""
_STATES = ("state_bytes", "expert_state_bytes", "state_update_s", "expert_state_update_s")
"""Fields that are counted where the optimizer is not AdamW."""
_OF_REFERENCE = ("reference_parameters", "reference_expert_parameters", "reference_wide_parameters")
"""Fields that are counted where forwards run without a gradient."""


PartName = LayerKind | Literal["embedding", "head", "mtp", "all"]
"""A part of the model, or all of it together."""


@record(slots=False)
class PricedShapes:
    """Shapes (arrays) with the prices of their kernels, looked up once per distinct (tp, cp, ep, etp, micro-batch)."""

    pricing: Pricing
    shape: Shape
    table: CostTable
    """Prices per distinct kernel; its memory and data-parallel exchanges do not belong to these shapes."""
    kernel: IntArray
    """Row of the table for each shape."""
    folded: BoolArray
    """True for a shape whose last virtual stage is on the first rank, with the head beside the embedding."""
    limits: SearchLimits
    """The limits of the search, of whose schedules only those are named that run at these prices."""
    module_sets: ModuleSets | None = None
    """The sets of modules that selective recompute may mean; None if it means the pricing's own set."""
    beaten: BoolArray | None = None
    """True for a shape that another recipe beats in every price, and whose prices are not kept; None if none is."""
    known: dict[tuple[str, PartName], tuple[FloatArray, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Results of `once`."""

    def once(self, what: str, name: PartName, work_out: Callable[[], Sequence[Number]]) -> tuple[FloatArray, ...]:
        """Numbers of a part for every shape that no set of modules, mode, schedule or vpp changes, worked out once."""
        if (what, name) not in self.known:
            self.known[what, name] = tuple(np.broadcast_to(each, self.kernel.shape) for each in work_out())
        return self.known[what, name]

    def with_each_set(self, rows: IntArray) -> PricedShapes:
        """The shapes at `rows` once for each set of modules, priced so that selective recompute means that set."""
        assert self.module_sets is not None
        used, kernel = np.unique(self.kernel[rows], return_inverse=True)
        tables = list(self.module_sets.tables.values())
        table = tables[0].take(np.tile(used, len(tables)))
        layers = {
            key: part.stacked([each.layers[key] for each in tables], used) if key[1] == "selective" else part
            for key, part in table.layers.items()
        }
        mtp = {
            mode: part.stacked([each.mtp_recomputed[mode] for each in tables], used) if mode == "selective" else part
            for mode, part in table.mtp_recomputed.items()
        }
        offset = np.repeat(np.arange(len(tables)) * len(used), len(rows))
        some = self.take(np.tile(rows, len(tables)))
        table = replace(table, layers=layers, mtp_recomputed=mtp)
        return replace(some, table=table, kernel=np.tile(kernel, len(tables)) + offset)

    def with_any_modules(self) -> PricedShapes:
        """The same shapes, priced so that a mixture of plain and full layers is no dearer than any set of modules.

        `ModuleSets.together` says how.
        """
        assert self.module_sets is not None
        return replace(self, table=self.module_sets.together)

    @property
    def counts(self) -> IntArray:
        """Number of the model's layers of each kind."""
        return np.array(list(self.pricing.kind_counts.values()))

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules that may run."""
        return schedules_tried(self.limits, self.pricing.runtime)

    @property
    def is_beaten(self) -> bool:
        """True if another recipe beats every shape."""
        return self.beaten is not None and bool(self.beaten.all())

    @property
    def unbeaten(self) -> PricedShapes:
        """The shapes that no other recipe beats."""
        return self if self.beaten is None else replace(self.take(np.flatnonzero(~self.beaten)), beaten=None)

    def scattered(self, values: NDArray[Any], beaten: float) -> NDArray[Any]:
        """One of the values for each of `unbeaten` shapes, and `beaten` for all others."""
        if self.beaten is None:
            return values
        every = np.full(len(self.kernel), beaten, dtype=values.dtype)
        every[~self.beaten] = values
        return every

    def ranks_exist(self, num_ranks: int) -> BoolArray:
        """True for the columns that are ranks of each shape."""
        return np.arange(num_ranks)[None, :] < np.asarray(self.shape.pp)[:, None]

    def part(self, part: PartCost, quantity: str) -> FloatArray:
        """A quantity of a part for every shape; in a folded pipeline the head is priced beside its embedding."""
        if part is self.table.head:
            beside = self._column(getattr(self.table.head_beside_embedding, quantity))
            return np.where(self.folded, beside, self._column(getattr(part, quantity)))
        return self._column(getattr(part, quantity))

    def _column(self, value: Number) -> FloatArray:
        column = np.asarray(value, dtype=float)
        return column[self.kernel] if column.ndim else np.full(len(self.kernel), float(column))

    def counted(self, part: PartCost) -> PartCost:
        """The parameters of a part for every shape, as a part of its own."""
        runtime = self.pricing.runtime
        names = _COUNTED if runtime.optimizer == "adamw" else (*_COUNTED, *_STATES)
        if runtime.plain_forwards:
            names = (*names, *_OF_REFERENCE)
        return PartCost(**{name: self.part(part, name) for name in names})

    def static_bytes(self, name: PartName, part: PartCost) -> FloatArray:
        """Bytes of a part's weights, gradients and optimizer under each shape's sharding."""
        runtime, dtype = self.pricing.runtime, self.pricing.training.dtype
        return self.once("static", name, lambda: (static_bytes(self.counted(part), self.shape, runtime, dtype),))[0]

    def exchanges_s(self, name: PartName, part: PartCost) -> tuple[FloatArray, ...]:
        """Seconds to reduce the gradients of a part, and to gather its weights."""
        return self.once("exchange", name, lambda: self.pricing.exchanges.part_s(self.counted(part), self.shape))

    def take(self, index: IntArray) -> PricedShapes:
        """The shapes at `index`."""
        beaten = None if self.beaten is None else self.beaten[index]
        shape, kernel, folded = self.shape.take(index), self.kernel[index], self.folded[index]
        known = {key: tuple(each[index] for each in values) for key, values in self.known.items()}
        return replace(self, shape=shape, kernel=kernel, folded=folded, beaten=beaten, known=known)

    def cost_table(self, rows: IntArray) -> CostTable:
        """The prices of the shapes at `rows`, with a row for each."""
        return self.pricing.of_shapes(self.table.take(self.kernel[rows]), self.shape.take(rows))

    def table_of(self, row: int) -> CostTable:
        """The prices of one shape, whose sizes are numbers."""
        return replace(self.cost_table(np.array([row])).take(0), shape=scalar(self.shape, row))

    @property
    def tail_s(self) -> FloatArray:
        """Seconds at the end of each shape's step."""
        hidden_s = self._column(self.table.hidden_s)
        return self.once("tail", "all", lambda: (self.pricing.tail_s(self.shape, hidden_s),))[0]

    @property
    def p2p_s(self) -> FloatArray:
        """Seconds of one transfer between stages."""
        return np.asarray(self.pricing.exchanges.p2p_s(self.shape))

    @cached_property
    def last_parts(self) -> dict[PartName, PartCost]:
        """Parts on the last virtual stage beside layers: the head, and multi-token prediction with its least bytes."""
        table = self.table
        if table.mtp is None:
            return {"head": table.head}
        parts = (table.mtp, *table.mtp_recomputed.values())
        least = {
            name: np.min([getattr(part, name) for part in parts], axis=0) for name in ("live_bytes", "transient_bytes")
        }
        return {"head": table.head, "mtp": replace(table.mtp, **least)}

    def ends_s(self, quantity: str = "total_s") -> FloatArray:
        """Seconds of a micro-batch in the embedding, the head and multi-token prediction."""
        parts = [self.table.embedding, *self.last_parts.values()]
        return np.asarray(np.sum([self.part(part, quantity) for part in parts], axis=0))

    def work_s(self, mode: Recompute, quantity: str = "total_s") -> FloatArray:
        """Seconds of one micro-batch through the whole model, forward and backward."""
        counts = self.pricing.kind_counts
        layers = [count * self.part(self.table.layers[kind, mode], quantity) for kind, count in counts.items()]
        return np.asarray(self.ends_s(quantity) + np.sum(layers, axis=0))

    def trip_s(self, mode: Recompute, splits_backward: bool) -> FloatArray:
        """Seconds of one micro-batch's way through the model and back, without weight gradients that are split off."""
        work_s = self.work_s(mode)
        return work_s - self.work_s(mode, "weight_grad_s") if splits_backward else work_s

    @property
    def chunk_layers(self) -> FloatArray:
        """The least number of layers of a virtual stage that is neither the first nor the last.

        If stages interleave, all such stages are equal. The number is 1 if they do not interleave.
        """
        layers, vpp = self.pricing.model.num_hidden_layers, self.shape.vpp
        return np.where(vpp > 1, np.ceil(layers / (self.shape.pp * vpp)), 1.0)

    def layer_s(self, mode: Recompute, quantity: str = "total_s") -> FloatArray:
        """Seconds (or another quantity) of a layer of each kind (rows) for each shape (columns)."""
        return np.array([self.part(self.table.layers[kind, mode], quantity) for kind in self.pricing.model.kinds])

    def holds_last(self, rank: IntArray) -> BoolArray:
        """True for the ranks (columns) that hold the last virtual stage."""
        return np.asarray(rank == np.where(self.folded, 0, np.asarray(self.shape.pp) - 1)[:, None])

    def rank_ends_s(self, num_ranks: int) -> FloatArray:
        """Seconds of a micro-batch that each rank (columns) spends in embedding, head and multi-token prediction."""
        rank = np.arange(num_ranks)[None, :]
        last_s = np.sum([self.part(part, "total_s") for part in self.last_parts.values()], axis=0)
        first_s = self.part(self.table.embedding, "total_s")
        return np.asarray((rank == 0) * first_s[:, None] + self.holds_last(rank) * last_s[:, None])

    def free_bytes(self, layer: PartCost, num_ranks: int) -> FloatArray:
        """Bytes that each rank (columns) has for layers like `layer`, less its other parts and the larger transient."""
        rank, last = np.arange(num_ranks)[None, :], self.last_parts
        transient = self.part(layer, "transient_bytes")
        loss = np.max([transient, *(self.part(part, "transient_bytes") for part in last.values())], axis=0) - transient
        beside = loss + sum(self.static_bytes(*part) + self.part(part[1], "live_bytes") for part in last.items())
        free = (self.pricing.usable_bytes(self.shape) - transient)[:, None]
        free = free - self.holds_last(rank) * beside[:, None]
        embedding = self.static_bytes("embedding", self.table.embedding)[:, None]
        return np.asarray(np.maximum(free - (rank == 0) * embedding, 0.0))


def priced_shapes(pricing: Pricing, shape: Shape, limits: SearchLimits) -> PricedShapes:
    """Price every distinct kernel of `shape` once.

    Without a pipeline, a micro-batch's seconds also depend on how ZeRO-2 and ZeRO-3 shard (`Pricing._plain`).
    """
    axes = ("tp", "cp", "ep", "etp", "micro_batch_size")
    zero = shape.zero_stage
    sharded, group = (shape.pp == 1) & (zero >= 2), shape.shard_size
    if pricing.runtime.fused_grad_accumulation:
        # products add to unsharded gradients: it matters only whether weights are copied out of a gathered buffer
        sharded, group = sharded & (zero == 3) & (group > 1), np.full_like(group, 2)
    sharding = [np.where(sharded, zero, 1), np.where(sharded, group, 1)]
    columns = np.stack([*(getattr(shape, axis) for axis in axes), *sharding])
    base = columns.max(axis=1, initial=0) + 1
    keys = np.ravel_multi_index(tuple(columns), tuple(base))
    _, first, kernel = np.unique(keys, return_index=True, return_inverse=True)
    few = shape.take(first)
    kernels = Shape(
        tp=few.tp, cp=few.cp, ep=few.ep, etp=few.etp, micro_batch_size=few.micro_batch_size,
        seq_length=few.seq_length, sequence_parallel=few.sequence_parallel, dp=few.ep * few.etp,
        zero_stage=sharding[0][first], shard_size=sharding[1][first],
    )  # fmt: skip
    table = pricing.table(kernels)
    return PricedShapes(pricing, shape, table, kernel.astype(np.int64), np.asarray(shape.pp) == 1, limits)


def with_module_sets(shapes: PricedShapes) -> PricedShapes:
    """The same shapes, with the prices of every useful set of modules to recompute if there are several."""
    sets = useful_sets(shapes.pricing, shapes.table)
    module_sets = ModuleSets.of(shapes.pricing, shapes.table, sets) if len(sets) > 1 else None
    return replace(shapes, module_sets=module_sets)


def without_beaten(priced: Sequence[PricedShapes], stricter: Sequence[frozenset[str]]) -> list[PricedShapes]:
    """The same shapes under several recipes, each without the kernels on which another recipe is no dearer.

    `stricter` has the switches of each recipe that restrict its layouts. A recipe is compared with those that have
    fewer of them, so that the other one may run every layout of its own.
    """
    kept = []
    for shapes, switches in zip(priced, stricter, strict=True):
        others = [other for other, fewer in zip(priced, stricter, strict=True) if fewer < switches]
        beaten = np.zeros(np.shape(shapes.table.shape.tp), dtype=bool)
        for other in others:
            beaten |= _is_no_dearer(other, shapes)
        kept.append(without(shapes, beaten[shapes.kernel]))
    return kept


def without(shapes: PricedShapes, lost: BoolArray) -> PricedShapes:
    """The shapes with those marked as beaten that are lost, and prices of the kernels of the others alone."""
    if not lost.any():
        return shapes
    return with_used_kernels(replace(shapes, beaten=lost if shapes.beaten is None else lost | shapes.beaten))


def with_used_kernels(shapes: PricedShapes) -> PricedShapes:
    """The shapes with prices of the kernels alone that a shape which is not beaten has; all stay if all are beaten."""
    used = np.zeros(np.shape(shapes.table.shape.tp), dtype=bool)
    used[shapes.kernel if shapes.beaten is None else shapes.kernel[~shapes.beaten]] = True
    if used.all() or not used.any():
        return shapes
    place = np.maximum(np.cumsum(used) - 1, 0)
    return replace(shapes, table=shapes.table.take(np.flatnonzero(used)), kernel=place[shapes.kernel])


def _is_no_dearer(shapes: PricedShapes, others: PricedShapes) -> BoolArray:
    """True for each row of the table of which no part takes longer, or more bytes, than in the other table.

    Nor may it have more seconds of exchanges that hide, of which the ends of a step show some.
    """
    table, other = shapes.table, others.table
    no_dearer: BoolArray = np.ones(np.shape(table.shape.tp), dtype=bool)
    pairs = [(part, other.layers[key]) for key, part in table.layers.items()]
    pairs += [(table.embedding, other.embedding), (table.head, other.head)]
    if table.mtp is not None and other.mtp is not None:
        pairs.append((table.mtp, other.mtp))
    for part, against in pairs:
        for quantity in _PRICES:
            no_dearer = no_dearer & (getattr(part, quantity) <= getattr(against, quantity) * (1 + TINY))
    has_room: BoolArray = np.asarray(table.usable_bytes >= other.usable_bytes * (1 - TINY))
    has_less: BoolArray = np.asarray(table.hidden_s <= other.hidden_s * (1 + TINY))
    return no_dearer & has_room & has_less


def room_layers(shapes: PricedShapes, kind: LayerKind) -> FloatArray:
    """Most layers of `kind` that all ranks of each shape can hold together, recomputed as cheaply in bytes as can be.

    Rank r holds at least min(M, pp − r) micro-batches in flight, or one if any schedule is frugal. If one of them may
    fold the pipeline, the rank of the head is not known, and no rank is charged for it.
    """
    schedules = shapes.schedules
    frugal = any(SCHEDULES[name].frugal for name in schedules)
    folds = any(placement(name, 2, 2)[-1] == 0 for name in schedules if SCHEDULES[name].min_vpp == 2)
    shape, table = shapes.shape, shapes.table
    parts = [table.layers[kind, mode] for mode in ("none", "selective", "full")]
    static = shapes.static_bytes(kind, parts[0])
    live = np.min([shapes.part(part, "live_bytes") for part in parts], axis=0)
    transient = np.min([shapes.part(part, "transient_bytes") for part in parts], axis=0)
    usable = shapes.pricing.usable_bytes(shape) - transient
    ends = shapes.static_bytes("embedding", table.embedding), (not folds) * shapes.static_bytes("head", table.head)
    room = np.zeros(len(shapes.kernel))
    pps = np.asarray(shape.pp)
    for pp in distinct(pps):
        rows = np.flatnonzero(pps == pp)
        in_flight = np.minimum(np.asarray(shape.num_microbatches)[rows, None], pp - np.arange(pp)[None, :])
        in_flight = np.ones_like(in_flight) if frugal else in_flight
        free = np.repeat(usable[rows, None], pp, axis=1)
        free[:, 0] -= ends[0][rows]
        free[:, -1] -= ends[1][rows]
        per_layer = relaxed_peak_bytes(static[rows, None], in_flight * live[rows, None], 0.0)
        room[rows] = np.floor(np.maximum(free, 0.0) / per_layer).sum(axis=1)
    return room


def fits(shapes: PricedShapes) -> BoolArray:
    """True for a shape whose ranks together have memory for the layers of each kind, which every split needs.

    False where another recipe is better.
    """
    counts, left = shapes.pricing.kind_counts, shapes.unbeaten
    room = [room_layers(left, kind) >= number for kind, number in counts.items()]
    return np.asarray(shapes.scattered(np.all(room, axis=0), False))


def least_sum(values: FloatArray, counts: IntArray, number: FloatArray) -> FloatArray:
    """The least sum of `number` items, if there are counts[k] items of the value values[k]."""
    if len(counts) == 1:
        return np.asarray(values[0] * np.clip(number, 0, counts[0]))
    order = np.argsort(values, axis=0)
    values, ordered = np.take_along_axis(values, order, axis=0), counts[order]
    taken = np.clip(number - (np.cumsum(ordered, axis=0) - ordered), 0, ordered)
    return np.asarray((values * taken).sum(axis=0))
