"""The share of its time that a job trains, as a closed form.

    effective = (1 − e) · τ / (M · exp(R / M) · (exp((τ + w) / M) − 1))          (Daly, 2006)

with M seconds between failures, R from a failure to the first new step, τ of training between two checkpoints, w of
standing still for one, and e the share of evaluations. Work lost since the last checkpoint follows from τ, not from R.
Failures are independent of time (Poisson) and strike while the job restarts, too. For small losses it is Meta's
expected training time ratio (arXiv:2410.21680): (1 − (R + τ / 2) / M) / (1 + w / τ).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.months.facts import Fact
from planner.months.losses import SECONDS_PER_DAY, Losses, all_in_repair
from planner.months.standstill import going_on_s

Number = Any
"""A float, or an array of one for each simulated run."""
LONGEST_BETWEEN_SAVES_S = 3600.0
"""Nobody trains longer than an hour without a save, however rare failures are."""
LEAST_RATE = 1e-15
"""Failures a second that stand for none at all."""
_MOST = 300.0
"""Exponent beyond which nothing is ever trained; it keeps numbers finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """The seconds that decide how much of its time a job trains: numbers, or one entry a simulated run."""

    failures_per_s: Number
    restart_s: Number
    """From a failure to the first new step: detection, a new start, reading the checkpoint, waiting for a node."""
    stall_s: Number
    """Seconds that training stands still for a checkpoint."""
    write_s: Number
    """Seconds after the stall until the checkpoint is safe; a failure before loses the interval before it too."""
    evaluation_fraction: Number

    def effective_fraction(self, interval_s: float) -> Number:
        """The share of the time that trains, with `interval_s` of training between two checkpoints."""
        rate = np.maximum(self.failures_per_s, LEAST_RATE)
        restarts, intervals = rate * (self.restart_s + self.write_s), rate * (interval_s + self.stall_s)
        lost = np.exp(np.minimum(restarts, _MOST)) * np.expm1(np.minimum(intervals, _MOST))
        fraction: Number = (1 - self.evaluation_fraction) * rate * interval_s / lost
        return fraction


def rhythm_of(losses: Losses, of: Callable[[Fact], Number]) -> Rhythm:
    """The seconds that follow from the figures; `of` gives a figure's value, or draws of it."""
    failures_per_s = of(losses.failures_per_day) / SECONDS_PER_DAY
    transfer_s = losses.transfer_s(of(losses.storage_gb_per_s))
    in_background = losses.asynchronous_stall_s is not None
    start_s = _start_s(losses, of, failures_per_s, transfer_s)
    return Rhythm(
        failures_per_s=failures_per_s,
        restart_s=of(losses.detection_s) + start_s + transfer_s,
        stall_s=transfer_s if losses.asynchronous_stall_s is None else of(losses.asynchronous_stall_s),
        write_s=transfer_s if in_background else 0.0 * transfer_s,
        evaluation_fraction=of(losses.evaluation_fraction),
    )


def _start_s(losses: Losses, of: Callable[[Fact], Number], failures_per_s: Number, transfer_s: Number) -> Number:
    """Seconds from a failure that was noticed to the running job, averaged over failures.

    Kept spare nodes stand in for a lost one at once; if all of them are in repair, the job waits for the first that is
    back. With n spares that is repair / (n + 1), for repairs that end at random. A job that can go on without the node
    does so where it loses less by that (`standstill.going_on_s`, without the seconds that every failure takes). Without
    a word about spares the cluster's pool has a node for every new job.
    """
    start_s, spares = of(losses.restart_s), losses.num_spare_nodes
    if spares is None:
        return start_s
    share, repair_s = of(losses.node_loss_fraction), of(losses.repair_s)
    none_free = all_in_repair(share * failures_per_s * repair_s, spares)
    alone_s, fraction = start_s + repair_s / (spares + 1), losses.rate_without_node_fraction
    if fraction:
        again_s = start_s + transfer_s
        alone_s = np.minimum(
            alone_s, going_on_s(repair_s / (spares + 1), again_s, fraction, again_s + transfer_s) - transfer_s
        )
    waited_s = none_free * alone_s + (1 - none_free) * of(losses.standby_restart_s)
    return (1 - share) * start_s + share * waited_s


def best_interval_s(rhythm: Rhythm) -> float:
    """Seconds of training between two checkpoints that lose the least (Young, 1974; Daly, 2006).

    √(2·w·M)·(1 + √(w / 2M) / 3 + w / 18M) − w, and M where a checkpoint takes more than 2M; never less than it takes
    to write one beside the training, and an hour at most.
    """
    between_s = 1 / max(float(rhythm.failures_per_s), LEAST_RATE)
    share = float(rhythm.stall_s) / (2 * between_s)
    daly_s = 2 * between_s * math.sqrt(share) * (1 + math.sqrt(share) / 3 + share / 9) - float(rhythm.stall_s)
    interval_s = daly_s if share < 1 else between_s
    return min(max(interval_s, float(rhythm.write_s), 1.0), LONGEST_BETWEEN_SAVES_S)
