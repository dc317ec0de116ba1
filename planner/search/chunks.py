"""What the order of a model's layers makes of equal chunks: which kinds a rank cannot help holding."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.physics.shape import FloatArray
from planner.specs.model import LayerKind


@cache
def fewest_of_kinds(layers: tuple[LayerKind, ...], pp: int, vpp: int, folded: bool, empty_ends: bool) -> FloatArray:
    """The fewest layers of each kind (rows, as they first come) on each rank (columns) over all legal splits.

    Legal as in the integer program's row 3: chunks are equal, but for the first and the last, which may be shorter
    (empty, where `empty_ends`). Chunk c of rank r is stage c·pp + r, or, where the pipeline is `folded`, every second
    time it comes back from the last rank to the first. Zeros where no split is legal.
    """
    stages, least = pp * vpp, 0 if empty_ends else 1
    stage = np.arange(stages)
    rank = np.where(folded & (stage // pp % 2 == 1), pp - 1 - stage % pp, stage % pp)
    among_first = np.array([np.cumsum([False, *(held == kind for held in layers)]) for kind in dict.fromkeys(layers)])
    fewest = np.full((len(among_first), pp), len(layers))
    chunk = -(-len(layers) // stages)
    while (missing := stages * chunk - len(layers)) <= 2 * (chunk - least):
        at_first = np.arange(max(0, missing - chunk + least), min(missing, chunk - least) + 1)
        ends = np.minimum((stage + 1) * chunk - at_first[:, None], len(layers))
        held = np.diff(among_first[:, ends], axis=-1, prepend=0)
        of_splits = np.stack([held[:, :, rank == r].sum(axis=-1) for r in range(pp)], axis=-1)
        fewest = np.minimum(fewest, of_splits.min(axis=1))
        chunk += 1
    return np.where(chunk > -(-len(layers) // stages), fewest, 0)
