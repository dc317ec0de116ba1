"""Closed-form lower bounds of the step over thousands of nodes at once: a shape, its schedule and how it recomputes.

They are relaxations of the integer program, so no node that could win is lost. Ranks take any number of layers that
their memory and time allow (equal chunks if stages interleave, as in the program), and recompute as little as fits.
Only together must they hold the model.
"""

from __future__ import annotations

import numpy as np

from planner.physics.cost import PartCost
from planner.search.bounds.chunks import chunked_bound_s
from planner.search.bounds.memory import cheapest, exceeds_all_ranks
from planner.search.bounds.orders import Orders
from planner.search.ilp.node import FULL, Whole
from planner.search.priced_shapes import PricedShapes
from planner.shape import FloatArray
from planner.specs.training import Recompute

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
    busiest = np.maximum(busiest, np.sum([shapes.part(part, "total_s") for part in shapes.last_parts], axis=0))
    return np.asarray(np.maximum(shape.num_microbatches * busiest, shapes.trip_s("none", splits_backward)))


def pipeline_bound_s(shapes: PricedShapes, base: Recompute, whole: Whole, orders: Orders) -> FloatArray:
    """A lower bound of the pipeline's seconds for every node; infinite if nothing fits.

    Layers that are not recomputed whole are in mode `base`; `whole` says how many may be recomputed whole.
    """
    trips_s = _trip_s(shapes, base, orders)
    busiest = busiest_rank_s(shapes, base, whole != "none", orders, trips_s)
    chunked_s = chunked_bound_s(shapes, base, whole, orders, trips_s)
    return np.asarray(np.maximum(schedule_bound_s(shapes, busiest, base, orders), chunked_s))


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
    busiest = np.maximum(shapes.work_s(base) / np.asarray(shapes.shape.pp), beside_s.max(axis=1))
    counts = shapes.pricing.kind_counts
    modes: tuple[Recompute, ...] = (base, FULL) if may_recompute else (base,)
    for kind, count in counts.items():
        if count >= RARE * model.num_hidden_layers:
            plain, full = shapes.table.layers[kind, base], shapes.table.layers[kind, FULL]
            busiest = _holding_bound_s(shapes, (plain, full), count, may_recompute, orders.in_flight, beside_s, busiest)
    if len(counts) > 1:
        plain, full = (cheapest([shapes.table.layers[kind, mode] for kind in model.kinds]) for mode in (base, FULL))
        busiest = _holding_bound_s(
            shapes,
            (plain, full),
            model.num_hidden_layers,
            may_recompute,
            orders.in_flight,
            beside_s,
            busiest,
        )
        busiest = np.where(exceeds_all_ranks(shapes, modes, orders), np.inf, busiest)
    return np.asarray(busiest)


def _trip_s(shapes: PricedShapes, base: Recompute, orders: Orders) -> FloatArray:
    """Least seconds of one micro-batch through the ranks before each rank (columns) and back.

    The ranks between the first and this one hold full chunks if stages interleave, otherwise at least one layer. The
    first may hold no layer if the trainer allows that. The result is 0 if a rank may end after the way back is over.
    """
    shape = shapes.shape
    rank = np.arange(orders.full.shape[1])[None, :]
    quickest = shapes.layer_s(base).min(axis=0)[:, None]
    first = 0.0 if shapes.pricing.runtime.head_only_stage else quickest
    first = first + shapes.part(shapes.table.embedding, "total_s")[:, None]
    between = np.maximum(rank - 1, 0) * quickest * shapes.chunk_layers[:, None]
    hops = 2 * rank * np.broadcast_to(shapes.p2p_s, len(shapes.kernel))[:, None]
    trip = np.where((rank > 0) & (rank < np.asarray(shape.pp)[:, None]), first + between + hops, 0.0)
    return np.asarray(np.where(orders.splits[:, None], 0.0, trip))


def _holding_bound_s(
    shapes: PricedShapes,
    layer: tuple[PartCost, PartCost],
    count: int,
    may_recompute: bool,
    in_flight: FloatArray,
    beside_s: FloatArray,
    least_s: FloatArray,
) -> FloatArray:
    """Least seconds of a micro-batch on the busiest rank for `count` layers; `least_s` or more.

    A layer costs layer[0], or layer[1] if it is recomputed whole. Ranks (columns) hold `in_flight` micro-batches;
    `beside_s` of a micro-batch's seconds are spent on no layer.
    """
    plain, full = layer
    seconds = shapes.part(plain, "total_s")[:, None]
    again = np.maximum(shapes.part(full, "total_s")[:, None] - seconds, 1e-12)
    static, live = shapes.static_bytes(plain)[:, None], shapes.part(plain, "live_bytes")[:, None]
    saved = np.maximum(live - shapes.part(full, "live_bytes")[:, None], 1.0)
    free = shapes.free_bytes(plain, in_flight.shape[1])
    roomy = np.floor(free / (static + in_flight * live))
    # layers = (busy + again·free/saved-bytes-in-flight) / (seconds + again·bytes per layer / saved bytes): memory binds
    rate = again / (in_flight * saved)
    tight = np.floor(free / (static + in_flight * (live - saved))) if may_recompute else roomy
    exists = np.arange(in_flight.shape[1])[None, :] < np.asarray(shapes.shape.pp)[:, None]
    low, high = least_s, np.maximum(count * (seconds + again)[:, 0] + beside_s.max(axis=1), least_s)
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        busy = np.maximum(middle[:, None] - beside_s, 0.0)
        layers = busy / seconds
        if may_recompute:
            layers_in_memory = (busy + rate * free) / (seconds + rate * (static + in_flight * live))
            layers = np.minimum(layers, np.maximum(layers_in_memory, 0))
        layers = np.floor(np.minimum(layers, tight) + 1e-9)
        enough = (layers * exists).sum(axis=1) >= count
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where((tight * exists).sum(axis=1) < count, np.inf, low)


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
    pps, work, steps = np.asarray(shape.pp), shapes.work_s(base), np.asarray(shape.num_microbatches)
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
    num_stages = np.asarray(shape.pp) * np.asarray(shape.vpp)
    hops = num_stages - np.where(shapes.folded, np.asarray(shape.vpp), 1)
    trip = np.where(orders.splits, shapes.trip_s(base, splits_backward=True), shapes.work_s(base))

    def longest_s(quantity: str) -> FloatArray:
        parts = [n * shapes.part(shapes.table.layers[kind, base], quantity) for kind, n in counts.items()]
        return np.asarray(np.sum(parts, axis=0) / num_stages)

    there, back = longest_s("forward_total_s"), longest_s("input_grad_total_s")
    back = back + np.where(orders.splits, 0.0, longest_s("weight_grad_s"))
    later = (np.asarray(shape.num_microbatches) - 1) * np.maximum(there, back)
    return np.asarray(trip + 2 * hops * shapes.p2p_s + later)


def _backward_share(shapes: PricedShapes, base: Recompute) -> FloatArray:
    """The least share of its seconds that any layer, the embedding or the head spends in the backward."""
    table = shapes.table
    parts = [table.layers[kind, base] for kind in shapes.pricing.model.kinds] + [table.embedding, table.head]
    shares = [shapes.part(part, "backward_total_s") / shapes.part(part, "total_s") for part in parts]
    return np.asarray(np.min(shares, axis=0))
