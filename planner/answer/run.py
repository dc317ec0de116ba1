"""The types of the answer that are about a whole training run: its cost, its sustained step, its useful time."""

from __future__ import annotations

from planner.specs.base import Spec

Interval = tuple[float, float]
"""The ends of a range that is meant to hold the true value in 80% of all cases."""


class Sustained(Spec):
    """The seconds of a step as months of training see them: jitter, slow nodes and clocks are in it, failures not."""

    step_s: float
    step_s_interval: Interval
    source: str
    """The runs that the difference to a benchmark was read from."""


class RunCost(Spec):
    """Time, energy and money that the whole training run takes for the tokens asked for."""

    tokens: float
    days: float
    days_interval: Interval | None = None
    gpu_hours: float
    usd: float | None = None
    usd_interval: Interval | None = None
    mwh: float | None = None


class Goodput(Spec):
    """The share of a long run's wall time in which it trains, and what takes the rest."""

    effective_fraction: float
    interval: Interval
    checkpoint_s: float
    """Seconds that the run stands still for a checkpoint."""
    checkpoint_interval_s: float
    """Seconds between two checkpoints."""
    evaluation_fraction: float
    failures_per_day: float
    restart_s: float
    """Seconds from a failure until the job trains again, its detection included."""
