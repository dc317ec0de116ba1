"""How a plan is probed: the device, the size of the run, and what is judged."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.probe.run import Device
from planner.schedule.actions import Schedule

DEFAULT_TOLERANCE = 0.1
"""Of a prediction."""


class ProbeOptions(NamedTuple):
    """How to probe."""

    device: Device = "cpu"
    stages: Literal["all"] | int | None = None
    """One device, one stage at a time: all distinct ones, or one of them."""
    hidden_size: int = 64
    """Of the scaled-down model on the CPU."""
    num_processes: int = 8
    """At most, on the CPU."""
    most_layers: int = 2
    """Per virtual stage, on the CPU."""
    sleep: bool = False
    """On the CPU: sleep for the plan's seconds, scaled, in place of computing."""
    num_steps: int = 3
    tolerance_fraction: float = DEFAULT_TOLERANCE
    timeout_s: float = 120.0
    """Longest that a rank may show no progress."""
    order: Schedule | None = None
    """Another order than the plan's, such as one read from a CSV file."""
