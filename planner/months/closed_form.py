"""The share of its time that a job trains, as a closed form.

    effective = (1 − e) · τ / (M · exp(R / M) · (exp((τ + w) / M) − 1))          (Daly, 2006)

with M seconds between failures, R from a failure to the first new step, τ of training between two checkpoints, w of
standing still for one, and e the share of evaluations. Work lost since the last checkpoint follows from τ, not from R.
Failures are independent of time (Poisson) and strike while the job restarts, too. For small losses it is Meta's
expected training time ratio (arXiv:2410.21680): (1 − (R + τ / 2) / M) / (1 + w / τ).

A job that trains at rate v loses nodes at time 0. Either it waits and is as before once they are back, or it goes on
at rate f·v, b seconds after the failure, and returns to its old layout when they are back, for which it saves (s) and
starts and reads (a). Until both are as before, the seconds at rate v that they lose are

    waiting:   max(W, d) + a
    going on:  b + (1 − f)·max(0, W − b) + s + a

with W from the failure until the nodes are back and d until someone notices. Both lose as much at

    W* = b + s / f

and going on loses less for every longer wait. Returning costs s + a in which nothing is trained, and saves 1 − f of
every second after it, so that it pays if the job then runs for longer than (s + a) / (1 − f) seconds.

How many spare nodes pay follows from both: the GPU-hours a day that they are idle, against those that failures cost
without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.answer import Interval
from planner.months.losses import SECONDS_PER_DAY, Fact, Losses, all_in_repair

Number = Any
"""A float, or an array of one for each simulated run."""


def waiting_s(repair_s: Number, detection_s: Number, again_s: Number) -> Number:
    """Seconds of training lost by waiting `repair_s` from the failure on, and starting again."""
    return np.maximum(repair_s, detection_s) + again_s


def going_on_s(repair_s: Number, back_s: Number, rate_fraction: float, return_s: Number) -> Number:
    """Seconds at the old rate that are lost by going on at a fraction of it until the repair, and returning then."""
    return back_s + (1 - rate_fraction) * np.maximum(repair_s - back_s, 0.0) + return_s


def break_even_s(back_s: float, rate_fraction: float, save_s: float) -> float:
    """The wait, counted from the failure, from which on going on loses less than waiting."""
    return back_s + save_s / rate_fraction


def return_pays_s(return_s: float, rate_fraction: float) -> float:
    """Seconds that a job has to run after its return to the old layout for that to pay; infinite if it is no faster."""
    return return_s / (1 - rate_fraction) if rate_fraction < 1 else math.inf


@dataclass(frozen=True, slots=True)
class Standstill:
    """The seconds in which a job stands, by part."""

    parts: Mapping[str, Fact]

    @property
    def value_s(self) -> float:
        return sum(part.value for part in self.parts.values())

    @property
    def interval_s(self) -> Interval:
        """The ends of 80%: parts err independently, so that the squares of their distances add up."""
        below = math.hypot(*(part.value - part.low for part in self.parts.values()))
        above = math.hypot(*(part.high - part.value for part in self.parts.values()))
        return max(0.0, self.value_s - below), self.value_s + above


LONGEST_BETWEEN_SAVES_S = 3600.0
"""Nobody trains longer than an hour without a save, however rare failures are."""
LEAST_RATE = 1e-15
"""The failures a second that are used in place of zero."""
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
        restarts = rate * (self.restart_s + self.write_s)
        intervals = rate * (interval_s + self.stall_s)
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
    start_s = of(losses.restart_s)
    spares = losses.num_spare_nodes
    if spares is None:
        return start_s
    share = of(losses.node_loss_fraction)
    repair_s = of(losses.repair_s)
    none_free = all_in_repair(share * failures_per_s * repair_s, spares)
    alone_s = start_s + repair_s / (spares + 1)
    fraction = losses.rate_without_node_fraction
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


HOURS_PER_DAY = 24
MOST_SPARES = 4096
ALIKE = 1e-3
"""Relative difference of cost below which two numbers of spare nodes count as equally cheap."""


@dataclass(frozen=True, slots=True)
class Spares:
    """A number of spare nodes, and what it costs a day."""

    num_nodes: int
    none_free_fraction: float
    """Probability that all of them are in repair when a node is lost."""
    effective_fraction: float
    """The share of its time that the job trains."""
    idle_gpu_hours: float
    """GPU-hours a day of spare nodes beyond those that are idle anyway."""
    lost_gpu_hours: float
    """GPU-hours a day in which the job's own GPUs do not train."""

    @property
    def gpu_hours(self) -> float:
        """The cost of a day: idle and lost together."""
        return self.idle_gpu_hours + self.lost_gpu_hours


def spares(losses: Losses, num_nodes: int, node_size: int, num_idle_nodes: int = 0) -> Spares:
    """A job with `num_nodes` spare nodes, of which the first `num_idle_nodes` are paid for anyway.

    Its share of training is the closed form's, with checkpoints as often as suits it.
    """
    kept = replace(losses, num_spare_nodes=num_nodes)
    rhythm = rhythm_of(kept, lambda fact: fact.value)
    effective = float(rhythm.effective_fraction(best_interval_s(rhythm)))
    in_repair = kept.node_loss_fraction.value * kept.failures_per_day.value * kept.repair_s.value / SECONDS_PER_DAY
    return Spares(
        num_nodes=num_nodes,
        none_free_fraction=float(all_in_repair(in_repair, num_nodes)),
        effective_fraction=effective,
        idle_gpu_hours=HOURS_PER_DAY * node_size * max(0, num_nodes - num_idle_nodes),
        lost_gpu_hours=HOURS_PER_DAY * losses.num_gpus * (1 - effective),
    )


def cheapest_spares(losses: Losses, node_size: int, num_idle_nodes: int = 0) -> Spares:
    """The fewest spare nodes whose cost is within ALIKE of the least.

    No number loses less than so many spare nodes that one is always free. So the search ends where the idle nodes and
    that loss together cost more than the best number found.
    """
    least_lost = spares(losses, MOST_SPARES, node_size, MOST_SPARES).lost_gpu_hours
    rows = [spares(losses, 0, node_size, num_idle_nodes)]
    while len(rows) <= MOST_SPARES and rows[-1].idle_gpu_hours + least_lost < min(row.gpu_hours for row in rows):
        rows.append(spares(losses, len(rows), node_size, num_idle_nodes))
    most = (1 + ALIKE) * min(row.gpu_hours for row in rows)
    return next(row for row in rows if row.gpu_hours <= most)
