"""Splits into equal chunks, of which the first and the last may be shorter: their lengths, and the layers of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, takewhile

import numpy as np

from planner.shape import FloatArray
from planner.specs.model import LayerKind


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
