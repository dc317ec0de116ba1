"""Interleaved splits whose inner chunks differ; they are tried around the best layout if the trainer allows them.

A trainer allows them if it takes a layout string. The search proves its answer among splits into equal chunks, of which
only the first and the last may be shorter. The rank that holds the head then often needs fewer layers than such chunks
can give it. Here every rank gets the number of layers that makes the ranks' seconds about equal, whatever the lengths
of its chunks, and single layers move as long as that helps. These splits are judged by replay, like all others; nothing
is proven about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.layout.candidate import Candidate, Split
from planner.physics.cost import PartCost
from planner.schedule.orders import SCHEDULES
from planner.search.bounds import busiest_rank_s, schedule_bound_s
from planner.search.frontier import Nodes
from planner.shape import FloatArray

SHAPES = 6
"""Number of shapes that are tried, the most promising first."""
NEAR = 1.01
"""The largest step of a split whose layers are moved, over the best step."""
MOVES = 24
"""Most replays of moved layers in one shape."""


def level_guess_s(nodes: Nodes) -> FloatArray:
    """Seconds of each row if its ranks held any number of layers, none recomputed; infinite without interleaving."""
    shapes = nodes.shapes
    no_trips = np.zeros(nodes.orders.full.shape)
    busiest = busiest_rank_s(shapes, "none", False, nodes.orders, no_trips)
    least_s = schedule_bound_s(shapes, busiest, "none", nodes.orders) + shapes.tail_s
    interleaves = np.array([SCHEDULES[name].bound == "interleaved" for name in nodes.schedules], dtype=bool)
    return np.asarray(np.where(interleaves, least_s, np.inf))


def level_split(candidate: Candidate) -> Split:
    """A split whose ranks take about as long as each other: the rank that takes least gets the next layer.

    A rank's chunks are as equal as possible. If they cannot be equal, the first rank has fewer layers in its first
    chunk and the other ranks in their last; a layer too many is in the rank's first chunk.
    """
    shape, model, table = candidate.shape, candidate.pricing.model, candidate.table
    pp, vpp, layers = int(shape.pp), int(shape.vpp), model.num_hidden_layers
    base = candidate.split.base
    counted = candidate.pricing.kind_counts
    mean_s = sum(float(table.layers[kind, base].total_s) * count for kind, count in counted.items()) / layers
    beside = np.zeros(pp)
    beside[0] += float(table.embedding.total_s)
    last: list[PartCost] = [table.head, *([table.mtp] if table.mtp is not None else [])]
    beside[-1] += sum(float(part.total_s) for part in last)
    may_be_empty = candidate.pricing.runtime.head_only_stage
    num_layers = np.full(pp, vpp)
    if may_be_empty:
        num_layers[[0, -1]] -= 1
    for _ in range(layers - int(num_layers.sum())):
        num_layers[int(np.argmin(beside + (num_layers + 1) * mean_s))] += 1
    chunk = max(round(layers / (pp * vpp)), 1)
    rows = [_chunks(int(count), vpp, chunk, first=rank == 0, may_be_empty=may_be_empty and rank in (0, pp - 1))
            for rank, count in enumerate(num_layers)]  # fmt: skip
    return Split(tuple(rows[rank][row] for row in range(vpp) for rank in range(pp)), base)


def _chunks(count: int, vpp: int, chunk: int, *, first: bool, may_be_empty: bool) -> list[int]:
    """Layers of each chunk of a rank that holds `count` layers, as near to `chunk` each as possible."""
    counts = [chunk] * vpp
    order = list(range(vpp)) if first else list(reversed(range(vpp)))
    while sum(counts) > count:
        row = next(row for row in order if counts[row] > (0 if may_be_empty and row == order[0] else 1))
        counts[row] -= 1
    row = 0
    while sum(counts) < count:
        counts[row % vpp] += 1
        row += 1
    return counts


def improved(candidate: Candidate, best_s: float) -> Candidate:
    """The candidate after moves of single layers; each move makes it faster and leaves it fitting."""
    if candidate.step_s > NEAR * best_s:
        return candidate
    left = MOVES
    while left > 0:
        for moved in _moves(candidate):
            left -= 1
            if moved.fits and moved.step_s < candidate.step_s * (1 - 1e-4):
                candidate = moved
                break
            if left <= 0:
                return candidate
        else:
            return candidate
    return candidate


def _moves(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with one layer of its busiest rank on the idlest one, from each of its chunks, the last first."""
    busy_s = [float(cost.total_s) for cost in candidate.rank_costs]
    busiest, idlest = int(np.argmax(busy_s)), int(np.argmin(busy_s))
    may_be_empty = candidate.pricing.runtime.head_only_stage
    counts, last = candidate.split.counts, len(candidate.split.counts) - 1
    sources = [stage for stage, rank in enumerate(candidate.placement) if rank == busiest]
    target = candidate.placement.index(idlest)
    for source in (sources[-1], *sources[:-1]):
        if counts[source] > (0 if may_be_empty and source in (0, last) else 1):
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            yield candidate.with_split(replace(candidate.split, counts=tuple(moved)))
