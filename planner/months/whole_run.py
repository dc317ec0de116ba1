"""The whole run: days, GPU-hours, dollars and energy for all tokens, and the share of the time that trains.

    days = tokens / (tokens a step) · sustained step / effective fraction / 86,400

The effective fraction of the answer is the closed form's; the intervals are those of a thousand simulated runs, whose
figures, failures and pace are drawn at random.

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

A draw of the figures is one run's: its rate of failures, its storage, the pace of its steps. Time between two failures
is exponential. In each such gap the run trains as many whole intervals as end, and are safe, before the failure; then
it restarts, again if a failure strikes the restart. The same seed gives the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import ConfigDict

from planner.answer import MOST_GPUS, SIGMAS_TO_END, Goodput, Interval, PricedLayout, RunCost
from planner.errors import SpecError
from planner.months.losses import SECONDS_PER_DAY, Fact, Losses, all_in_repair, losses_of
from planner.record import record
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.training import TrainingSpec

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


def return_pays_s(return_s: float, rate_fraction: float) -> float | None:
    """Seconds that a job has to run after its return to the old layout for that to pay; None if it is no faster."""
    return return_s / (1 - rate_fraction) if rate_fraction < 1 else None


@record
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


@record(kw_only=True)
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


class Spares(Spec):
    """A number of spare nodes, and what it costs a day; fields that older versions saved are passed over."""

    model_config = ConfigDict(extra="ignore")

    num_nodes: int
    none_free_fraction: float
    """Probability that all of them are in repair when a node is lost."""
    idle_gpu_hours: float
    """GPU-hours a day of spare nodes beyond those that are idle anyway."""
    lost_gpu_hours: float
    """GPU-hours a day in which the job's own GPUs do not train."""
    gpu_hours: float
    """The cost of a day: idle and lost together."""


def spares(losses: Losses, num_nodes: int, node_size: int, num_idle_nodes: int = 0) -> Spares:
    """A job with `num_nodes` spare nodes, of which the first `num_idle_nodes` are paid for anyway.

    Its share of training is the closed form's, with checkpoints as often as suits it.
    """
    kept = replace(losses, num_spare_nodes=num_nodes)
    rhythm = rhythm_of(kept, lambda fact: fact.value)
    effective = float(rhythm.effective_fraction(best_interval_s(rhythm)))
    in_repair = kept.node_loss_fraction.value * kept.failures_per_day.value * kept.repair_s.value / SECONDS_PER_DAY
    idle_gpu_hours = HOURS_PER_DAY * node_size * max(0, num_nodes - num_idle_nodes)
    lost_gpu_hours = HOURS_PER_DAY * losses.num_gpus * (1 - effective)
    return Spares(
        num_nodes=num_nodes,
        none_free_fraction=float(all_in_repair(in_repair, num_nodes)),
        idle_gpu_hours=idle_gpu_hours,
        lost_gpu_hours=lost_gpu_hours,
        gpu_hours=idle_gpu_hours + lost_gpu_hours,
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


NUM_RUNS, SEED = 1000, 23
_MOST_GAPS = 256
"""Failures that a run is simulated for; what is left after them goes on at the same pace, known to half a percent."""
_FEWEST_GAPS = 8


@record
class Simulated:
    """The runs' seconds of training that were asked for, and the wall seconds that they took."""

    trained_s: FloatArray
    wall_s: FloatArray

    @property
    def effective_fractions(self) -> FloatArray:
        """The share of its time that each run trained."""
        return self.trained_s / self.wall_s


def simulated_runs(losses: Losses, interval_s: float, step_factors: FloatArray, training_s: float) -> Simulated:
    """As many runs as there are step factors, each of `training_s` seconds of training times its factor."""
    random = np.random.default_rng(SEED)
    drawn: dict[Fact, FloatArray] = {}

    def of(fact: Fact) -> FloatArray:
        """The runs' values of a figure: the same ones if it is asked for again."""
        if fact not in drawn:
            drawn[fact] = fact.draws(random.standard_normal(len(step_factors)))
        return drawn[fact]

    rhythm = rhythm_of(losses, of)
    trained_s = training_s * step_factors
    return Simulated(trained_s, _wall_s(rhythm, interval_s, trained_s, random))


def _wall_s(rhythm: Rhythm, interval_s: float, trained_s: FloatArray, random: np.random.Generator) -> FloatArray:
    """Wall seconds of runs that train `trained_s` each."""
    rate = np.maximum(rhythm.failures_per_s, LEAST_RATE)
    expected = float(np.max(rate * trained_s / np.clip(rhythm.effective_fraction(interval_s), 0.01, 1)))
    num_gaps = int(min(_MOST_GAPS, _FEWEST_GAPS + expected + 4 * expected**0.5))
    column = (slice(None), None)
    gaps_s = random.standard_exponential((len(rate), num_gaps)) / rate[column]
    # a restart of R seconds without a failure takes exp(R/M) tries on average, (exp(R/M) − 1)·M seconds in all
    restart_s = (np.expm1(np.minimum(rate * rhythm.restart_s, 50.0)) / rate)[column]
    safe_s = np.maximum(gaps_s - np.asarray(rhythm.write_s)[column], 0.0)
    gained_s = interval_s * np.floor(safe_s / (interval_s + np.asarray(rhythm.stall_s)[column]))
    done_s = np.cumsum(gained_s, axis=1)
    spent_s = np.cumsum(gaps_s + restart_s, axis=1)
    wall_s = _at_the_end(rhythm, interval_s, trained_s, done_s, spent_s)
    stretched_s: FloatArray = wall_s / np.maximum(1 - np.asarray(rhythm.evaluation_fraction), 0.5)
    return stretched_s


def _at_the_end(
    rhythm: Rhythm, interval_s: float, trained_s: FloatArray, done_s: FloatArray, spent_s: FloatArray
) -> FloatArray:
    """Wall seconds at which runs have trained enough, from what they have done and spent after each failure."""
    rows = np.arange(len(trained_s))
    failures = np.sum(done_s < trained_s[:, None], axis=1)
    ended = failures < done_s.shape[1]
    before = np.maximum(failures - 1, 0)
    past_s = np.where(failures > 0, spent_s[rows, before], 0.0)
    left_s = trained_s - np.where(failures > 0, done_s[rows, before], 0.0)
    # the last gap is long enough: nothing but its own checkpoints is lost in it
    last_s = past_s + left_s * (1 + rhythm.stall_s / interval_s)
    pace = done_s[:, -1] / spent_s[:, -1]
    wall_s: FloatArray = np.where(ended, last_s, spent_s[:, -1] + left_s / np.maximum(pace, 1e-9))
    return wall_s


SHORT_DAYS = 1.0
"""Days up to which a run on a few GPUs takes its steps alone, without failures and slow days."""
_QUANTILES = (0.1, 0.9)
_LEAST_FRACTION = 1e-3
"""Effective fraction below which a run is said never to end."""


def whole_run(
    layout: PricedLayout,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    checkpoint_bytes: float,
    asynchronous: bool,
    longer_factor: float = 1.0,
) -> tuple[RunCost, Goodput] | tuple[None, None]:
    """Cost and goodput of the run over every GPU given, kept spare nodes included; None where no tokens are asked for.

    `longer_factor` is how many times as long all steps take together as if each were the layout's: those of a batch
    that grows are shorter and more.
    Raises SpecError if more nodes are to be spare than the job has.
    """
    if training.tokens is None or layout.sustained is None:
        return None, None
    check_spares(cluster, training)
    steps = longer_factor * training.tokens / training.tokens_per_step
    if steps * layout.step.step_s <= SHORT_DAYS * SECONDS_PER_DAY and cluster.num_gpus <= MOST_GPUS:
        return _short_run(layout, cluster, training, steps)
    losses = losses_of(cluster, training.operations, layout.parallelism.num_gpus_used, checkpoint_bytes, asynchronous)
    rhythm = rhythm_of(losses, lambda fact: fact.value)
    interval_s = best_interval_s(rhythm)
    if rhythm.effective_fraction(interval_s) < _LEAST_FRACTION:
        between_s = 1 / rhythm.failures_per_s
        restart_s = float(rhythm.restart_s)
        raise SpecError(
            f"--tokens: the run never ends: an interruption every {between_s:.3g} s, and {restart_s:.3g} s to restart",
            "leave --tokens out, or give fewer --failures-per-1000-gpu-days",
        )
    training_s = steps * layout.sustained.step_s
    low_s, high_s = layout.sustained.step_s_interval
    factors = _pace(math.log(layout.sustained.step_s / low_s), math.log(high_s / layout.sustained.step_s))
    runs = simulated_runs(losses, interval_s, factors, training_s)
    goodput = _goodput(losses, rhythm, interval_s, runs)
    days = training_s / goodput.effective_fraction / SECONDS_PER_DAY
    return _cost(cluster, training, days, _around(days, runs.wall_s / SECONDS_PER_DAY)), goodput


def _short_run(
    layout: PricedLayout, cluster: ClusterSpec, training: TrainingSpec, steps: float
) -> tuple[RunCost, Goodput]:
    """A run of hours: all of its time trains, and its interval is that of its step."""
    step = layout.step
    days, low, high = (
        steps * step_s / SECONDS_PER_DAY for step_s in (step.step_s, *(step.step_s_interval or 2 * (step.step_s,)))
    )
    goodput = Goodput(
        effective_fraction=1.0,
        interval=(1.0, 1.0),
        checkpoint_s=0.0,
        checkpoint_interval_s=days * SECONDS_PER_DAY,
        evaluation_fraction=0.0,
        failures_per_day=0.0,
        restart_s=0.0,
        sources={"short": "ends within a day on a few GPUs: no failures, restarts or evaluation are counted"},
    )
    return _cost(cluster, training, days, (low, high)), goodput


def save_interval_s(
    cluster: ClusterSpec, training: TrainingSpec, num_gpus: int, *, checkpoint_bytes: float, asynchronous: bool
) -> float:
    """Seconds of training between two checkpoints with which a job of `num_gpus` loses the least."""
    losses = losses_of(cluster, training.operations, num_gpus, checkpoint_bytes, asynchronous)
    return best_interval_s(rhythm_of(losses, lambda fact: fact.value))


def check_spares(cluster: ClusterSpec, training: TrainingSpec) -> None:
    """Refuse more spare nodes than the job has nodes."""
    spares = training.operations.num_spare_nodes
    nodes = math.ceil(cluster.num_gpus / cluster.node_size)
    if spares is not None and spares > nodes:
        raise SpecError(f"--spares: {spares:,} spare nodes for a job of {nodes:,}", f"--spares {nodes} is the most")


@lru_cache(maxsize=8)
def _pace(low_width: float, high_width: float) -> FloatArray:
    """How many times as long as expected each simulated run's steps take: 80% of them between e⁻ˡᵒʷ and eʰⁱᵍʰ."""
    normal = np.random.default_rng(SEED + 1).standard_normal(NUM_RUNS) / SIGMAS_TO_END
    drawn: FloatArray = np.exp(np.where(normal < 0, low_width, high_width) * normal)
    return drawn


def _around(value: float, drawn: FloatArray) -> Interval:
    """The middle 80% of what was drawn, widened to hold the answer."""
    low, high = np.quantile(drawn, _QUANTILES)
    return min(float(low), value), max(float(high), value)


def _goodput(losses: Losses, rhythm: Rhythm, interval_s: float, runs: Simulated) -> Goodput:
    effective = float(rhythm.effective_fraction(interval_s))
    rate = losses.failures_per_day
    return Goodput(
        effective_fraction=effective,
        interval=_around(effective, runs.effective_fractions),
        simulated_fraction=float(np.median(runs.effective_fractions)),
        checkpoint_s=float(rhythm.stall_s),
        checkpoint_interval_s=interval_s,
        checkpoint_bytes=losses.checkpoint_bytes,
        asynchronous=losses.asynchronous_stall_s is not None,
        storage_gb_per_s=losses.storage_gb_per_s.value,
        evaluation_fraction=float(rhythm.evaluation_fraction),
        failures_per_day=rate.value,
        failures_per_day_interval=(rate.low, rate.high),
        restart_s=float(rhythm.restart_s),
        num_spare_nodes=losses.num_spare_nodes,
        num_spare_nodes_advised=losses.num_spare_nodes_advised,
        sources=losses.sources,
    )


def _cost(cluster: ClusterSpec, training: TrainingSpec, days: float, days_interval: Interval) -> RunCost:
    hardware = cluster.hardware
    operations = training.operations
    num_gpus = cluster.num_gpus + (operations.num_spare_nodes or 0) * cluster.node_size
    gpu_hours = 24 * days * num_gpus
    price = hardware.usd_per_gpu_hour if operations.usd_per_gpu_hour is None else operations.usd_per_gpu_hour
    assert training.tokens is not None
    usd = None if price is None else gpu_hours * price
    return RunCost(
        tokens=training.tokens,
        days=days,
        days_interval=days_interval,
        gpu_hours=gpu_hours,
        usd=usd,
        usd_interval=None if usd is None else (usd * days_interval[0] / days, usd * days_interval[1] / days),
        mwh=gpu_hours * hardware.watts_per_gpu / 1e6 if hardware.watts_per_gpu else None,
    )
