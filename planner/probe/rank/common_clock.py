"""One time zero for the clocks of all ranks, on whatever hosts and GPUs they are, and how well they agree on it.

No rank leaves a sum over all ranks before every rank has entered it. Let a rank's clock show θ more than rank 0's. Each
sum then bounds θ on both sides, with the times at which the two ranks entered and left it:

    entered − left₀  ≤  θ  ≤  left − entered₀

Several sums leave a narrow interval. Its middle is taken for θ, and half its width is the most by which that is wrong:
about the seconds of one sum, for GPUs read by events on their streams, so that no host's delay is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from planner.probe.rank.clock import Clock

NUM_SUMS = 10
"""Sums that bound a clock's offset; the quickest of them decide."""

Times = Sequence[tuple[float, float]]
"""The times at which a rank entered and left each sum, by its own clock."""


def start_together(clock: Clock, rank: int, device: str, is_shared: bool) -> float | None:
    """Start the clocks of all ranks at the time at which the last one starts.

    Returns the most by which this rank's clock may be ahead of rank 0's or behind it; None if the ranks share a clock
    (`is_shared`), and on rank 0.
    """
    clock.origin = clock.mark() if clock.is_cuda else 0.0
    clock.zero_s = 0.0
    offset_s, error_s = (0.0, None) if is_shared else _offset(clock, rank, device)
    start = torch.tensor(clock.seconds(clock.mark()) - offset_s, dtype=torch.float64, device=device)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    clock.zero_s = float(start) + offset_s
    return error_s


def _offset(clock: Clock, rank: int, device: str) -> tuple[float, float | None]:
    """The seconds by which this rank's clock is ahead of rank 0's, and the most by which that is wrong."""
    token, marks = torch.zeros((), device=device), list[tuple[Any, Any]]()
    for _ in range(NUM_SUMS):
        entered = clock.mark()
        dist.all_reduce(token)
        marks.append((entered, clock.mark()))
    own = [(clock.seconds(entered), clock.seconds(left)) for entered, left in marks]
    first = torch.tensor(own, dtype=torch.float64, device=device)
    dist.broadcast(first, 0)
    return offset_of(own, [(entered_s, left_s) for entered_s, left_s in first.tolist()]) if rank else (0.0, None)


def offset_of(own: Times, first: Times) -> tuple[float, float]:
    """The seconds by which one rank's clock is ahead of the first rank's, and the most by which that is wrong."""
    least_s = max(entered_s - first_left_s for (entered_s, _), (_, first_left_s) in zip(own, first, strict=True))
    most_s = min(left_s - first_entered_s for (_, left_s), (first_entered_s, _) in zip(own, first, strict=True))
    return (least_s + most_s) / 2, abs(most_s - least_s) / 2
