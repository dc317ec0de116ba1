"""Splits into equal chunks, of which the first and the last may be shorter: so few that all are bounded and tried.

If stages interleave, all chunks but these two are equal, so that a node has only a handful of splits; a node without a
pipeline has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, islice, takewhile

import numpy as np

from planner.layout.candidate import Candidate, Split
from planner.layout.seconds import outside_seconds
from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import relaxed_peak_bytes
from planner.schedule.bounds import in_flight_bounds_s, trip_bounds_s
from planner.schedule.orders import SCHEDULES
from planner.search.ilp.node import Chain, Node, RecomputeChoice, beside_layers, column, node_of
from planner.shape import BoolArray, FloatArray, IntArray, Shape
from planner.specs.model import LayerKind, ModelSpec

TINY = 1e-9
"""Relative difference of sums that count as equal."""


def chunk_lengths(num_layers: int, num_stages: int, empty_ends: bool) -> Iterator[int]:
    """Lengths that equal stages may have, shortest first, if the first and the last stage may hold fewer layers.

    The first and the last hold at least one layer, or none with `empty_ends`.
    """
    least = 0 if empty_ends else 1
    lengths = count(-(-num_layers // num_stages))
    return takewhile(lambda chunk: num_stages * chunk - num_layers <= 2 * (chunk - least), lengths)


def equal_chunk_counts(num_layers: int, num_stages: int, empty_ends: bool) -> Iterator[tuple[int, ...]]:
    """Layers of each virtual stage, for every split into equal chunks whose first and last may be shorter."""
    least = 0 if empty_ends else 1
    for chunk in chunk_lengths(num_layers, num_stages, empty_ends):
        missing = num_stages * chunk - num_layers
        for at_first in range(max(0, missing - chunk + least), min(missing, chunk - least) + 1):
            yield (chunk - at_first, *[chunk] * (num_stages - 2), chunk - missing + at_first)


@cache
def fewest_of_kinds(layers: Sequence[LayerKind], ranks: Sequence[int], empty_ends: bool) -> FloatArray:
    """The fewest layers of each kind (rows, as they first come) on each rank (columns) over all legal splits.

    A split is legal as in row 3 of the integer program (`chunk_lengths`). Stage j is on rank ranks[j]. All are 0 if no
    split is legal.
    """
    stages, least = len(ranks), 0 if empty_ends else 1
    among_first = np.array([np.cumsum([False, *(layer == kind for layer in layers)]) for kind in dict.fromkeys(layers)])
    fewest = []
    for chunk in chunk_lengths(len(layers), stages, empty_ends):
        missing = stages * chunk - len(layers)
        at_first = np.arange(max(0, missing - chunk + least), min(missing, chunk - least) + 1)
        ends = np.minimum(np.arange(1, stages + 1) * chunk - at_first[:, None], len(layers))
        on_stages = np.diff(among_first[:, ends], axis=-1, prepend=0)
        on_ranks = [on_stages[:, :, np.equal(ranks, rank)].sum(axis=-1) for rank in range(max(ranks) + 1)]
        fewest.append(np.min(on_ranks, axis=-1).T)
    return np.min(fewest, axis=0) if fewest else np.zeros((len(among_first), max(ranks) + 1))


MAX_SPLITS = 256
"""Most splits of a node for all of them to be tried; most are ruled out by a bound of their own, without a replay."""


def splits_of(shape: Shape, pricing: Pricing, choice: RecomputeChoice) -> list[tuple[int, ...]] | None:
    """Layers of each virtual stage in every split over a shape's ranks and their chunks; None if they are not few."""
    pp, vpp, num_layers = int(shape.pp), int(shape.vpp), pricing.model.num_hidden_layers
    if choice.whole == "per_stage":
        return None
    if pp * vpp == 1:
        return [(num_layers,)]
    if vpp == 1:
        return None
    empty_ends = pricing.runtime.head_only_stage
    splits = list(islice(equal_chunk_counts(num_layers, pp * vpp, empty_ends), MAX_SPLITS + 1))
    return splits if len(splits) <= MAX_SPLITS else None


def least_step_s(candidate: Candidate) -> float:
    """A lower bound of the candidate's step in seconds, from each rank's work and the trips to it; without a replay."""
    splits, ranks = SCHEDULES[candidate.schedule].splits_backward, candidate.placement
    bounds_s = in_flight_bounds_s(candidate.durations, ranks, candidate.num_microbatches, splits_backward=splits)
    return float(bounds_s.max()) + sum(candidate.outside)


def promising(
    layout: Candidate, choice: RecomputeChoice, splits: list[tuple[int, ...]], cutoff_s: float
) -> tuple[float, list[tuple[float, Candidate]]]:
    """Bounds of the steps of a node's splits: the least one that is not below the cutoff, and those below it.

    The latter come with their candidates, the least first. With one number of layers for all stages that are recomputed
    whole, each split comes with each number that its memory may need.
    """
    model = layout.pricing.model
    counts, again, least_s = bounded(layout.pricing, layout.table, layout.schedule, choice, splits)
    whole = int(counts.max()) if choice.whole == "all" else 0
    order = np.argsort(least_s, kind="stable")
    few = [int(at) for at in order if least_s[at] < cutoff_s]
    others_s = float(least_s[order[len(few)]]) if len(few) < len(order) else np.inf
    tried = [
        layout.with_split(recomputing_first(tuple(counts[at].tolist()), choice, max(int(again[at]), whole), model))
        for at in few
    ]
    return others_s, list(zip(least_s[few].tolist(), tried, strict=True))


def bounded(
    pricing: Pricing, table: CostTable, schedule: str, choice: RecomputeChoice, splits: list[tuple[int, ...]],
    steps: IntArray | None = None,
) -> tuple[IntArray, IntArray, FloatArray]:  # fmt: skip
    """Layers of each stage (columns) of every way to hold a node's layers (rows), and what is recomputed whole in it.

    With them comes a lower bound of the step in seconds, of each shape of the table where it has several: then `steps`
    has their numbers of micro-batches, which may differ where as many are in flight.
    """
    node, counts = node_of(pricing, table, choice, schedule, exact=True), np.array(splits, dtype=np.int64)
    numbers = range(counts.max() + 1) if choice.whole == "one_count" else range(1)
    counts, again = np.repeat(counts, len(numbers), axis=0), np.tile(np.arange(len(numbers)), len(counts))
    return counts, again, least_steps_s(pricing, table, schedule, node, counts, again, steps)


def recomputing_first(counts: tuple[int, ...], choice: RecomputeChoice, number: int, model: ModelSpec) -> Split:
    """The split with these layers of each stage, and the first `number` layers of each chunk recomputed whole."""
    plain = Split(counts, choice.base)
    return plain.recomputing(model, number) if number else plain


def least_steps_s(
    pricing: Pricing, table: CostTable, schedule: str, node: Node, counts: IntArray, recomputed: IntArray,
    steps: IntArray | None = None,
) -> FloatArray:  # fmt: skip
    """A lower bound of the step in seconds for many splits of a node; infinite for one that exceeds a rank's memory.

    `counts` has the layers of each virtual stage (columns) of each split (rows), `recomputed` the number of layers of
    each stage that are recomputed whole, one for each split. Where the table is of several shapes with the same
    pipeline, the result has a row for each of them, and a column for each split; `steps` are their micro-batches.
    """
    ranks, last = np.asarray(node.placement), counts.cumsum(axis=1)
    chain = Chain.of(node, last - counts, last, recomputed[:, None])

    def of_stages(quantity: str) -> FloatArray:
        total = chain.total(quantity)
        total[..., 0] += column(getattr(node.embedding, quantity))
        total[..., -1] += column(getattr(node.head, quantity))
        return total

    splits, steps = node.bound == "split_backward", np.asarray(node.num_microbatches if steps is None else steps)
    steps = steps[..., None, None]
    forward_s, input_s, weight_s = map(of_stages, ("forward_total_s", "input_grad_total_s", "weight_grad_s"))
    back_s = (input_s, weight_s) if splits else (input_s + weight_s, np.zeros_like(weight_s))
    slots = np.full(node.pp, node.num_stages) * steps
    if node.bound == "interleaved":
        slots = np.rint(np.array(node.in_flight) * node.vpp)
    hop_s = np.broadcast_to(
        column(node.p2p_s)[..., None] * (ranks[1:] != ranks[:-1]), (*forward_s.shape[:-1], len(ranks) - 1)
    )
    bounds_s = trip_bounds_s((forward_s, *back_s), hop_s, node.placement, steps, slots, splits_backward=splits)
    stages = _stages_of(node)
    seconds = {"forward_s": forward_s, "input_grad_s": input_s, "weight_grad_s": weight_s}
    seconds |= {name: of_stages(name) for name in ("reduce_s", "gather_s", "optimizer_s")}
    parts = PartCost(**{name: np.moveaxis(each[..., stages].sum(axis=-1), -1, 0) for name, each in seconds.items()})
    exposed_s, optimizer_s, tail_s = outside_seconds(pricing, table, parts, schedule)
    step_s = bounds_s.max(axis=-1) + exposed_s + optimizer_s + column(tail_s)
    return np.where(_fit(chain), step_s, np.inf)


def _fit(chain: Chain) -> BoolArray:
    """True for each split whose ranks have memory for their stages (last axis), as row 6 of the program says."""
    node, stages = chain.node, _stages_of(chain.node)
    beside_static, beside_live, loss = (each[..., None, :] for each in beside_layers(node))
    held = np.array([node.in_flight_of(rank) for rank in range(node.pp)], dtype=float)
    static, live = (chain.total(name)[..., stages] for name in ("static_bytes", "live_bytes"))
    largest = np.maximum(chain.transient_bytes()[..., stages].max(axis=-1), loss)
    needed = relaxed_peak_bytes(static.sum(axis=-1), (live * held).sum(axis=-1), largest)
    usable = column(node.usable_bytes)[..., None] * (1 + TINY)
    return np.asarray((needed + (beside_static + beside_live) <= usable).all(axis=-1))


def _stages_of(node: Node) -> IntArray:
    """The virtual stages of each rank (rows), in the order of its chunks."""
    return np.argsort(node.placement, kind="stable").reshape(node.pp, -1)
