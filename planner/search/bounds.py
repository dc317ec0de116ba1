"""Closed-form lower bounds of the step over thousands of nodes at once: a shape, its schedule and how it recomputes.

Arrays have rows of nodes and, where they tell ranks apart, columns of ranks. The bounds are relaxations of the integer
program, so no node that could win is lost. Ranks take any number of layers that their memory and time allow (equal
chunks if stages interleave, as in the program), and recompute as little as fits. Only together must they hold the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import reduce
from typing import Literal

import numpy as np

from planner.layout.seconds import reduce_overlap_fraction
from planner.physics.cost import PartCost
from planner.physics.optimizers import update_s
from planner.physics.stage_memory import relaxed_peak_bytes
from planner.record import record
from planner.schedule.orders import SCHEDULES, chunks_in_flight, in_flight_microbatches, placement
from planner.search.chunks import fewest_of_kinds
from planner.search.ilp.node import FULL, Whole, recurring
from planner.search.priced_shapes import PartName, PricedShapes, least_sum
from planner.shape import BoolArray, FloatArray, IntArray, Number, Shape
from planner.specs.model import ModelSpec
from planner.specs.training import Recompute


@record
class Orders:
    """Properties of the schedules of nodes (rows), for each of their ranks (columns)."""

    plain: BoolArray
    """True for 1F1B without interleaving, and for no pipeline."""
    splits: BoolArray
    """True if weight gradients may follow the last input gradient: a rank may then end after the way back is over."""
    in_flight: FloatArray
    """The fewest micro-batches that each rank holds at its peak; 1 in columns beyond a node's ranks."""
    full: BoolArray
    """True for a rank with full chunks only: if stages interleave, every rank without the first and the last stage."""
    held: FloatArray
    """Layers in the full chunks of each rank; 0 without interleaving."""
    fewest: FloatArray
    """The fewest layers of each kind (second axis) on each rank (last axis); 0 without interleaving, or of one kind."""

    def take(self, index: IntArray) -> Orders:
        """The rows at `index`."""
        return Orders(**{column.name: getattr(self, column.name)[index] for column in fields(self)})


Kinds = Literal["one", "in runs", "in a pattern"]


def _kinds_of(model: ModelSpec) -> Kinds:
    """How the model's layers differ: not at all, in a few runs of equal ones, or in a pattern that repeats."""
    if len(model.kinds) == 1:
        return "one"
    return "in a pattern" if recurring(model.runs) is not None or len(model.runs) > len(model.kinds) else "in runs"


def orders_of(nodes: Sequence[tuple[str, int, int, int]], model: ModelSpec, empty_ends: bool) -> Orders:
    """The properties of nodes given as (schedule, pp, vpp, num_microbatches); their ends may be empty if asked for."""
    width, kinds = max((pp for _, pp, _, _ in nodes), default=1), _kinds_of(model)
    in_flight, full = np.ones((len(nodes), width)), np.zeros((len(nodes), width), dtype=bool)
    held, fewest = np.zeros((len(nodes), width)), np.zeros((len(nodes), len(model.kinds), width))
    for row, (name, pp, vpp, microbatches) in enumerate(nodes):
        in_flight[row, :pp] = _least_in_flight(name, pp, vpp, microbatches, kinds)
        if vpp > 1:
            ranks, chunk = placement(name, pp, vpp), -(-model.num_hidden_layers // (pp * vpp))
            first, last = ranks[0], ranks[-1]
            full[row, :pp], held[row, :pp] = True, vpp * chunk
            full[row, [first, last]], held[row, [first, last]] = False, (vpp - 1 - (first == last)) * chunk
            if len(model.kinds) > 1:
                fewest[row, :, :pp] = fewest_of_kinds(model.layers, tuple(ranks), empty_ends)
    return Orders(
        plain=np.array([SCHEDULES[name].bound == "one_f_one_b" for name, *_ in nodes], dtype=bool),
        splits=np.array([SCHEDULES[name].splits_backward for name, *_ in nodes], dtype=bool),
        in_flight=in_flight,
        full=full,
        held=held,
        fewest=fewest,
    )


def _least_in_flight(name: str, pp: int, vpp: int, num_microbatches: int, kinds: Kinds) -> Sequence[float]:
    """The fewest micro-batches that each rank holds at its peak under a schedule.

    If the schedule has a formula, that is used. Otherwise it is what all such schedules hold: min(M, pp − r), or 1 if
    the schedule is frugal.

    If stages interleave, a rank has most micro-batches of its first chunk in flight. But the first rank may have no
    layer in that chunk, and if layers differ, the chunk may keep fewer bytes than the others on any rank; then the mean
    over the other chunks is taken. If layers repeat in a pattern, any chunk may keep the fewest bytes; then the least
    over the chunks is taken.
    """
    kind = SCHEDULES[name]
    if kind.splits_backward:
        least = [1 if kind.frugal else min(num_microbatches, pp - rank) for rank in range(pp)]
        return [1, *least[1:]] if vpp > 1 else least
    in_flight = in_flight_microbatches(name, pp, vpp, num_microbatches)
    if vpp == 1:
        return in_flight
    counts = chunks_in_flight(name, pp, vpp, num_microbatches)
    if kinds == "in a pattern":
        return [float(min(chunks[1:] if rank == 0 else chunks)) for rank, chunks in enumerate(counts)]
    later = [sum(chunks[1:]) / (vpp - 1) for chunks in counts]
    return later if kinds == "in runs" else [later[0], *in_flight[1:]]


def exceeds_all_ranks(shapes: PricedShapes, modes: Sequence[Recompute], orders: Orders) -> BoolArray:
    """True for a node whose layers, of several kinds, need more memory than all its ranks together have.

    A layer of kind κ needs needed[κ,r] = static + in flight · live bytes on rank r; mean[r] is the mean of all layers.
    Divide each rank's memory row by mean[r] and add the rows up:
    Σ_κ count_κ · min_r needed[κ,r] / mean[r] ≤ Σ_r free[r] / mean[r] holds for every split that fits.
    """
    in_flight, counts = orders.in_flight, shapes.counts[:, None, None]
    needed = np.min([layer_bytes(shapes, mode, in_flight) for mode in modes], axis=0)
    mean = (counts * needed).sum(axis=0) / counts.sum()
    exists = shapes.ranks_exist(in_flight.shape[1])
    layers_of_room = np.where(exists, free_bytes(shapes, modes, in_flight.shape[1]) / mean, 0.0).sum(axis=1)
    taken = counts[:, :, 0] * np.where(exists, needed / mean, np.inf).min(axis=2)
    return np.asarray(taken.sum(axis=0) > layers_of_room * (1 + 1e-9))


def layer_bytes(shapes: PricedShapes, mode: Recompute, in_flight: FloatArray) -> FloatArray:
    """Bytes that a layer of each kind (first axis) needs on ranks (last axis) with `in_flight` micro-batches."""
    parts = {kind: shapes.table.layers[kind, mode] for kind in shapes.pricing.model.kinds}
    return np.array(
        [
            relaxed_peak_bytes(
                shapes.static_bytes(*each)[:, None], in_flight * shapes.part(each[1], "live_bytes")[:, None], 0.0
            )
            for each in parts.items()
        ]
    )


def free_bytes(shapes: PricedShapes, modes: Sequence[Recompute], num_ranks: int) -> FloatArray:
    """The most bytes that each rank (columns) has for layers of any kind in any of `modes`."""
    layers, kinds = shapes.table.layers, shapes.pricing.model.kinds
    return shapes.free_bytes(cheapest([layers[kind, mode] for kind in kinds for mode in modes]), num_ranks)


def cheapest(parts: Sequence[PartCost]) -> PartCost:
    """A layer that takes no more seconds than any of `parts`, and no more bytes beside its static ones."""

    def least(quantity: str) -> Number:
        return reduce(np.minimum, [np.asarray(getattr(part, quantity)) for part in parts])

    names = ("live_bytes", "transient_bytes")
    return PartCost(forward_s=least("total_s"), **{name: least(name) for name in names})


def with_ends_s(shapes: PricedShapes, pipeline_s: FloatArray, base: Recompute, exchanging: Recompute) -> FloatArray:
    """A lower bound of the step from a bound of the pipeline; layers in mode `exchanging` hide the exchange.

    Two bounds hold for the part of the first rank's exchange that shows: the seconds that nothing hides, and a fraction
    of the whole exchange. The greater one is taken. The optimizer takes at least its mean over the ranks. The tail is
    the same on all ranks.
    """
    pps = np.asarray(shapes.shape.pp, dtype=float)
    bounds = [
        _with_exchange_s(shapes, pipeline_s, base, exchanging, exchange_s_of) for exchange_s_of in (beyond_s, showing_s)
    ]
    return np.asarray(np.maximum(*bounds) + all_optimizers_s(shapes) / pps + shapes.tail_s)


def _with_exchange_s(
    shapes: PricedShapes,
    pipeline_s: FloatArray,
    base: Recompute,
    exchanging: Recompute,
    exchange_s_of: Callable[[PricedShapes, PartName, PartCost], FloatArray],
) -> FloatArray:
    """A lower bound of pipeline and exchange; `exchange_s_of` gives the seconds that a part on the first rank adds.

    With n layers on the first rank, the step takes at least max(pipeline, M·(work − n·t)/(pp − 1)) + x(n), since the
    other ranks hold the layers that the first does not. Here t is the time of the slowest kind of layer, and x(n) the
    exchange of the n layers that exchange least. Both terms are convex and piecewise linear, so the least value is
    where a piece ends: where the two terms of the maximum meet, where the next kind begins, where x becomes positive,
    or at the fewest layers that the first rank may hold (its full chunks if stages interleave, otherwise none). Without
    a pipeline n = L.
    """
    pricing, shape, table = shapes.pricing, shapes.shape, shapes.table
    layers, counts = pricing.model.num_hidden_layers, shapes.counts
    pps, vpps, steps = np.asarray(shape.pp, dtype=float), shape.vpp, shape.num_microbatches
    layer_exchange_s = np.array(
        [exchange_s_of(shapes, kind, table.layers[kind, exchanging]) for kind in pricing.kind_counts]
    )
    embedding = exchange_s_of(shapes, "embedding", table.embedding)
    last = exchange_s_of(shapes, "head", table.head)
    if table.mtp is not None:
        last = last + exchange_s_of(shapes, "mtp", table.mtp_recomputed.get(exchanging, table.mtp))
    alone = counts @ layer_exchange_s + embedding + last
    ends_s = embedding + np.where(shapes.folded, np.minimum(last, 0.0), 0.0)
    work, slowest = shapes.work_s(base) - shapes.ends_s(), shapes.layer_s(base).max(axis=0)
    others = np.maximum(pps - 1, 1)

    fewest = np.maximum(vpps - 1 - shapes.folded, 0) * np.ceil(layers / (pps * vpps))
    breaks = [fewest, (work - pipeline_s * others / steps) / slowest]
    before, exposed_s = np.zeros_like(work), ends_s
    order = np.argsort(layer_exchange_s, axis=0)
    for more_s, count in zip(np.take_along_axis(layer_exchange_s, order, axis=0), counts[order], strict=True):
        until_positive = np.where(more_s > 0, -exposed_s / np.where(more_s > 0, more_s, 1.0), count)
        breaks.append(before + np.clip(until_positive, 0, count))
        before, exposed_s = before + count, exposed_s + count * more_s
    held = np.clip(breaks, fewest, layers)
    exposed_s = ends_s + least_sum(layer_exchange_s[:, None], counts, held)
    held_by_others_s = steps * (work - held * slowest) / others
    piped = (np.maximum(pipeline_s, held_by_others_s) + np.maximum(exposed_s, 0.0)).min(axis=0)
    return np.asarray(np.where(pps == 1, pipeline_s + np.maximum(alone, 0.0), piped))


def beyond_s(shapes: PricedShapes, name: PartName, part: PartCost) -> FloatArray:
    """Seconds of data-parallel exchange of one part, less the seconds that hide it.

    If every micro-batch exchanges, they are added up over all micro-batches. If stages interleave, they are those of
    the chunk that exchanges last, which are no more than the seconds that show.
    """
    runtime, shape = shapes.pricing.runtime, shapes.shape
    reduce_s, gather_s = shapes.exchanges_s(name, part)
    forward, backward = shapes.part(part, "forward_total_s"), shapes.part(part, "backward_total_s")
    gathered = gather_s - runtime.parameter_overlap_fraction * forward
    once = reduce_s - reduce_overlap_fraction(runtime, shape) * backward + gathered
    gradients = reduce_s - runtime.gradient_overlap_fraction * backward
    weights = 2 * gather_s + reduce_s - runtime.fsdp_overlap_fraction * (forward + backward)
    return _each_time(shape, once / shape.vpp, gradients, gathered, weights)


def showing_s(shapes: PricedShapes, name: PartName, part: PartCost) -> FloatArray:
    """Seconds of the data-parallel exchange of one part that show however much is hidden, over all micro-batches."""
    fraction = shapes.pricing.runtime.contention_fraction
    reduce_s, gather_s = (fraction * seconds for seconds in shapes.exchanges_s(name, part))
    return _each_time(shapes.shape, reduce_s + gather_s, reduce_s, gather_s, reduce_s + 2 * gather_s)


def _each_time(shape: Shape, once: Number, gradients: Number, gathered: Number, weights: Number) -> FloatArray:
    """Seconds of exchange in a step.

    Without a pipeline they are M · gradients + gathered under ZeRO-2 and M · weights under ZeRO-3; otherwise `once`.
    """
    steps, zero, alone = shape.num_microbatches, shape.zero_stage, shape.pp == 1
    return np.asarray(
        np.select([alone & (zero == 2), alone & (zero == 3)], [steps * gradients + gathered, steps * weights], once)
    )


def all_optimizers_s(shapes: PricedShapes) -> FloatArray:
    """Seconds that the optimizer takes on the shards of the whole model, one rank's after the other's."""
    pricing, table = shapes.pricing, shapes.table
    counted = [(table.layers[kind, "none"], count) for kind, count in pricing.kind_counts.items()] + [(table.head, 1)]
    hardware, runtime = pricing.cluster.hardware, pricing.runtime

    def all_s() -> tuple[Number]:
        return (sum(n * update_s(shapes.counted(part), shapes.shape, hardware, runtime) for part, n in counted),)

    return shapes.once("optimizers", "all", all_s)[0]


def share_ends(shapes: PricedShapes) -> None:
    """Work out what of a step's end all nodes of the shapes share, however they recompute and interleave."""
    table = shapes.table
    parts: dict[PartName, PartCost] = {kind: table.layers[kind, "none"] for kind in shapes.pricing.kind_counts}
    parts["embedding"] = table.embedding
    for part in (parts | shapes.last_parts).items():
        shapes.exchanges_s(*part)
    all_optimizers_s(shapes)
    shapes.tail_s  # noqa: B018 — remembered


def chunked_bound_s(
    shapes: PricedShapes, base: Recompute, whole: Whole, orders: Orders, trips_s: FloatArray
) -> FloatArray:
    """A lower bound of the pipeline's seconds for nodes whose stages interleave: ranks hold equal chunks of layers.

    A rank holds n layers: vpp · chunk, without the chunks that may be shorter. It takes no less than the n quickest
    layers of the model, and no less than the fewest layers of each kind that the order of layers leaves it. It
    recomputes the layers that its memory forces it to (with one_count: that the memory of any rank forces it to). Then
    T ≥ M · its seconds + the trip of one micro-batch through the ranks before it. The same holds on average over the
    ranks without the first and the last stage. The bound is 0 for other nodes.
    """
    in_flight, full = orders.in_flight, orders.full
    steps = np.asarray(shapes.shape.num_microbatches)[:, None]
    counts = shapes.counts
    num_layers, layer_s = orders.held, shapes.layer_s(base)[:, :, None]
    rank_s = steps * (_of_full_chunks(shapes, orders, layer_s) + shapes.rank_ends_s(in_flight.shape[1])) + trips_s
    if whole != "none":
        free = free_bytes(shapes, (base, FULL), in_flight.shape[1])
        saved, again = shapes.layer_s(base, "live_bytes"), shapes.layer_s(FULL) - shapes.layer_s(base)
        saved = np.maximum((saved - shapes.layer_s(FULL, "live_bytes")).max(axis=0), 1.0)
        needed = _of_full_chunks(shapes, orders, layer_bytes(shapes, base, in_flight))
        lacking = np.maximum(needed - free, 0.0)
        forced = lacking / (in_flight * saved[:, None])
        if whole != "any_modules":  # a set of modules saves a part of every layer
            forced = np.ceil(forced - 1e-9)
        if whole == "one_count":
            # every chunk recomputes the same number of layers, the shorter ones at the ends included
            per_chunk = np.ceil(forced.max(axis=1, initial=0.0) / shapes.shape.vpp - 1e-9)
            per_chunk = np.minimum(per_chunk, shapes.chunk_layers)
            forced = np.maximum(forced, (per_chunk / shapes.chunk_layers)[:, None] * num_layers)
        rank_s = rank_s + steps * forced * np.maximum(again.min(axis=0), 0.0)[:, None]
    num_full = np.maximum(full.sum(axis=1), 1)[:, None]
    together_s = least_sum(layer_s, counts, np.where(full, num_layers, 0.0).sum(axis=1)[:, None]) / num_full
    mean_s = (steps * together_s)[:, 0] + (trips_s * full).sum(axis=1) / num_full[:, 0]
    busiest_s = np.where(num_layers > 0, rank_s, 0.0).max(axis=1, initial=0.0)
    return np.where(shapes.shape.vpp > 1, np.maximum(busiest_s, mean_s), 0.0)


def rows_with_room(shapes: PricedShapes, base: Recompute, whole: Whole, orders: Orders) -> IntArray:
    """The nodes whose ranks have memory for all layers together and, where stages interleave, each for full chunks."""
    modes: tuple[Recompute, ...] = (base,) if whole == "none" else (base, FULL)
    needed = _of_full_chunks(shapes, orders, layer_bytes(shapes, modes[-1], orders.in_flight))
    lacks = (needed > free_bytes(shapes, modes, orders.full.shape[1]) * (1 + 1e-9)) & (orders.held > 0)
    rows = np.flatnonzero(~lacks.any(axis=1))
    return rows[~exceeds_all_ranks(shapes.take(rows), modes, orders.take(rows))]


def _of_full_chunks(shapes: PricedShapes, orders: Orders, of_layer: FloatArray) -> FloatArray:
    """The least that the full chunks of each rank (columns) take, given what a layer of each kind (rows) takes."""
    counts = shapes.counts
    together: FloatArray = (np.moveaxis(orders.fewest, 1, 0) * of_layer).sum(axis=0)
    return np.maximum(least_sum(of_layer, counts, orders.held), together)


NEVER_S = 1e30
"""Seconds that stand for infinity in products with a factor that may be 0."""

BISECTIONS = 13
"""Number of times that the interval of the busiest rank's seconds is halved, on a logarithmic scale.

Its ends differ by a factor of a few hundred at most; after the halvings they differ by a thousandth."""

RARE = 1 / 8
"""Least share of the model's layers that a kind must have to get a bound of its own; rarer kinds decide nothing."""


def coarse_bound_s(shapes: PricedShapes, splits_backward: bool = False) -> FloatArray:
    """A lower bound of the step for every shape: max(M · the busiest rank, one micro-batch's round trip).

    The busiest rank takes at least work / pp. It also takes at least ⌈L / pp⌉ of the quickest layer, and at least the
    seconds of the parts on the last stage.
    """
    model, shape = shapes.pricing.model, shapes.shape
    work = shapes.work_s("none")
    quickest = np.min([shapes.part(shapes.table.layers[kind, "none"], "total_s") for kind in model.kinds], axis=0)
    busiest = np.maximum(work / shape.pp, np.ceil(model.num_hidden_layers / shape.pp) * quickest)
    busiest = np.maximum(busiest, np.sum([shapes.part(part, "total_s") for part in shapes.last_parts.values()], axis=0))
    return np.asarray(np.maximum(shape.num_microbatches * busiest, shapes.trip_s("none", splits_backward)))


def pipeline_bound_s(shapes: PricedShapes, base: Recompute, whole: Whole, orders: Orders) -> FloatArray:
    """A lower bound of the pipeline's seconds for `rows_with_room`; infinite if nothing fits nevertheless.

    Layers that are not recomputed whole are in mode `base`; `whole` says how many may be recomputed whole.
    """
    trips_s = _trip_s(shapes, base, orders)
    busiest = busiest_rank_s(shapes, base, whole != "none", orders, trips_s)
    chunked_s = chunked_bound_s(shapes, base, whole, orders, trips_s)
    return np.maximum(schedule_bound_s(shapes, busiest, base, orders), chunked_s)


def busiest_rank_s(
    shapes: PricedShapes,
    base: Recompute,
    may_recompute: bool,
    orders: Orders,
    trips_s: FloatArray,
) -> FloatArray:
    """Least seconds of a micro-batch on the busiest rank; ranks recompute the layers that their memory forces them to.

    Bisection finds the least time in which all ranks together hold the layers. It does so for the layers of each kind
    with the other kinds taken as free, and for all layers with each as cheap as the cheapest. For other schedules than
    plain 1F1B the result is the least T / M: rank r has T less the trip of one micro-batch through the ranks before it.
    The result is infinite if nothing fits.
    """
    model, trips_s = shapes.pricing.model, np.where(orders.plain[:, None], 0.0, trips_s)
    beside_s = shapes.rank_ends_s(trips_s.shape[1]) + trips_s / np.asarray(shapes.shape.num_microbatches)[:, None]
    busiest = np.maximum(shapes.work_s(base) / shapes.shape.pp, beside_s.max(axis=1))
    counts = shapes.pricing.kind_counts
    layers, least = shapes.table.layers, RARE * model.num_hidden_layers
    static = {kind: shapes.static_bytes(kind, layers[kind, base]) for kind in counts}
    held = [(static[kind], layers[kind, base], layers[kind, FULL], n) for kind, n in counts.items() if n >= least]
    if len(counts) > 1:
        plain, full = (cheapest([layers[kind, mode] for kind in model.kinds]) for mode in (base, FULL))
        held.append((np.min([*static.values()], axis=0), plain, full, model.num_hidden_layers))
    for layer in held:
        busiest = _holding_bound_s(shapes, layer, may_recompute, orders.in_flight, beside_s, busiest)
    return np.asarray(busiest)


def _trip_s(shapes: PricedShapes, base: Recompute, orders: Orders) -> FloatArray:
    """Least seconds of one micro-batch through the ranks before each rank (columns) and back.

    The ranks between the first and this one hold full chunks if stages interleave, otherwise at least one layer. The
    first may hold no layer if the trainer allows that. The result is 0 if a rank may end after the way back is over.
    """
    rank = np.arange(orders.full.shape[1])[None, :]
    quickest = shapes.layer_s(base).min(axis=0)[:, None]
    first = 0.0 if shapes.pricing.runtime.head_only_stage else quickest
    first = first + shapes.part(shapes.table.embedding, "total_s")[:, None]
    between = np.maximum(rank - 1, 0) * quickest * shapes.chunk_layers[:, None]
    hops = 2 * rank * np.broadcast_to(shapes.p2p_s, len(shapes.kernel))[:, None]
    trip = np.where((rank > 0) & shapes.ranks_exist(rank.size), first + between + hops, 0.0)
    return np.where(orders.splits[:, None], 0.0, trip)


def _holding_bound_s(
    shapes: PricedShapes,
    layer: tuple[FloatArray, PartCost, PartCost, int],
    may_recompute: bool,
    in_flight: FloatArray,
    beside_s: FloatArray,
    least_s: FloatArray,
) -> FloatArray:
    """Least seconds of a micro-batch on the busiest rank for layer[3] layers; `least_s` or more.

    A layer has layer[0] static bytes and costs layer[1], or layer[2] if it is recomputed whole. Ranks (columns) hold
    `in_flight` micro-batches; `beside_s` of a micro-batch's seconds are spent on no layer.
    """
    static_bytes, plain, full, count = layer
    seconds = shapes.part(plain, "total_s")[:, None]
    again = np.maximum(shapes.part(full, "total_s")[:, None] - seconds, 1e-12)
    static, live = static_bytes[:, None], shapes.part(plain, "live_bytes")[:, None]
    saved = np.maximum(live - shapes.part(full, "live_bytes")[:, None], 1.0)
    free = shapes.free_bytes(plain, in_flight.shape[1])
    roomy = np.floor(free / (static + in_flight * live))
    # layers = (busy + again·free/saved-bytes-in-flight) / (seconds + again·bytes per layer / saved bytes): memory binds
    rate = again / (in_flight * saved)
    tight = np.floor(free / (static + in_flight * (live - saved))) if may_recompute else roomy
    exists = shapes.ranks_exist(in_flight.shape[1])
    most, spare_s, layer_s = np.where(exists, tight, 0.0), rate * free, seconds + rate * (static + in_flight * live)
    high = np.maximum(count * (seconds + again)[:, 0] + beside_s.max(axis=1), least_s)

    def enough(busiest_s: FloatArray) -> BoolArray:
        busy = np.maximum(busiest_s[:, None] - beside_s, 0.0)
        layers = np.minimum(busy / seconds, most)
        if may_recompute:
            layers = np.minimum(layers, np.maximum((busy + spare_s) / layer_s, 0))
        return np.asarray(np.floor(layers + 1e-9).sum(axis=1) >= count)

    fits = most.sum(axis=1) >= count
    rows = np.flatnonzero(fits & ~enough(least_s))
    seconds, beside_s, most, spare_s, layer_s = (each[rows] for each in (seconds, beside_s, most, spare_s, layer_s))
    low, high = least_s[rows], high[rows]
    for _ in range(BISECTIONS if len(rows) else 0):
        middle = np.sqrt(low * high)
        holds = enough(middle)
        low, high = np.where(holds, low, middle), np.where(holds, middle, high)
    bound_s = np.where(fits, least_s, np.inf)
    bound_s[rows] = low
    return bound_s


def schedule_bound_s(shapes: PricedShapes, busiest_s: FloatArray, base: Recompute, orders: Orders) -> FloatArray:
    """A lower bound of the pipeline's seconds T from the busiest rank: M · busiest, and for 1F1B its fill and drain.

    1F1B with M > pp and stages no longer than `busiest`: T ≥ (M − 1 − pp) · busiest + 2 · work. This follows from
    T ≥ M·t_r + Σ_{q<r} t_q + [2·Σ_{q>r} t_q − (pp − 1 − r)·t_r]⁺ at the busiest rank r, since all stages together fall
    short of pp · busiest by no more than pp · busiest − work.

    1F1B with any M and one stage per rank: a rank's first backward comes after the whole trip, and M − 1 more follow.
    So T ≥ work + (M − 1)·b_r with b_r ≥ β·t_r, where β is the least share that the backward has of any part.

    1F1B with M ≤ pp: only the first e = pp − M + 1 ranks may be that idle, and the seconds of the others count twice:
    T ≥ 2·work − Σ_{r<e} t_r. Both together give T ≥ work · (1 + n/(n + e)) with n = (M − 1)·β.

    A trip has 2·(pp − 1) transfers.
    """
    shape = shapes.shape
    pps, work, steps = shape.pp, shapes.work_s(base), shape.num_microbatches
    busiest_s = np.where(np.isfinite(busiest_s), busiest_s, NEVER_S)
    later = (steps - 1) * _backward_share(shapes, base)
    few = np.maximum(work + later * busiest_s, work * (1 + later / np.maximum(later + pps - steps + 1, 1.0)))
    plain = np.where(steps > pps, (steps - 1 - pps) * busiest_s + 2 * work, few) + 2 * (pps - 1) * shapes.p2p_s
    plain = np.where(pps == 1, steps * work, plain)
    trip = _trips_bound_s(shapes, base, orders)
    least = np.maximum(np.maximum(steps * busiest_s, trip), np.where(orders.plain, plain, 0.0))
    return np.where(busiest_s >= NEVER_S, np.inf, least)


def _trips_bound_s(shapes: PricedShapes, base: Recompute, orders: Orders) -> FloatArray:
    """Seconds of one micro-batch through all stages and back, and of M − 1 more passes, there or back, of a stage.

    The stage is the longest one, which takes at least the mean over the stages.
    """
    shape, counts = shapes.shape, shapes.pricing.kind_counts
    num_stages = shape.pp * shape.vpp
    hops = num_stages - np.where(shapes.folded, shape.vpp, 1)
    trip = np.where(orders.splits, shapes.trip_s(base, splits_backward=True), shapes.work_s(base))

    def longest_s(quantity: str) -> FloatArray:
        parts = [n * shapes.part(shapes.table.layers[kind, base], quantity) for kind, n in counts.items()]
        return np.asarray(np.sum(parts, axis=0) / num_stages)

    there, back = longest_s("forward_total_s"), longest_s("input_grad_total_s")
    back = back + np.where(orders.splits, 0.0, longest_s("weight_grad_s"))
    later = (shape.num_microbatches - 1) * np.maximum(there, back)
    return trip + 2 * hops * shapes.p2p_s + later


def _backward_share(shapes: PricedShapes, base: Recompute) -> FloatArray:
    """The least share of its seconds that any layer, the embedding or the head spends in the backward."""
    table = shapes.table
    parts = [table.layers[kind, base] for kind in shapes.pricing.model.kinds] + [table.embedding, table.head]
    shares = [shapes.part(part, "backward_total_s") / shapes.part(part, "total_s") for part in parts]
    return np.asarray(np.min(shares, axis=0))
