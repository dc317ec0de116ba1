"""The types of the answer that are about a whole training run: its cost, its sustained step, its useful time."""

from __future__ import annotations

import math

from pydantic import Field

from planner.answer.quantities import Count, Interval, PositiveSeconds, Quantity
from planner.specs.base import Fraction, Spec

SIGMAS_TO_END = 1.2815515655446004
"""Standard deviations from the middle of a normal distribution to either end of the interval that holds 80% of it."""


def half_width(interval: Interval) -> float:
    """Half the width of an interval, in natural logarithms."""
    return math.log(interval[1] / interval[0]) / 2


class Sustained(Spec):
    """The seconds of a step as months of training see them: jitter, slow nodes and clocks are in it, failures not."""

    step_s: PositiveSeconds
    step_s_interval: Interval
    source: str
    """The runs that the difference to a benchmark was read from."""


class RunCost(Spec):
    """Time, energy and money that the whole training run takes for the tokens asked for."""

    tokens: Quantity
    days: Quantity
    days_interval: Interval | None = None
    gpu_hours: Quantity
    usd: Quantity | None = None
    usd_interval: Interval | None = None
    mwh: Quantity | None = None
    examples: Count | None = None
    """Examples of an epoch; null for a run that is stated in tokens alone."""
    epochs: Quantity | None = None
    num_steps: Quantity | None = None
    """Optimizer steps of the run."""
    padding_fraction: Quantity | None = None
    """Share of the tokens in padded batches that is padding; null where batches are packed."""
    packed_days: Quantity | None = None
    """Days of the same layout if the examples were packed into whole sequences; null where they are."""


class Goodput(Spec):
    """The share of a long run's wall time in which it trains, and what takes the rest."""

    effective_fraction: Fraction
    interval: Interval
    checkpoint_s: Quantity
    """Seconds that the run stands still for a checkpoint."""
    checkpoint_interval_s: Quantity
    """Seconds between two checkpoints."""
    evaluation_fraction: Fraction
    failures_per_day: Quantity
    restart_s: Quantity
    """Seconds from a failure until the job trains again, its detection included."""
    failures_per_day_interval: Interval | None = None
    checkpoint_bytes: Quantity | None = None
    """Weights and optimizer states of the whole model, as the trainer writes them."""
    asynchronous: bool = False
    """True if checkpoints are written beside the training, which then waits for a copy in host memory only."""
    storage_gb_per_s: Quantity | None = None
    """Rate at which all ranks together write a checkpoint, 10^9 bytes a second."""
    simulated_fraction: Fraction | None = None
    """Median of effective_fraction over the simulated runs that the intervals are read from."""
    num_spare_nodes: Count | None = None
    """Nodes kept for this job, beside its own; null: its cluster's pool has one for every new job."""
    num_spare_nodes_advised: Count | None = None
    """The fewest spare nodes of which one is free in 99% of the failures that take a node."""
    sources: dict[str, str] = Field(default_factory=dict)
    """The origin of each figure, by the field that it decides."""
