"""Properties of the nodes' schedules that the bounds need, as arrays with rows of nodes and columns of ranks."""

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
    """Properties of the schedules of nodes (rows), for each of their ranks (columns)."""

    plain: npt.NDArray[np.bool_]
    """True for 1F1B without interleaving, and for no pipeline."""
    splits: npt.NDArray[np.bool_]
    """True if weight gradients may follow the last input gradient: a rank may then end after the way back is over."""
    in_flight: FloatArray
    """The fewest micro-batches that each rank holds at its peak; 1 in columns beyond a node's ranks."""
    full: npt.NDArray[np.bool_]
    """True for a rank with full chunks only: if stages interleave, every rank without the first and the last stage."""

    def take(self, index: npt.NDArray[np.int64]) -> Orders:
        """The rows at `index`."""
        return Orders(**{column.name: getattr(self, column.name)[index] for column in fields(self)})


Kinds = Literal["one", "in runs", "in a pattern"]
"""How a model's layers differ: not at all, in a few runs of equal ones, or in a pattern that repeats."""


def orders_of(nodes: Sequence[tuple[str, int, int, int]], kinds: Kinds = "one") -> Orders:
    """The properties of nodes given as (schedule, pp, vpp, num_microbatches); `kinds` says how their layers differ."""
    width = max((pp for _, pp, _, _ in nodes), default=1)
    in_flight, full = np.ones((len(nodes), width)), np.zeros((len(nodes), width), dtype=bool)
    for row, (name, pp, vpp, microbatches) in enumerate(nodes):
        in_flight[row, :pp] = _least_in_flight(name, pp, vpp, microbatches, kinds)
        if vpp > 1:
            ranks = placement(name, pp, vpp)
            full[row, :pp] = True
            full[row, [ranks[0], ranks[-1]]] = False
    return Orders(
        plain=np.array([SCHEDULES[name].bound == "one_f_one_b" for name, *_ in nodes], dtype=bool),
        splits=np.array([SCHEDULES[name].splits_backward for name, *_ in nodes], dtype=bool),
        in_flight=in_flight,
        full=full,
    )


def _least_in_flight(name: str, pp: int, vpp: int, num_microbatches: int, kinds: Kinds) -> Sequence[float]:
    """The fewest micro-batches that each rank holds at its peak under a schedule.

    If the schedule has a formula, that is used. Otherwise it is what all such schedules hold: min(M, pp − r), or 1 if
    the schedule is frugal.

    If stages interleave, a rank has most micro-batches of its first chunk in flight. But the first rank may have no
    layer in that chunk, and if layers differ, the chunk may keep fewer bytes than the others on any rank; then the mean
    over the other chunks is taken. If layers repeat in a pattern, any chunk may keep the fewest bytes; then the least
    over the chunks is taken.
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
