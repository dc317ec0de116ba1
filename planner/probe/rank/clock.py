"""A rank's clock, the record of a step that is read from it, and one time zero for the clocks of all ranks.

No rank leaves a sum over all ranks before every rank has entered it. Let a rank's clock show θ more than rank 0's. Each
sum then bounds θ on both sides, with the times at which the two ranks entered and left it:

    entered − left₀  ≤  θ  ≤  left − entered₀

Several sums leave a narrow interval. Its middle is taken for θ, and half its width is the most by which that is wrong:
about the seconds of one sum, for GPUs read by events on their streams, so that no host's delay is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.schedule.actions import Action


class RankClock:
    """The clock of a rank: the host's seconds, or on a GPU events on its stream, which are read after the step."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")
        self.origin: Any = None
        """The mark from which seconds are read."""
        self.zero_s = 0.0
        """Time zero, in seconds after the origin."""

    def mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Set the time zero from which marks count."""
        if self.is_cuda:
            torch.cuda.synchronize()
        self.origin, self.zero_s = self.mark(), 0.0

    def seconds(self, mark: Any) -> float:
        """Seconds from time zero to a mark; waits for the GPU."""
        if not self.is_cuda:
            return float(mark - self.origin) - self.zero_s
        mark.synchronize()
        return float(self.origin.elapsed_time(mark)) / 1e3 - self.zero_s


class ActionTimes(NamedTuple):
    """The times of one action, in seconds from the start of the step."""

    action: Action
    ready_s: float
    """The rank was free and began to wait for the action's input."""
    start_s: float
    end_s: float


@dataclass(slots=True)
class StepRecord:
    """The record of one step of a rank."""

    marks: list[tuple[Action, Any, Any, Any]] = field(default_factory=list)
    """Each action with the clock's marks of when it was ready, started and ended."""
    actions: list[ActionTimes] = field(default_factory=list)
    """The same actions in seconds, filled when the marks are read."""
    losses: list[Tensor] = field(default_factory=list)
    """The weighted loss of each micro-batch, on a rank that holds the head."""
    peak_in_flight: int = 0
    """The largest number of (virtual stage, micro-batch) activations held at once."""

    @property
    def loss(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0

    def read(self, clock: RankClock, on_action: Callable[[str], None]) -> None:
        """Wait for the marks and read them. If a GPU never reaches a mark, `on_action` was last called with that mark's
        action."""
        for action, ready, start, end in self.marks:
            on_action(f"{action} (waiting)")
            ready_s, start_s = clock.seconds(ready), clock.seconds(start)
            on_action(f"{action} (computing)")
            self.actions.append(ActionTimes(action, ready_s, start_s, clock.seconds(end)))


NUM_SUMS = 10
"""Sums that bound a clock's offset; the quickest of them decide."""

Times = Sequence[tuple[float, float]]
"""The times at which a rank entered and left each sum, by its own clock."""


def start_together(clock: RankClock, rank: int, device: str, is_shared: bool) -> float | None:
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


def _offset(clock: RankClock, rank: int, device: str) -> tuple[float, float | None]:
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
