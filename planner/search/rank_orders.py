"""The orders in which the ranks of a shape may be numbered, as far as the cluster's tiers tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.shape import RANK_ORDERS, Shape
from planner.specs.cluster import ClusterSpec

OWN, DP_OUTERMOST = RANK_ORDERS


def with_rank_orders(
    shape: Shape, cluster: ClusterSpec, orders: tuple[str, ...], is_legal: Callable[[Shape], Any]
) -> Shape:
    """The shapes (arrays) in each of the `orders` that may be the faster one.

    Data parallelism outermost brings stages closer together and replicas further apart. It is left out where no tier
    tells the stages' places apart: where none is wider than one stage of a replica and narrower than all ranks.
    """
    if DP_OUTERMOST not in orders or OWN not in orders or not np.size(shape.tp):
        return shape
    sizes = [tier.num_gpus for tier in cluster.tiers[:-1] if tier.num_gpus is not None]
    within, whole = np.asarray(shape.tp * shape.cp), np.asarray(shape.num_ranks)
    differs = np.zeros(np.shape(shape.tp), dtype=bool)
    for size in sizes:
        differs |= (within < size) & (size < whole)
    differs &= (np.asarray(shape.pp) > 1) & (np.asarray(shape.dp) > 1)
    other = replace(shape, dp_outermost=np.ones_like(shape.tp)).take(differs)
    other = other.take(np.broadcast_to(is_legal(other), np.shape(other.tp)))
    columns = {
        name: np.concatenate([np.broadcast_to(getattr(part, name), np.shape(part.tp)) for part in (shape, other)])
        for name in Shape.__slots__
    }
    return Shape(**columns)
