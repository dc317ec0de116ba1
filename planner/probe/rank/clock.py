"""A rank's clock, and the record of a step that is read from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from planner.schedule.actions import Action


class Clock:
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

    def read(self, clock: Clock, on_action: Callable[[str], None]) -> None:
        """Wait for the marks and read them. If a GPU never reaches a mark, `on_action` was last called with that mark's
        action."""
        for action, ready, start, end in self.marks:
            on_action(f"{action} (waiting)")
            ready_s, start_s = clock.seconds(ready), clock.seconds(start)
            on_action(f"{action} (computing)")
            self.actions.append(ActionTimes(action, ready_s, start_s, clock.seconds(end)))
