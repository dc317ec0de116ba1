"""Parts of an observation: numbers of single ranks, and the wall time divided."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec


class RankSpread(Spec):
    """A number of each rank, of which the log names the least and the most, as `--log-straggler` does; medians."""

    name: Literal["round_trip_s", "power_w", "temperature_c", "utilization_fraction", "clock_mhz", "data_s", "tflops"]
    low: float
    low_rank: int
    """The rank that most often had the least."""
    low_share: float
    """The share of the lines in which it had: near 1 where it is always the same, near 0 where chance decides."""
    high: float
    high_rank: int
    high_share: float
    num_values: int
    per_rank: dict[int, float] = Field(default_factory=dict)
    """The last value of single ranks, where the log lists some."""


class Wall(Spec):
    """The wall time from the first to the last thing that has a time, and what took it."""

    wall_s: float
    startup_s: float
    """From the first line with a time to the begin of the first step."""
    steps_s: float
    evaluation_s: float
    checkpoint_s: float
    down_s: float
    """From an interruption to the first step made after it."""
    idle_s: float
    """Between those, where nothing was recorded."""
    overlap_s: float
    """Seconds that records claim twice: the items less this are the wall time."""

    @property
    def error_fraction(self) -> float:
        """The share of the wall time that the items miss: 0 where they add up."""
        return self.overlap_s / self.wall_s if self.wall_s else 0.0
