"""Lower bounds of the seconds that a step takes outside its pipeline, for thousands of nodes at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.layout.outside_pipeline import reduce_overlap_fraction
from planner.physics.cost import PartCost
from planner.search.priced_shapes import PartName, PricedShapes, least_sum
from planner.shape import FloatArray, Number, Shape
from planner.specs.training import Recompute


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
    layers, counts = pricing.model.num_hidden_layers, np.array(list(pricing.kind_counts.values()))
    pps, vpps, steps = np.asarray(shape.pp, dtype=float), np.asarray(shape.vpp), np.asarray(shape.num_microbatches)
    layer_exchange_s = np.array(
        [exchange_s_of(shapes, kind, table.layers[kind, exchanging]) for kind in pricing.kind_counts]
    )
    embedding = exchange_s_of(shapes, "embedding", table.embedding)
    last = exchange_s_of(shapes, "head", table.head)
    if table.mtp is not None:
        last = last + exchange_s_of(shapes, "mtp", table.mtp_recomputed.get(exchanging, table.mtp))
    alone = counts @ layer_exchange_s + embedding + last
    ends_s = embedding + np.where(shapes.folded, np.minimum(last, 0.0), 0.0)
    work, slowest = shapes.work_s(base) - shapes.ends_s, shapes.layer_s(base).max(axis=0)
    others = np.maximum(pps - 1, 1)

    def step_s(num_layers: FloatArray) -> FloatArray:
        held_by_others_s = steps * (work - num_layers * slowest) / others
        exposed_s = ends_s + least_sum(layer_exchange_s, counts, num_layers)
        return np.asarray(np.maximum(pipeline_s, held_by_others_s) + np.maximum(exposed_s, 0.0))

    fewest = np.maximum(vpps - 1 - shapes.folded, 0) * np.ceil(layers / (pps * vpps))
    breaks = [(work - pipeline_s * others / steps) / slowest]
    before, exposed_s = np.zeros_like(work), ends_s
    order = np.argsort(layer_exchange_s, axis=0)
    for more_s, count in zip(np.take_along_axis(layer_exchange_s, order, axis=0), counts[order], strict=True):
        until_positive = np.where(more_s > 0, -exposed_s / np.where(more_s > 0, more_s, 1.0), count)
        breaks.append(before + np.clip(until_positive, 0, count))
        before, exposed_s = before + count, exposed_s + count * more_s
    piped = np.min([step_s(np.clip(num_layers, fewest, layers)) for num_layers in (fewest, *breaks)], axis=0)
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
    gradients = reduce_s - runtime.fsdp_overlap_fraction * backward
    weights = 2 * gather_s + reduce_s - runtime.fsdp_overlap_fraction * (forward + backward)
    return _each_time(shape, once / np.asarray(shape.vpp), gradients, gathered, weights)


def showing_s(shapes: PricedShapes, name: PartName, part: PartCost) -> FloatArray:
    """Seconds of the data-parallel exchange of one part that show however much is hidden, over all micro-batches."""
    fraction = shapes.pricing.runtime.contention_fraction
    reduce_s, gather_s = (fraction * seconds for seconds in shapes.exchanges_s(name, part))
    return _each_time(shapes.shape, reduce_s + gather_s, reduce_s, gather_s, reduce_s + 2 * gather_s)


def _each_time(shape: Shape, once: Number, gradients: Number, gathered: Number, weights: Number) -> FloatArray:
    """Seconds of exchange in a step.

    Without a pipeline they are M · gradients + gathered under ZeRO-2 and M · weights under ZeRO-3; otherwise `once`.
    """
    steps, zero, alone = np.asarray(shape.num_microbatches), np.asarray(shape.zero_stage), np.asarray(shape.pp) == 1
    return np.asarray(
        np.select([alone & (zero == 2), alone & (zero == 3)], [steps * gradients + gathered, steps * weights], once)
    )


def all_optimizers_s(shapes: PricedShapes) -> FloatArray:
    """Seconds that the optimizer takes on the shards of the whole model, one rank's after the other's."""
    pricing, table = shapes.pricing, shapes.table
    counted = [(table.layers[kind, "none"], count) for kind, count in pricing.kind_counts.items()] + [(table.head, 1)]
    total = np.zeros(len(shapes.kernel))
    for part, count in counted:
        total = total + count * pricing.update_s(shapes.counted(part), shapes.shape)
    return np.asarray(total)
