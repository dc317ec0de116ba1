"""Closed-form screens over thousands of shapes at once: can it fit at all, and how fast can it be at best.

Both are relaxations of the integer program, so nothing that could win is lost: ranks take any number of layers that
their memory and time allow, recomputing as little as fits, and only together must they hold the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce

import numpy as np
import numpy.typing as npt

from planner.physics import memory
from planner.physics.communication import p2p_s
from planner.physics.cost import CostTable, PartCost, Pricing
from planner.physics.operators import BF16
from planner.physics.shape import FloatArray, Number, Shape
from planner.specs.model import LayerKind
from planner.specs.training import Recompute

NEVER_S = 1e30
"""Stands for infinity where it is multiplied by what may be zero."""

BISECTIONS = 18
"""Halvings of the step-time interval: 2⁻¹⁸ of it is far below the reported gap."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the schedules that a shape may run have in common; arrays over shapes."""

    only_plain: npt.NDArray[np.bool_]
    """1F1B without interleaving is the only one."""
    trips: npt.NDArray[np.bool_]
    """A rank's last action is a backward, so that trips to it and back count."""
    in_flight: FloatArray
    """Micro-batches that each rank (columns) holds at least."""


def least_in_flight(shape: Shape, schedules: Sequence[str]) -> FloatArray:
    """Fewest micro-batches that any of `schedules` holds on each rank: min(M, pp − r), or one where one is frugal."""
    pps = np.asarray(shape.pp)[:, None]
    rank = np.arange(int(pps.max(initial=1)))[None, :]
    held = np.minimum(np.asarray(shape.num_microbatches)[:, None], pps - rank)
    return np.asarray(np.maximum(1.0 if FRUGAL.intersection(schedules) else held, 1.0) + 0.0 * rank)


FRUGAL = frozenset({"v-half", "v-min"})
"""Schedules that hold less than 1F1B."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Shapes (arrays) with the prices of their kernels, looked up once per distinct (tp, cp, ep, etp, micro-batch)."""

    pricing: Pricing
    shape: Shape
    table: CostTable
    """Prices per distinct kernel; memory and data-parallel exchange in it are of no use here."""
    kernel: npt.NDArray[np.int64]
    """Row of the table for each shape."""

    def part(self, part: PartCost, quantity: str) -> FloatArray:
        """A quantity of a part for every shape; the head of an unpipelined one is beside its embedding."""
        if part is self.table.head:
            beside = self.part(self.table.head_beside_embedding, quantity)
            return np.where(np.asarray(self.shape.pp) == 1, beside, self._column(getattr(part, quantity)))
        return self._column(getattr(part, quantity))

    def _column(self, value: Number) -> FloatArray:
        column = np.asarray(value, dtype=float)
        return column[self.kernel] if column.ndim else np.full(len(self.kernel), float(column))

    def static_bytes(self, part: PartCost) -> FloatArray:
        """Weights, gradients and optimizer of a part under each shape's sharding."""
        expert = self.part(part, "expert_parameters")
        dense = self.part(part, "parameters") - expert
        runtime, dtype = self.pricing.runtime, self.pricing.training.dtype
        total: FloatArray = (
            memory.weights_bytes(dense, expert, self.shape, runtime, dtype)
            + memory.gradients_bytes(dense, expert, self.shape, runtime)
            + memory.optimizer_bytes(dense, expert, self.shape, runtime)
        )
        return total

    def take(self, index: npt.NDArray[np.int64]) -> Screen:
        """The shapes at `index`."""
        return Screen(self.pricing, self.shape.take(index), self.table, self.kernel[index])

    @property
    def p2p_s(self) -> FloatArray:
        """Seconds of one transfer between stages."""
        shape = self.shape
        distance = np.asarray(shape.tp * shape.cp * shape.dp)
        num_bytes = BF16 * shape.shard_tokens * self.pricing.model.hidden_size
        return np.asarray(p2p_s(num_bytes, distance, self.pricing.cluster) * (np.asarray(shape.pp) > 1))

    @property
    def ends_s(self) -> FloatArray:
        """Seconds of a micro-batch in embedding, head and multi-token prediction."""
        parts = [self.table.embedding, self.table.head] + ([self.table.mtp] if self.table.mtp else [])
        return np.asarray(np.sum([self.part(part, "total_s") for part in parts], axis=0))

    def work_s(self, mode: Recompute) -> FloatArray:
        """Seconds of one micro-batch through the whole model, forward and backward."""
        counts = self.pricing.kind_counts
        layers = [count * self.part(self.table.layers[kind, mode], "total_s") for kind, count in counts.items()]
        return np.asarray(self.ends_s + np.sum(layers, axis=0))

    def trip_s(self, mode: Recompute, splits_backward: bool) -> FloatArray:
        """Seconds of one micro-batch's way through the model and back; weight gradients may follow where split off."""
        if not splits_backward:
            return self.work_s(mode)
        counts = self.pricing.kind_counts
        parts = [(self.table.layers[kind, mode], count) for kind, count in counts.items()]
        parts += [(part, 1) for part in (self.table.embedding, self.table.head, self.table.mtp) if part is not None]
        later = np.sum([n * self.part(part, "weight_grad_s") for part, n in parts], axis=0)
        return np.asarray(self.work_s(mode) - later)


def screen_of(pricing: Pricing, shape: Shape) -> Screen:
    """Price every distinct kernel of `shape` once."""
    axes = ("tp", "cp", "ep", "etp", "micro_batch_size")
    columns = np.stack([np.asarray(getattr(shape, axis)) for axis in axes])
    base = columns.max(axis=1, initial=0) + 1
    keys = np.ravel_multi_index(tuple(columns), tuple(base))
    _, first, kernel = np.unique(keys, return_index=True, return_inverse=True)
    few = shape.take(first)
    kernels = Shape(
        tp=few.tp, cp=few.cp, ep=few.ep, etp=few.etp, micro_batch_size=few.micro_batch_size,
        seq_length=few.seq_length, sequence_parallel=few.sequence_parallel, dp=few.ep * few.etp,
    )  # fmt: skip
    return Screen(pricing, shape, pricing.table(kernels), kernel.astype(np.int64))


def screen_of_one(pricing: Pricing, table: CostTable) -> Screen:
    """A single shape whose table is already priced."""
    shape = table.shape
    arrays = Shape(**{f.name: np.atleast_1d(np.asarray(getattr(shape, f.name))) for f in fields(shape)})
    return Screen(pricing, arrays, table, np.zeros(1, dtype=np.int64))


def coarse_bound_s(screen: Screen, splits_backward: bool = False) -> FloatArray:
    """A lower bound of the step for every shape: max(M · the busiest rank, one micro-batch's round trip).

    The busiest rank has at least work / pp, and the longest count of the quickest layer.
    """
    model, shape = screen.pricing.model, screen.shape
    work = screen.work_s("none")
    quickest = np.min([screen.part(screen.table.layers[kind, "none"], "total_s") for kind in model.kinds], axis=0)
    busiest = np.maximum(work / shape.pp, np.ceil(model.num_hidden_layers / shape.pp) * quickest)
    return np.asarray(np.maximum(shape.num_microbatches * busiest, screen.trip_s("none", splits_backward)))


def room_layers(screen: Screen, kind: LayerKind, frugal: bool = False) -> FloatArray:
    """Most layers of `kind` that all ranks of each shape can hold together, recomputed as cheaply in bytes as can be.

    Rank r holds min(M, pp − r) micro-batches in flight, the least of any schedule that this planner uses.
    """
    shape, table = screen.shape, screen.table
    parts = [table.layers[kind, mode] for mode in ("none", "selective", "full")]
    static = screen.static_bytes(parts[0])
    live = np.min([screen.part(part, "live_bytes") for part in parts], axis=0)
    transient = np.min([screen.part(part, "transient_bytes") for part in parts], axis=0)
    usable = memory.usable_bytes(shape, screen.pricing.cluster.hardware, screen.pricing.headroom_bytes) - transient
    ends = (screen.static_bytes(table.embedding), screen.static_bytes(table.head))
    room = np.zeros(len(screen.kernel))
    pps = np.asarray(shape.pp)
    for pp in np.unique(pps):
        rows = np.flatnonzero(pps == pp)
        held = np.minimum(np.asarray(shape.num_microbatches)[rows, None], pp - np.arange(pp)[None, :])
        held = np.ones_like(held) if frugal else held
        free = np.repeat(usable[rows, None], pp, axis=1)
        free[:, 0] -= ends[0][rows]
        free[:, -1] -= ends[1][rows]
        per_layer = static[rows, None] + held * live[rows, None]
        room[rows] = np.floor(np.maximum(free, 0.0) / per_layer).sum(axis=1)
    return room


def fits(screen: Screen, schedules: Sequence[str] = ()) -> npt.NDArray[np.bool_]:
    """Whether all ranks together have room for the layers of each kind: necessary for any split."""
    model, frugal = screen.pricing.model, bool(FRUGAL.intersection(schedules))
    return np.asarray(np.all([room_layers(screen, k, frugal) >= model.layers.count(k) for k in model.kinds], axis=0))


def busiest_rank_s(
    screen: Screen,
    base: Recompute,
    whole: bool,
    orders: Orders,
) -> FloatArray:
    """Least seconds of a micro-batch on the busiest rank, where ranks recompute what their memory forces them to.

    Layers not recomputed whole are in mode `base`; `whole` says whether any may be. The least time in which all ranks
    together hold the layers is found by bisection: those of each kind with the others taken as free, and all with each
    as cheap as the cheapest. Where schedules interleave it is the least T / M: rank r has T less the trip of one
    micro-batch through the ranks before it, of which each holds a layer at least. Ranks hold `in_flight` micro-batches,
    or the least of any schedule. Infinite where nothing fits.
    """
    model = screen.pricing.model
    busiest = screen.work_s(base) / np.asarray(screen.shape.pp)
    cases = [(kind, model.layers.count(kind)) for kind in model.kinds]
    for kind, count in cases:
        plain, full = screen.table.layers[kind, base], screen.table.layers[kind, "full"]
        busiest = np.maximum(busiest, _holding_bound_s(screen, plain, full, count, whole, orders))
    if len(cases) > 1:
        plain, full = (_least([screen.table.layers[kind, mode] for kind in model.kinds]) for mode in (base, FULL))
        busiest = np.maximum(busiest, _holding_bound_s(screen, plain, full, model.num_hidden_layers, whole, orders))
    return np.asarray(busiest)


FULL: Recompute = "full"


def _least(parts: Sequence[PartCost]) -> PartCost:
    """A layer that costs no more than any of `parts`, in any respect that the bounds look at."""

    def least(quantity: str) -> Number:
        return reduce(np.minimum, [np.asarray(getattr(part, quantity)) for part in parts])

    names = ("live_bytes", "transient_bytes", "parameters", "expert_parameters")
    return PartCost(forward_s=least("total_s"), **{name: least(name) for name in names})


def _holding_bound_s(
    screen: Screen,
    plain: PartCost,
    full: PartCost,
    count: int,
    whole: bool,
    orders: Orders,
) -> FloatArray:
    """The same for `count` layers that cost `plain`, or `full` where they are recomputed whole."""
    shape, table = screen.shape, screen.table
    seconds = screen.part(plain, "total_s")[:, None]
    again = np.maximum(screen.part(full, "total_s")[:, None] - seconds, 1e-12)
    static, live = screen.static_bytes(plain)[:, None], screen.part(plain, "live_bytes")[:, None]
    saved = np.maximum(live - screen.part(full, "live_bytes")[:, None], 1.0)
    pps = np.asarray(shape.pp)[:, None]
    rank = np.arange(int(pps.max(initial=1)))[None, :]
    exists = rank < pps
    held = orders.in_flight[:, : rank.shape[1]]
    usable = memory.usable_bytes(shape, screen.pricing.cluster.hardware, screen.pricing.headroom_bytes)
    free = (usable - screen.part(plain, "transient_bytes"))[:, None] - (rank == 0) * screen.static_bytes(
        table.embedding
    )[:, None]
    free = np.maximum(free - (rank == pps - 1) * screen.static_bytes(table.head)[:, None], 0.0)
    first_s, last_s = (screen.part(part, "total_s")[:, None] for part in (table.embedding, table.head))
    ends_s = (rank == 0) * first_s + (rank == pps - 1) * last_s
    quickest = np.min([screen.part(part, "total_s") for part in table.layers.values()], axis=0)[:, None]
    hop = quickest + 2 * np.broadcast_to(np.asarray(screen.p2p_s), len(screen.kernel))[:, None]
    stages_before = np.maximum(rank - (1 if screen.pricing.runtime.head_only_stage else 0), 0)
    trip_s = orders.trips[:, None] * stages_before * hop / np.asarray(shape.num_microbatches)[:, None]
    ends_s = ends_s + trip_s
    roomy = np.floor(free / (static + held * live))
    # layers = (busy + again·free/saved-bytes-in-flight) / (seconds + again·bytes per layer / saved bytes): memory binds
    rate = again / (held * saved)
    tight = np.floor(free / (static + held * (live - saved))) if whole else roomy
    low = np.zeros(len(screen.kernel))
    high = count * (seconds + again)[:, 0] + ends_s.max(axis=1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        busy = np.maximum(middle[:, None] - ends_s, 0.0)
        layers = busy / seconds
        if whole:
            layers = np.minimum(layers, np.maximum((busy + rate * free) / (seconds + rate * (static + held * live)), 0))
        layers = np.minimum(layers, tight)
        layers = np.floor(layers + 1e-9)
        enough = (layers * exists).sum(axis=1) >= count
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where((tight * exists).sum(axis=1) < count, np.inf, low)


def schedule_bound_s(screen: Screen, busiest_s: FloatArray, base: Recompute, orders: Orders) -> FloatArray:
    """From the busiest rank to the step: M · busiest, and for 1F1B the fill and drain.

    1F1B with stages no longer than `busiest`: T ≥ (M − 1 − pp) · busiest + 2 · work, from T ≥ M·t_r + Σ_{q<r} t_q +
    [2·Σ_{q>r} t_q − (pp − 1 − r)·t_r]⁺ at the busiest rank, since all stages together fall short of pp · busiest by no
    more than pp · busiest − work. It grows with `busiest` only where M > pp. For any M, with one stage per rank, a
    rank's first backward comes after the whole trip and M − 1 more follow: T ≥ work + (M − 1)·b_r, and b_r is at least
    the least share that the backward has of any part.
    """
    shape = screen.shape
    work, steps = screen.work_s(base), np.asarray(shape.num_microbatches)
    busiest_s = np.where(np.isfinite(busiest_s), busiest_s, NEVER_S)
    few = work + (steps - 1) * _backward_share(screen, base) * busiest_s
    plain = np.where(steps > np.asarray(shape.pp), (steps - 1 - shape.pp) * busiest_s + 2 * work, few)
    plain = np.where(np.asarray(shape.pp) == 1, steps * work, plain)
    trip = np.where(orders.only_plain | orders.trips, work, screen.trip_s(base, splits_backward=True))
    least = np.maximum(np.maximum(steps * busiest_s, trip), np.where(orders.only_plain, plain, 0.0))
    return np.where(busiest_s >= NEVER_S, np.inf, least)


def _backward_share(screen: Screen, base: Recompute) -> FloatArray:
    """The least share of its seconds that any layer, the embedding or the head spends in the backward."""
    table = screen.table
    parts = [table.layers[kind, base] for kind in screen.pricing.model.kinds] + [table.embedding, table.head]
    shares = [screen.part(part, "backward_total_s") / screen.part(part, "total_s") for part in parts]
    return np.asarray(np.min(shares, axis=0))
