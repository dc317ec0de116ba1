"""Closed-form lower bounds of the step over thousands of nodes at once: a shape, its schedule and how it recomputes.

They are relaxations of the integer program, so nothing that could win is lost: ranks take any number of layers that
their memory and time allow (equal chunks where stages interleave, as in the program), recomputing as little as fits,
and only together must they hold the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from planner.physics.cost import PartCost
from planner.physics.shape import FloatArray, Number
from planner.schedule.orders import SCHEDULES, first_chunk_in_flight, in_flight_microbatches, placement
from planner.schedule.zero_bubble import v_placement
from planner.search.chunks import fewest_of_kinds
from planner.search.ilp_node import FULL, Whole
from planner.search.screen import FRUGAL, Screen, least_sum
from planner.specs.training import Recompute

NEVER_S = 1e30
"""Stands for infinity where it is multiplied by what may be zero."""

BISECTIONS = 13
"""Halvings of the logarithm of the interval in which the busiest rank's seconds lie, at most a few hundred wide: what
is left of it is a thousandth."""

RARE = 1 / 8
"""Kinds of fewer layers than this share of the model get no bound of their own: they decide nothing."""


def coarse_bound_s(screen: Screen, splits_backward: bool = False) -> FloatArray:
    """A lower bound of the step for every shape: max(M · the busiest rank, one micro-batch's round trip).

    The busiest rank has at least work / pp, the longest count of the quickest layer, and what is on the last stage.
    """
    model, shape = screen.pricing.model, screen.shape
    work = screen.work_s("none")
    quickest = np.min([screen.part(screen.table.layers[kind, "none"], "total_s") for kind in model.kinds], axis=0)
    busiest = np.maximum(work / shape.pp, np.ceil(model.num_hidden_layers / shape.pp) * quickest)
    busiest = np.maximum(busiest, np.sum([screen.part(part, "total_s") for part in screen.last_parts], axis=0))
    return np.asarray(np.maximum(shape.num_microbatches * busiest, screen.trip_s("none", splits_backward)))


@dataclass(frozen=True, slots=True)
class Orders:
    """What the schedules of nodes (rows) mean for their ranks (columns)."""

    plain: npt.NDArray[np.bool_]
    """1F1B without interleaving, or no pipeline."""
    splits: npt.NDArray[np.bool_]
    """Weight gradients may follow the last input gradient, so that the way back need not be over when a rank is."""
    in_flight: FloatArray
    """Micro-batches that each rank holds at least; 1 beyond a node's ranks."""
    full: npt.NDArray[np.bool_]
    """Ranks of chunks that are all equal: where stages interleave, those without the first and the last stage."""

    def take(self, index: npt.NDArray[np.int64]) -> Orders:
        """The rows at `index`."""
        return Orders(self.plain[index], self.splits[index], self.in_flight[index], self.full[index])


def orders_of(nodes: Sequence[tuple[str, int, int, int]]) -> Orders:
    """Of nodes given as (schedule, pp, vpp, num_microbatches)."""
    width = max((pp for _, pp, _, _ in nodes), default=1)
    in_flight, full = np.ones((len(nodes), width)), np.zeros((len(nodes), width), dtype=bool)
    for row, (name, pp, vpp, microbatches) in enumerate(nodes):
        in_flight[row, :pp] = _least_in_flight(name, pp, vpp, microbatches)
        if vpp > 1:
            ranks = placement(name, pp, vpp)
            full[row, :pp] = True
            full[row, [ranks[0], ranks[-1]]] = False
    return Orders(
        plain=np.array([name in ("none", "1f1b") for name, *_ in nodes], dtype=bool),
        splits=np.array([SCHEDULES[name].splits_backward for name, *_ in nodes], dtype=bool),
        in_flight=in_flight,
        full=full,
    )


def _least_in_flight(name: str, pp: int, vpp: int, num_microbatches: int) -> Sequence[float]:
    """As the schedule has it where that is a formula; else what all of them hold: min(M, pp − r), or 1 if frugal.

    Where stages interleave the first rank's first chunk, of which it holds most, may be missing.
    """
    if SCHEDULES[name].splits_backward:
        held = [1 if name in FRUGAL else min(num_microbatches, pp - rank) for rank in range(pp)]
        return [1, *held[1:]] if vpp > 1 else held
    in_flight = in_flight_microbatches(name, pp, vpp, num_microbatches)
    if vpp == 1:
        return in_flight
    first = first_chunk_in_flight(name, pp, vpp, num_microbatches)
    return [(vpp * in_flight[0] - first) / (vpp - 1), *in_flight[1:]]


def pipeline_bound_s(screen: Screen, base: Recompute, whole: Whole, orders: Orders) -> FloatArray:
    """A lower bound of the pipeline's seconds for every node; infinite where nothing fits.

    Layers not recomputed whole are in mode `base`; `whole` says how many may be.
    """
    trips_s = _trip_s(screen, base, orders)
    busiest = busiest_rank_s(screen, base, whole != "none", orders, trips_s)
    chunked_s = chunked_bound_s(screen, base, whole, orders, trips_s)
    return np.asarray(np.maximum(schedule_bound_s(screen, busiest, base, orders), chunked_s))


def busiest_rank_s(screen: Screen, base: Recompute, whole: bool, orders: Orders, trips_s: FloatArray) -> FloatArray:
    """Least seconds of a micro-batch on the busiest rank, where ranks recompute what their memory forces them to.

    The least time in which all ranks together hold the layers is found by bisection: those of each kind with the others
    taken as free, and all with each as cheap as the cheapest. Beyond plain 1F1B it is the least T / M: rank r has T
    less the trip of one micro-batch through the ranks before it. Infinite where nothing fits.
    """
    model, trips_s = screen.pricing.model, np.where(orders.plain[:, None], 0.0, trips_s)
    beside_s = screen.rank_ends_s(trips_s.shape[1]) + trips_s / np.asarray(screen.shape.num_microbatches)[:, None]
    busiest = np.maximum(screen.work_s(base) / np.asarray(screen.shape.pp), beside_s.max(axis=1))
    counts = screen.pricing.kind_counts
    for kind, count in counts.items():
        if count >= RARE * model.num_hidden_layers:
            plain, full = screen.table.layers[kind, base], screen.table.layers[kind, FULL]
            busiest = _holding_bound_s(screen, (plain, full), count, whole, orders.in_flight, beside_s, busiest)
    if len(counts) > 1:
        plain, full = (_least([screen.table.layers[kind, mode] for kind in model.kinds]) for mode in (base, FULL))
        busiest = _holding_bound_s(
            screen, (plain, full), model.num_hidden_layers, whole, orders.in_flight, beside_s, busiest
        )
        busiest = np.where(_exceeds_all_ranks(screen, (base, FULL) if whole else (base,), orders), np.inf, busiest)
    return np.asarray(busiest)


def _exceeds_all_ranks(screen: Screen, modes: Sequence[Recompute], orders: Orders) -> npt.NDArray[np.bool_]:
    """Whether layers of several kinds need more memory than all ranks together have.

    A layer of kind κ takes needed[κ,r] = static + in flight · live bytes on rank r, the mean one mean[r]. For all the
    ranks' memory rows, each over mean[r], together: Σ_κ count_κ · min_r needed[κ,r] / mean[r] ≤ Σ_r free[r] / mean[r].
    """
    held, counts = orders.in_flight, np.array(list(screen.pricing.kind_counts.values()))[:, None, None]
    needed = np.min([_layer_bytes(screen, mode, held) for mode in modes], axis=0)
    mean = (counts * needed).sum(axis=0) / counts.sum()
    exists = np.arange(held.shape[1])[None, :] < np.asarray(screen.shape.pp)[:, None]
    free = _free_bytes(screen, modes, held.shape[1])
    layers_of_room = np.where(exists, free / mean, 0.0).sum(axis=1)
    taken = counts[:, :, 0] * np.where(exists, needed / mean, np.inf).min(axis=2)
    return np.asarray(taken.sum(axis=0) > layers_of_room * (1 + 1e-9))


def _layer_bytes(screen: Screen, mode: Recompute, held: FloatArray) -> FloatArray:
    """What a layer of each kind (first axis) takes on ranks (last axis) that hold `held` micro-batches."""
    parts = [screen.table.layers[kind, mode] for kind in screen.pricing.model.kinds]
    return np.array([screen.static_bytes(p)[:, None] + held * screen.part(p, "live_bytes")[:, None] for p in parts])


def _free_bytes(screen: Screen, modes: Sequence[Recompute], num_ranks: int) -> FloatArray:
    """What each rank (columns) has for layers of any kind in any of `modes`, at most."""
    layers, kinds = screen.table.layers, screen.pricing.model.kinds
    return screen.free_bytes(_least([layers[kind, mode] for kind in kinds for mode in modes]), num_ranks)


def _least(parts: Sequence[PartCost]) -> PartCost:
    """A layer that costs no more than any of `parts`, in any respect that the bounds look at."""

    def least(quantity: str) -> Number:
        return reduce(np.minimum, [np.asarray(getattr(part, quantity)) for part in parts])

    names = ("live_bytes", "transient_bytes", "parameters", "expert_parameters")
    return PartCost(forward_s=least("total_s"), **{name: least(name) for name in names})


def _trip_s(screen: Screen, base: Recompute, orders: Orders) -> FloatArray:
    """Seconds of one micro-batch through the ranks before each rank (columns) and back, at least.

    The ranks between the first and this one hold full chunks where stages interleave, a layer at least elsewhere; the
    first may hold none where the trainer allows that. Zero where the way back need not be over.
    """
    shape = screen.shape
    rank = np.arange(orders.full.shape[1])[None, :]
    quickest = screen.layer_s(base).min(axis=0)[:, None]
    first = 0.0 if screen.pricing.runtime.head_only_stage else quickest
    first = first + screen.part(screen.table.embedding, "total_s")[:, None]
    between = np.maximum(rank - 1, 0) * quickest * screen.chunk_layers[:, None]
    hops = 2 * rank * np.broadcast_to(screen.p2p_s, len(screen.kernel))[:, None]
    trip = np.where((rank > 0) & (rank < np.asarray(shape.pp)[:, None]), first + between + hops, 0.0)
    return np.asarray(np.where(orders.splits[:, None], 0.0, trip))


def _holding_bound_s(
    screen: Screen,
    layer: tuple[PartCost, PartCost],
    count: int,
    whole: bool,
    held: FloatArray,
    beside_s: FloatArray,
    least_s: FloatArray,
) -> FloatArray:
    """The same for `count` layers that cost layer[0], or layer[1] where recomputed whole; `least_s` at least.

    Ranks (columns) hold `held` micro-batches, and `beside_s` of a micro-batch's seconds are for no layer.
    """
    plain, full = layer
    seconds = screen.part(plain, "total_s")[:, None]
    again = np.maximum(screen.part(full, "total_s")[:, None] - seconds, 1e-12)
    static, live = screen.static_bytes(plain)[:, None], screen.part(plain, "live_bytes")[:, None]
    saved = np.maximum(live - screen.part(full, "live_bytes")[:, None], 1.0)
    free = screen.free_bytes(plain, held.shape[1])
    roomy = np.floor(free / (static + held * live))
    # layers = (busy + again·free/saved-bytes-in-flight) / (seconds + again·bytes per layer / saved bytes): memory binds
    rate = again / (held * saved)
    tight = np.floor(free / (static + held * (live - saved))) if whole else roomy
    exists = np.arange(held.shape[1])[None, :] < np.asarray(screen.shape.pp)[:, None]
    low, high = least_s, np.maximum(count * (seconds + again)[:, 0] + beside_s.max(axis=1), least_s)
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        busy = np.maximum(middle[:, None] - beside_s, 0.0)
        layers = busy / seconds
        if whole:
            layers = np.minimum(layers, np.maximum((busy + rate * free) / (seconds + rate * (static + held * live)), 0))
        layers = np.floor(np.minimum(layers, tight) + 1e-9)
        enough = (layers * exists).sum(axis=1) >= count
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where((tight * exists).sum(axis=1) < count, np.inf, low)


def schedule_bound_s(screen: Screen, busiest_s: FloatArray, base: Recompute, orders: Orders) -> FloatArray:
    """From the busiest rank to the step: M · busiest, and for 1F1B the fill and drain.

    1F1B, M > pp, with stages no longer than `busiest`: T ≥ (M − 1 − pp) · busiest + 2 · work, from T ≥ M·t_r + Σ_{q<r}
    t_q + [2·Σ_{q>r} t_q − (pp − 1 − r)·t_r]⁺ at the busiest rank, since all stages together fall short of pp · busiest
    by no more than pp · busiest − work. For any M, with one stage per rank, a rank's first backward comes after the
    whole trip and M − 1 more follow: T ≥ work + (M − 1)·b_r, with b_r ≥ β·t_r, the least share that the backward has of
    any part. Where M ≤ pp only the first e = pp − M + 1 ranks may be that quiet; what the others hold comes twice: T ≥
    2·work − Σ_{r<e} t_r, both together T ≥ work · (1 + n/(n + e)), n = (M − 1)·β. A trip has 2·(pp − 1) transfers.
    """
    shape = screen.shape
    pps, work, steps = np.asarray(shape.pp), screen.work_s(base), np.asarray(shape.num_microbatches)
    busiest_s = np.where(np.isfinite(busiest_s), busiest_s, NEVER_S)
    later = (steps - 1) * _backward_share(screen, base)
    few = np.maximum(work + later * busiest_s, work * (1 + later / np.maximum(later + pps - steps + 1, 1.0)))
    plain = np.where(steps > pps, (steps - 1 - pps) * busiest_s + 2 * work, few) + 2 * (pps - 1) * screen.p2p_s
    plain = np.where(pps == 1, steps * work, plain)
    trip = _trips_bound_s(screen, base, orders)
    least = np.maximum(np.maximum(steps * busiest_s, trip), np.where(orders.plain, plain, 0.0))
    return np.where(busiest_s >= NEVER_S, np.inf, least)


def _trips_bound_s(screen: Screen, base: Recompute, orders: Orders) -> FloatArray:
    """One micro-batch's way through all stages and back, and M − 1 more passes of the longest stage, there or back."""
    shape, counts = screen.shape, screen.pricing.kind_counts
    num_stages = np.asarray(shape.pp) * np.asarray(shape.vpp)
    hops = num_stages - np.where(screen.folded, np.asarray(shape.vpp), 1)
    trip = np.where(orders.splits, screen.trip_s(base, splits_backward=True), screen.work_s(base))

    def longest_s(quantity: str) -> FloatArray:
        parts = [n * screen.part(screen.table.layers[kind, base], quantity) for kind, n in counts.items()]
        return np.asarray(np.sum(parts, axis=0) / num_stages)

    there, back = longest_s("forward_total_s"), longest_s("input_grad_total_s")
    back = back + np.where(orders.splits, 0.0, longest_s("weight_grad_s"))
    later = (np.asarray(shape.num_microbatches) - 1) * np.maximum(there, back)
    return np.asarray(trip + 2 * hops * screen.p2p_s + later)


def _backward_share(screen: Screen, base: Recompute) -> FloatArray:
    """The least share of its seconds that any layer, the embedding or the head spends in the backward."""
    table = screen.table
    parts = [table.layers[kind, base] for kind in screen.pricing.model.kinds] + [table.embedding, table.head]
    shares = [screen.part(part, "backward_total_s") / screen.part(part, "total_s") for part in parts]
    return np.asarray(np.min(shares, axis=0))


def chunked_bound_s(screen: Screen, base: Recompute, whole: Whole, orders: Orders, trips_s: FloatArray) -> FloatArray:
    """Where stages interleave: what each rank takes with its equal chunks, and those without an end on average.

    A rank of n layers (vpp · chunk, without those chunks that may be shorter) takes no less than the n quickest of the
    model, nor than the fewest of each kind that the order of layers leaves it; it recomputes what its memory forces it
    to (one_count: what that of any rank does), and has T ≥ M · its seconds + the trip of one micro-batch through the
    ranks before it. Zero for other nodes, infinite where the layers do not fit.
    """
    held, full = orders.in_flight, orders.full
    steps = np.asarray(screen.shape.num_microbatches)[:, None]
    counts = np.array(list(screen.pricing.kind_counts.values()))
    num_layers = _fewest_layers(screen, full)
    layer_s, fewest = screen.layer_s(base)[:, :, None], _fewest_of_kinds(screen, full.shape[1])

    def at_least(of_layer: FloatArray) -> FloatArray:
        together: FloatArray = (fewest * of_layer).sum(axis=0)
        return np.maximum(least_sum(of_layer, counts, num_layers), together)

    modes: tuple[Recompute, ...] = (base,) if whole == "none" else (base, FULL)
    free = _free_bytes(screen, modes, held.shape[1])
    each_s = steps * (at_least(layer_s) + screen.rank_ends_s(held.shape[1])) + trips_s
    if whole != "none":
        saved, again = screen.layer_s(base, "live_bytes"), screen.layer_s(FULL) - screen.layer_s(base)
        saved = np.maximum((saved - screen.layer_s(FULL, "live_bytes")).max(axis=0), 1.0)
        lacking = np.maximum(at_least(_layer_bytes(screen, base, held)) - free, 0.0)
        forced = np.ceil(lacking / (held * saved[:, None]) - 1e-9)
        if whole == "one_count":
            # in every chunk, the ends' shorter ones among them
            of_each = np.ceil(forced.max(axis=1, initial=0.0) / np.asarray(screen.shape.vpp) - 1e-9)
            of_each = np.minimum(of_each, screen.chunk_layers)
            forced = np.maximum(forced, (of_each / screen.chunk_layers)[:, None] * num_layers)
        each_s = each_s + steps * forced * np.maximum(again.min(axis=0), 0.0)[:, None]
    each_s = np.where(at_least(_layer_bytes(screen, modes[-1], held)) > free * (1 + 1e-9), np.inf, each_s)
    num_full = np.maximum(full.sum(axis=1), 1)[:, None]
    together_s = least_sum(layer_s, counts, np.where(full, num_layers, 0.0).sum(axis=1)[:, None]) / num_full
    mean_s = (steps * together_s)[:, 0] + (trips_s * full).sum(axis=1) / num_full[:, 0]
    busiest_s = np.where(num_layers > 0, each_s, 0.0).max(axis=1, initial=0.0)
    return np.where(np.asarray(screen.shape.vpp) > 1, np.maximum(busiest_s, mean_s), 0.0)


def _fewest_layers(screen: Screen, full: npt.NDArray[np.bool_]) -> FloatArray:
    """Layers of each rank (columns) in chunks that are all equal; none beyond a node's ranks."""
    vpp, rank = np.asarray(screen.shape.vpp)[:, None], np.arange(full.shape[1])[None, :]
    shorter = np.where(full, 0, np.where(screen.folded, 2, 1)[:, None])
    exists = rank < np.asarray(screen.shape.pp)[:, None]
    return np.where(exists, np.maximum(vpp - shorter, 0) * screen.chunk_layers[:, None], 0.0)


def _fewest_of_kinds(screen: Screen, num_ranks: int) -> FloatArray:
    """Layers of each kind (rows) that the ranks (last axis) of each node hold at least, where stages interleave."""
    model, shape, empty_ends = screen.pricing.model, screen.shape, screen.pricing.runtime.head_only_stage
    fewest = np.zeros((len(model.kinds), len(screen.kernel), num_ranks))
    columns = [np.broadcast_to(each, len(screen.kernel)) for each in (shape.pp, shape.vpp, screen.folded)]
    distinct, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
    for number, (pp, vpp, folded) in enumerate(distinct.T.tolist() if len(model.kinds) > 1 else ()):
        if vpp > 1:
            of_ranks = fewest_of_kinds(model.layers, v_placement(pp) if folded else tuple(range(pp)) * vpp, empty_ends)
            fewest[:, which == number, :pp] = of_ranks[:, None, :]
    return fewest
