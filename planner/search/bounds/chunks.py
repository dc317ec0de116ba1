"""A lower bound of the pipeline with interleaved stages: ranks take equal chunks, as the integer program cuts them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.schedule.zero_bubble import v_placement
from planner.search.bounds.memory import free_bytes, layer_bytes
from planner.search.bounds.orders import Orders
from planner.search.ilp.node import FULL, Whole
from planner.search.priced_shapes import PricedShapes, least_sum
from planner.search.splits.equal_chunks import fewest_of_kinds
from planner.shape import FloatArray
from planner.specs.training import Recompute


def chunked_bound_s(
    shapes: PricedShapes, base: Recompute, whole: Whole, orders: Orders, trips_s: FloatArray
) -> FloatArray:
    """A lower bound of the pipeline's seconds for nodes whose stages interleave: ranks hold equal chunks of layers.

    A rank holds n layers: vpp · chunk, without the chunks that may be shorter. It takes no less than the n quickest
    layers of the model, and no less than the fewest layers of each kind that the order of layers leaves it. It
    recomputes the layers that its memory forces it to (with one_count: that the memory of any rank forces it to). Then
    T ≥ M · its seconds + the trip of one micro-batch through the ranks before it. The same holds on average over the
    ranks without the first and the last stage. The bound is 0 for other nodes, and infinite if the layers do not fit.
    """
    in_flight, full = orders.in_flight, orders.full
    steps = np.asarray(shapes.shape.num_microbatches)[:, None]
    counts = np.array(list(shapes.pricing.kind_counts.values()))
    num_layers = _fewest_layers(shapes, full)
    layer_s, fewest = shapes.layer_s(base)[:, :, None], _fewest_of_kinds(shapes, full.shape[1])

    def at_least(of_layer: FloatArray) -> FloatArray:
        together: FloatArray = (fewest * of_layer).sum(axis=0)
        return np.maximum(least_sum(of_layer, counts, num_layers), together)

    modes: tuple[Recompute, ...] = (base,) if whole == "none" else (base, FULL)
    free = free_bytes(shapes, modes, in_flight.shape[1])
    rank_s = steps * (at_least(layer_s) + shapes.rank_ends_s(in_flight.shape[1])) + trips_s
    if whole != "none":
        saved, again = shapes.layer_s(base, "live_bytes"), shapes.layer_s(FULL) - shapes.layer_s(base)
        saved = np.maximum((saved - shapes.layer_s(FULL, "live_bytes")).max(axis=0), 1.0)
        lacking = np.maximum(at_least(layer_bytes(shapes, base, in_flight)) - free, 0.0)
        forced = lacking / (in_flight * saved[:, None])
        if whole != "any_modules":  # a set of modules saves a part of every layer
            forced = np.ceil(forced - 1e-9)
        if whole == "one_count":
            # every chunk recomputes the same number of layers, the shorter ones at the ends included
            per_chunk = np.ceil(forced.max(axis=1, initial=0.0) / np.asarray(shapes.shape.vpp) - 1e-9)
            per_chunk = np.minimum(per_chunk, shapes.chunk_layers)
            forced = np.maximum(forced, (per_chunk / shapes.chunk_layers)[:, None] * num_layers)
        rank_s = rank_s + steps * forced * np.maximum(again.min(axis=0), 0.0)[:, None]
    rank_s = np.where(at_least(layer_bytes(shapes, modes[-1], in_flight)) > free * (1 + 1e-9), np.inf, rank_s)
    num_full = np.maximum(full.sum(axis=1), 1)[:, None]
    together_s = least_sum(layer_s, counts, np.where(full, num_layers, 0.0).sum(axis=1)[:, None]) / num_full
    mean_s = (steps * together_s)[:, 0] + (trips_s * full).sum(axis=1) / num_full[:, 0]
    busiest_s = np.where(num_layers > 0, rank_s, 0.0).max(axis=1, initial=0.0)
    return np.where(np.asarray(shapes.shape.vpp) > 1, np.maximum(busiest_s, mean_s), 0.0)


def _fewest_layers(shapes: PricedShapes, full: npt.NDArray[np.bool_]) -> FloatArray:
    """Layers that each rank (columns) holds in its full chunks; 0 for columns beyond a node's ranks."""
    vpp, rank = np.asarray(shapes.shape.vpp)[:, None], np.arange(full.shape[1])[None, :]
    shorter = np.where(full, 0, np.where(shapes.folded, 2, 1)[:, None])
    exists = rank < np.asarray(shapes.shape.pp)[:, None]
    return np.where(exists, np.maximum(vpp - shorter, 0) * shapes.chunk_layers[:, None], 0.0)


def _fewest_of_kinds(shapes: PricedShapes, num_ranks: int) -> FloatArray:
    """The fewest layers of each kind (rows) on each rank (last axis) of each node; 0 without interleaving."""
    model, shape, empty_ends = shapes.pricing.model, shapes.shape, shapes.pricing.runtime.head_only_stage
    fewest = np.zeros((len(model.kinds), len(shapes.kernel), num_ranks))
    columns = [np.broadcast_to(axis, len(shapes.kernel)) for axis in (shape.pp, shape.vpp, shapes.folded)]
    distinct, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
    for number, (pp, vpp, folded) in enumerate(distinct.T.tolist() if len(model.kinds) > 1 else ()):
        if vpp > 1:
            on_ranks = fewest_of_kinds(model.layers, v_placement(pp) if folded else tuple(range(pp)) * vpp, empty_ends)
            fewest[:, which == number, :pp] = on_ranks[:, None, :]
    return fewest
