"""Memory that layers need on each rank, and a test of whether all ranks together have it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from planner.physics.cost import PartCost
from planner.physics.stage_memory import relaxed_peak_bytes
from planner.search.bounds.orders import Orders
from planner.search.priced_shapes import PricedShapes
from planner.shape import FloatArray, Number
from planner.specs.training import Recompute


def exceeds_all_ranks(shapes: PricedShapes, modes: Sequence[Recompute], orders: Orders) -> npt.NDArray[np.bool_]:
    """True for a node whose layers, of several kinds, need more memory than all its ranks together have.

    A layer of kind κ needs needed[κ,r] = static + in flight · live bytes on rank r; mean[r] is the mean of all layers.
    Divide each rank's memory row by mean[r] and add the rows up:
    Σ_κ count_κ · min_r needed[κ,r] / mean[r] ≤ Σ_r free[r] / mean[r] holds for every split that fits.
    """
    in_flight, counts = orders.in_flight, np.array(list(shapes.pricing.kind_counts.values()))[:, None, None]
    needed = np.min([layer_bytes(shapes, mode, in_flight) for mode in modes], axis=0)
    mean = (counts * needed).sum(axis=0) / counts.sum()
    exists = np.arange(in_flight.shape[1])[None, :] < np.asarray(shapes.shape.pp)[:, None]
    free = free_bytes(shapes, modes, in_flight.shape[1])
    layers_of_room = np.where(exists, free / mean, 0.0).sum(axis=1)
    taken = counts[:, :, 0] * np.where(exists, needed / mean, np.inf).min(axis=2)
    return np.asarray(taken.sum(axis=0) > layers_of_room * (1 + 1e-9))


def layer_bytes(shapes: PricedShapes, mode: Recompute, in_flight: FloatArray) -> FloatArray:
    """Bytes that a layer of each kind (first axis) needs on ranks (last axis) with `in_flight` micro-batches."""
    parts = [shapes.table.layers[kind, mode] for kind in shapes.pricing.model.kinds]
    return np.array(
        [
            relaxed_peak_bytes(
                shapes.static_bytes(part)[:, None], in_flight * shapes.part(part, "live_bytes")[:, None], 0.0
            )
            for part in parts
        ]
    )


def free_bytes(shapes: PricedShapes, modes: Sequence[Recompute], num_ranks: int) -> FloatArray:
    """The most bytes that each rank (columns) has for layers of any kind in any of `modes`."""
    layers, kinds = shapes.table.layers, shapes.pricing.model.kinds
    return shapes.free_bytes(cheapest([layers[kind, mode] for kind in kinds for mode in modes]), num_ranks)


def cheapest(parts: Sequence[PartCost]) -> PartCost:
    """A layer that costs no more than any of `parts`, in any respect that the bounds look at."""

    def least(quantity: str) -> Number:
        return reduce(np.minimum, [np.asarray(getattr(part, quantity)) for part in parts])

    names = ("live_bytes", "transient_bytes", "parameters", "expert_parameters")
    return PartCost(forward_s=least("total_s"), **{name: least(name) for name in names})
