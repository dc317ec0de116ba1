"""What the schedules of nodes mean for their ranks, as the bounds look at them: rows of nodes, columns of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.schedule.orders import SCHEDULES, chunks_in_flight, in_flight_microbatches, placement
from planner.shape import FloatArray


@dataclass(frozen=True, slots=True)
class Orders:
    """What the schedules of nodes (rows) mean for their ranks (columns)."""

    plain: npt.NDArray[np.bool_]
    """1F1B without interleaving, or no pipeline."""
    splits: npt.NDArray[np.bool_]
    """Weight gradients may follow the last input gradient, so that the way back need not be over when a rank is."""
    in_flight: FloatArray
    """Micro-batches that each rank holds at least; 1 beyond a node's ranks."""
    least_in_flight: FloatArray
    """The same for a layer that may be in any of a rank's chunks."""
    more_in_flight: FloatArray
    """Micro-batches beyond these, added up over the chunks that hold a layer at least."""
    full: npt.NDArray[np.bool_]
    """Ranks of chunks that are all equal: where stages interleave, those without the first and the last stage."""

    def take(self, index: npt.NDArray[np.int64]) -> Orders:
        """The rows at `index`."""
        return Orders(**{column.name: getattr(self, column.name)[index] for column in fields(self)})


Kinds = Literal["one", "in runs", "in a pattern"]
"""How a model's layers differ: not at all, in a few runs of equal ones, or in a pattern that repeats."""


def orders_of(nodes: Sequence[tuple[str, int, int, int]], kinds: Kinds = "one") -> Orders:
    """The orders of nodes given as (schedule, pp, vpp, num_microbatches), for layers of one kind or several."""
    width = max((pp for _, pp, _, _ in nodes), default=1)
    in_flight, full = np.ones((len(nodes), width)), np.zeros((len(nodes), width), dtype=bool)
    least, more = np.ones((len(nodes), width)), np.zeros((len(nodes), width))
    for row, (name, pp, vpp, microbatches) in enumerate(nodes):
        in_flight[row, :pp] = _least_in_flight(name, pp, vpp, microbatches, kinds)
        least[row, :pp] = _least_in_flight(name, pp, vpp, microbatches, "in a pattern")
        if vpp > 1 and not SCHEDULES[name].splits_backward:
            for rank, chunks in enumerate(chunks_in_flight(name, pp, vpp, microbatches)):
                filled_chunks = chunks[1:] if rank == 0 else chunks
                more[row, rank] = sum(filled_chunks) - len(filled_chunks) * least[row, rank]
        if vpp > 1:
            ranks = placement(name, pp, vpp)
            full[row, :pp] = True
            full[row, [ranks[0], ranks[-1]]] = False
    return Orders(
        plain=np.array([name in ("none", "1f1b") for name, *_ in nodes], dtype=bool),
        splits=np.array([SCHEDULES[name].splits_backward for name, *_ in nodes], dtype=bool),
        in_flight=in_flight,
        least_in_flight=least,
        more_in_flight=more,
        full=full,
    )


def _least_in_flight(name: str, pp: int, vpp: int, num_microbatches: int, kinds: Kinds) -> Sequence[float]:
    """As the schedule has it where that is a formula; else what all of them hold: min(M, pp − r), or 1 if frugal.

    Where stages interleave a rank holds most of its first chunk. That may be missing on the first rank, and keep fewer
    bytes than the others on any rank if layers differ: then the other chunks' mean counts; in a pattern any chunk may
    keep the fewest bytes: then the least counts.
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
