"""The numbers that the integer program of one shape is built from; a `Solution` becomes a `Split`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from planner.layout.candidate import Candidate, Split, even_counts, held_parts
from planner.layout.seconds import each_time_overlap_fraction, reduce_overlap_fraction, sharded_each_time
from planner.physics.cost import CostTable, PartCost, sum_parts
from planner.physics.memory import sent_bytes
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import fixed_bytes
from planner.record import record
from planner.schedule.orders import (
    SCHEDULES,
    Bound,
    chunks_in_flight,
    in_flight_microbatches,
    lead_passes,
    passes_behind,
    placement,
)
from planner.shape import FloatArray, IntArray, Number
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.specs.units import GIB

PASSES = ("forward_total_s", "backward_total_s")
"""The two passes of a micro-batch through a stage, as `PartCost` names their seconds, exchanges included."""
_SLOWED = frozenset({*PASSES, "input_grad_total_s", "total_s", "optimizer_s"})
"""Quantities in seconds that are longer on a slow rank."""
FULL: Recompute = "full"

Whole = Literal["none", "all", "one_count", "per_stage", "any_modules"]
"""The number of layers that are recomputed whole: none, all, one number for every virtual stage, or a number per rank.

`any_modules` stands for any set of modules of a layer instead of whole layers.
"""

Runs = Sequence[tuple[LayerKind, int]]
"""The model's layers as maximal runs of equal layers: kind and number of layers of each run."""


@record(kw_only=True)
class Node:
    """One shape whose layers are to be split: schedule, prices and limits, as the rows of the program need them.

    Where splits are bounded (`search/chain.py`) it may be several shapes with one pipeline, its prices arrays.
    """

    runs: Runs
    layers: dict[tuple[LayerKind, Recompute], PartCost]
    """Costs of one layer by its kind and recompute mode."""
    embedding: PartCost
    head: PartCost
    """Costs of everything the last virtual stage holds beside layers."""
    pp: int
    vpp: int
    num_microbatches: int
    base: Recompute
    """Recompute mode of layers that are not recomputed whole."""
    whole: Whole
    in_flight: Sequence[float]
    """Micro-batches that each rank holds at its peak; a micro-batch in all of the rank's chunks counts as 1."""
    chunk_in_flight: Sequence[Sequence[float]] = ()
    """Micro-batches of each chunk that each rank holds at its peak; empty if it holds as many of every chunk."""
    usable_bytes: Number
    sent_bytes: Number = 0.0
    """Bytes that each virtual stage but the last keeps of a micro-batch because it sent them."""
    p2p_s: Number
    bound: Bound
    """The lower bounds that hold for the schedule."""
    placement: Sequence[int]
    """Rank of each virtual stage."""
    blocking_p2p: bool = False
    """True if a rank waits for its transfers."""
    cutoff_s: float = math.inf
    """Seconds of a step; slower solutions are not wanted."""
    gap_fraction: float = 1e-4
    """The relative gap to the optimum at which the solver may stop."""
    empty_ends: bool = False
    """True if the first and the last virtual stage may hold no decoder layer."""
    sharded_each_time: int = 0
    """The ZeRO stage that exchanges for every micro-batch, or 0 (`outside_pipeline.sharded_each_time`).

    With 2 gradients are reduced for every micro-batch; with 3 weights are also gathered twice.
    """
    passes_behind: float = 1.0
    """Micro-batches of a rank that hide what it exchanges (`orders.passes_behind`)."""
    lead_passes: float = 1.0
    """Micro-batches whose backward a rank has left when the rank behind it is done (`orders.lead_passes`)."""
    contention_fraction: float = 0.0
    fsdp_overlap_fraction: float = 0.0
    gradient_overlap_fraction: float = 0.0
    parameter_overlap_fraction: float = 0.0
    short_bytes: Sequence[float] = ()
    """Bytes that each rank is to leave free since a replay showed that a split does not fit; empty for none."""
    of_mean_layers: bool = False
    """True if every layer is priced as the mean of several kinds: the split is good, but its bound proves nothing."""
    rank_factors: Sequence[float] = ()
    """The factor by which each rank is slower than the costs say; empty if no rank is slower."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return sum(length for _, length in self.runs)

    @property
    def num_stages(self) -> int:
        """Virtual stages of the pipeline."""
        return self.pp * self.vpp

    @property
    def kinds(self) -> list[LayerKind]:
        """Kinds of layers, in the order in which the model first has them."""
        return list(dict.fromkeys(kind for kind, _ in self.runs))

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """Recompute modes that a layer may be in."""
        only: dict[Whole, tuple[Recompute, ...]] = {"none": (self.base,), "all": (FULL,)}
        return only.get(self.whole, (self.base, FULL))

    def in_flight_of(self, rank: int) -> Sequence[float]:
        """Micro-batches of each of the rank's chunks that it holds at its peak."""
        return self.chunk_in_flight[rank] if self.chunk_in_flight else [self.in_flight[rank]] * self.vpp

    def slowness(self, rank: int, quantity: str) -> float:
        """The factor on a rank's quantity for the slowness of the rank; 1 for all quantities but those in `_SLOWED`."""
        return self.rank_factors[rank] if self.rank_factors and quantity in _SLOWED else 1.0


@lru_cache(maxsize=32)
def layers_before(runs: Runs) -> IntArray:
    """The number of layers of each kind (columns) among the model's first 0, 1 … L layers (rows)."""
    kinds = list(dict.fromkeys(kind for kind, _ in runs))
    layers = np.repeat([kinds.index(kind) for kind, _ in runs], [length for _, length in runs])
    return np.concatenate([np.zeros((1, len(kinds)), int), np.cumsum(layers[:, None] == np.arange(len(kinds)), axis=0)])


@record
class Chain:
    """Sums of a node's layers: a stage holds the layers first … last − 1, and recomputes the first so many whole."""

    node: Node
    plain: IntArray
    """Layers of each kind (last axis) that are in the node's first recompute mode, on each stage."""
    whole: IntArray | None
    """Layers that are recomputed whole beside those; None where there are none."""

    @classmethod
    def of(cls, node: Node, first: IntArray, last: IntArray, recomputed: IntArray | int = 0) -> Chain:
        before = layers_before(tuple(node.runs))
        if node.whole in ("none", "all") or not np.any(recomputed):
            return cls(node, before[last] - before[first], None)
        until = np.minimum(first + recomputed, last)
        return cls(node, before[last] - before[until], before[until] - before[first])

    def total(self, quantity: str) -> FloatArray:
        """A quantity of each stage's layers, behind an axis of shapes where the node is of several."""
        total = np.tensordot(of_kinds(self.node, quantity, self.node.modes[0]), self.plain, (-1, -1))
        if self.whole is None:
            return total
        return total + np.tensordot(of_kinds(self.node, quantity, FULL), self.whole, (-1, -1))

    def transient_bytes(self) -> FloatArray:
        """The largest transient bytes of any kind of layer on each stage, in whichever mode needs the least."""
        least = np.min([of_kinds(self.node, "transient_bytes", mode) for mode in self.node.modes], axis=0)
        held = self.plain if self.whole is None else self.plain + self.whole
        largest = np.zeros((*least.shape[:-1], *held.shape[:-1]))
        for kind in range(least.shape[-1]):
            of_kind = least[..., kind].reshape(*least.shape[:-1], *[1] * (held.ndim - 1))
            largest = np.maximum(largest, np.where(held[..., kind] > 0, of_kind, 0.0))
        return largest


def beside_layers(node: Node) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Static, kept and transient bytes of each rank (last axis) beside its layers: embedding, head, what it sent."""
    rank = np.arange(node.pp)
    first, last = rank == 0, rank == node.placement[-1]
    held = np.array(node.chunk_in_flight or [[each] * node.vpp for each in node.in_flight], dtype=float)
    static, live = (
        [column(getattr(part, name)) for part in (node.embedding, node.head)] for name in ("static_bytes", "live_bytes")
    )
    short = np.array(node.short_bytes or [0.0] * node.pp)
    sent = (held.sum(axis=1) - last * held[:, -1]) * column(node.sent_bytes)
    return (
        short + first * static[0] + last * static[1],
        sent + first * held[:, 0] * live[0] + last * live[1],
        last * column(node.head.transient_bytes),
    )


def column(value: Number) -> FloatArray:
    """A number, or one of each shape, that broadcasts against splits."""
    return np.asarray(value, dtype=float)[..., None]


def of_kinds(node: Node, quantity: str, mode: Recompute) -> FloatArray:
    """A quantity of a layer of each kind (last axis) in one recompute mode."""
    parts = [node.layers[kind, mode] for kind in node.kinds]
    return np.stack(np.broadcast_arrays(*(getattr(part, quantity) for part in parts)), axis=-1)


@record
class Solution:
    """The split as the solver chose it."""

    counts: tuple[int, ...]
    """Decoder layers of each virtual stage, in model order."""
    recomputed: tuple[tuple[int, ...], ...]
    """Layers of each rank and kind that are recomputed whole (one_count: of each virtual stage)."""
    objective_s: float
    """Seconds of the split by the program's rows."""
    bound_s: float
    """Confirmed lower bound of the objective; 0 if there is none."""
    free_bytes: tuple[float, ...]
    """Bytes that the memory row of each rank leaves free."""


MAX_PLACES = 4
"""Most places of a pattern whose layers are counted; each place is an integer variable of every virtual stage."""


class Recurring(NamedTuple):
    """A pattern of layers that repeats."""

    period: int
    places: dict[LayerKind, list[int]]
    """Places in the pattern of the layers of each kind; the commonest kind is left out."""


def recurring(runs: Runs) -> Recurring | None:
    """The pattern that repeats; None if no kind comes back, or if too many places would have to be counted."""
    layers = [kind for kind, length in runs for _ in range(length)]
    kinds = list(dict.fromkeys(layers))
    period = next((p for p in range(1, len(layers)) if layers[p:] == layers[:-p]), len(layers))
    places = {kind: [place for place in range(period) if layers[place] == kind] for kind in kinds}
    del places[max(kinds, key=lambda kind: len(places[kind]))]
    if len(runs) == len(kinds) or sum(map(len, places.values())) > MAX_PLACES:
        return None
    return Recurring(period, places)


MAX_RUNS_INTERLEAVED = 4
"""Most runs of layers that are counted exactly on interleaved chunks.

If there are more, or if all runs but the last do not fit into the ranks' first chunks, chunks are balanced with layers
of the mean kind. Layers that repeat in a pattern are counted exactly.
"""


@record
class RecomputeChoice:
    """One way to recompute that a trainer can be told: a mode for most layers, and how many are recomputed whole."""

    base: Recompute
    whole: Whole

    @property
    def mode(self) -> Recompute:
        """The recompute mode of most layers: `full` if all layers are recomputed whole, otherwise `base`."""
        return "full" if self.whole == "all" else self.base

    def __str__(self) -> str:
        return self.mode


def node_of(
    pricing: Pricing,
    table: CostTable,
    choice: RecomputeChoice,
    schedule: str,
    short_bytes: Sequence[float] = (),
    cutoff_s: float = math.inf,
    rank_factors: Sequence[float] = (),
    exact: bool = False,
) -> Node:
    """The numbers of the integer program for one shape, schedule and way to recompute.

    If `exact`, layers of many kinds stay what they are, as all do but a program with interleaved stages.
    """
    shape, runtime, model = table.shape, pricing.runtime, pricing.model
    pp, vpp, microbatches = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    ranks = placement(schedule, pp, vpp)
    runs: Runs = model.runs
    layers = table.layers
    # the first chunks of all ranks hold at least this many layers, however few the first one holds
    least_first_row = (pp - 1) * -(-model.num_hidden_layers // (pp * vpp))
    too_many_runs = len(runs) > MAX_RUNS_INTERLEAVED or sum(length for _, length in runs[:-1]) > least_first_row
    of_mean_layers = not exact and vpp > 1 and too_many_runs and recurring(runs) is None
    if of_mean_layers:
        runs, layers = _mean_kind(pricing, table)
    return Node(
        runs=runs, layers=layers, embedding=table.embedding, head=_last_parts(pricing, table, choice, ranks),
        pp=pp, vpp=vpp, num_microbatches=microbatches, base=choice.base, whole=choice.whole, placement=ranks,
        bound=SCHEDULES[schedule].bound, cutoff_s=cutoff_s, short_bytes=short_bytes, rank_factors=rank_factors,
        of_mean_layers=of_mean_layers,
        in_flight=in_flight_microbatches(schedule, pp, vpp, microbatches),
        chunk_in_flight=chunks_in_flight(schedule, pp, vpp, microbatches) if vpp > 1 else (),
        usable_bytes=table.usable_bytes - fixed_bytes(pricing, table),
        sent_bytes=sent_bytes(model, shape, runtime),
        p2p_s=table.p2p_s,
        blocking_p2p=not (runtime.interleaved_p2p_overlap if vpp > 1 else runtime.p2p_overlap),
        empty_ends=runtime.head_only_stage,
        sharded_each_time=sharded_each_time(int(shape.zero_stage), pp),
        contention_fraction=runtime.contention_fraction,
        fsdp_overlap_fraction=each_time_overlap_fraction(runtime, shape),
        passes_behind=passes_behind(schedule, pp, vpp),
        lead_passes=lead_passes(schedule, vpp),
        gradient_overlap_fraction=float(reduce_overlap_fraction(runtime, shape)),
        parameter_overlap_fraction=runtime.parameter_overlap_fraction,
    )  # fmt: skip


def _last_parts(pricing: Pricing, table: CostTable, choice: RecomputeChoice, ranks: Sequence[int]) -> PartCost:
    """Costs of all parts that the last virtual stage holds beside layers and embedding."""
    num_stages, num_kinds = len(ranks), len(pricing.model.kinds)
    recomputed = ((1,) * num_kinds,) * num_stages if choice.whole == "all" else ()
    any_layers = Split((num_kinds,) * num_stages, choice.base, recomputed)
    parts = held_parts(table, any_layers, num_stages - 1, folded=ranks[0] == ranks[-1])
    return sum_parts(part for name, part in parts if name != "embedding")


def _mean_kind(pricing: Pricing, table: CostTable) -> tuple[Runs, dict[tuple[LayerKind, Recompute], PartCost]]:
    """One run of layers of one kind, whose costs are the mean over the model's layers."""
    model = pricing.model
    kind, num_layers = model.layers[0], model.num_hidden_layers
    shares = {kind: count / num_layers for kind, count in pricing.kind_counts.items()}
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    layers = {}
    for mode in modes:
        parts = [(table.layers[k, mode], share) for k, share in shares.items() if (k, mode) in table.layers]
        mean = {f.name: sum(getattr(part, f.name) * share for part, share in parts) for f in fields(PartCost)}
        layers[kind, mode] = PartCost(**mean)
    return ((kind, num_layers),), layers


def split_of(pricing: Pricing, node: Node, solution: Solution) -> Split:
    """The solver's counts as a split over virtual stages."""
    kinds, without = pricing.model.kinds, Split(solution.counts, node.base)
    if not any(map(any, solution.recomputed)):
        return without
    recomputed = []
    for stage, (first, last) in enumerate(without.chunks):
        layers = pricing.model.layers[first:last]
        on_rank = solution.recomputed[node.placement[stage]]
        if node.whole == "all":
            recomputed.append(tuple(layers.count(kind) for kind in kinds))
        elif node.whole == "one_count":
            recomputed.append(tuple(min(number, len(layers)) for number in on_rank))
        else:
            shares = [even_counts(number, node.vpp)[stage // node.pp] for number in on_rank]
            if len(shares) < len(kinds):  # of the mean kind: the first so many layers, of whatever kind
                shares = [layers[: shares[0]].count(kind) for kind in kinds]
            on_stage = (min(number, layers.count(kind)) for number, kind in zip(shares, kinds, strict=True))
            recomputed.append(tuple(on_stage))
    return Split(solution.counts, node.base, tuple(recomputed))


LEAST_SHORT_BYTES = 0.25 * GIB
"""Bytes left free beyond those that the last program saw left, so that few programs are enough."""
MAX_TRIES = 4
"""Most splits of a node that are looked for; each leaves more bytes free on the ranks that were too full."""


def shorter(short_bytes: Sequence[float], excess: Sequence[float], free_bytes: Sequence[float]) -> list[float]:
    """Bytes that the program must leave free on each rank.

    The last program saw `free_bytes` left on each rank, but its split exceeds the exact memory by `excess`. A rank that
    exceeds it must leave so much more free that it cannot hold the same layers again.
    """
    known = short_bytes or [0.0] * len(excess)
    return [
        short + (free + LEAST_SHORT_BYTES) * (more > 0)
        for short, more, free in zip(known, excess, free_bytes, strict=True)
    ]


def splits_tried(
    start: Candidate, choice: RecomputeChoice, solver: Callable[[Node], Solution | None], cutoff_s: float = math.inf
) -> Iterator[tuple[Solution | None, Candidate | None]]:
    """A solver's answers for a candidate's shape, each with its split, until one fits or there is none.

    Each leaves more bytes free on the ranks that the exact memory of the last showed to be too full.
    """
    short_bytes: list[float] = []
    for _ in range(MAX_TRIES):
        node = node_of(
            start.pricing, start.table, choice, start.schedule, short_bytes, cutoff_s, rank_factors=start.rank_factors
        )
        solution = solver(node)
        if solution is None or not solution.counts:
            yield solution, None
            return
        split = split_of(start.pricing, node, solution)
        candidate = start.with_split(replace(split, mtp_stage=start.split.mtp_stage))
        yield solution, candidate
        if candidate.fits:
            return
        short_bytes = shorter(short_bytes, candidate.excess_bytes, solution.free_bytes)
