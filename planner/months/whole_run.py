"""The whole run: days, GPU-hours, dollars and energy for all tokens, and the share of the time that trains.

    days = tokens / (tokens a step) · sustained step / effective fraction / 86,400

The effective fraction of the answer is the closed form's; the intervals are those of a thousand simulated runs, whose
figures, failures and pace are drawn at random.

A draw of the figures is one run's: its rate of failures, its storage, the pace of its steps. Time between two failures
is exponential. In each such gap the run trains as many whole intervals as end, and are safe, before the failure; then
it restarts, again if a failure strikes the restart. The same seed gives the same runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.answer import MOST_GPUS, SIGMAS_TO_END, Goodput, Interval, PricedLayout, RunCost
from planner.errors import SpecError
from planner.months.closed_form import LEAST_RATE, Rhythm, best_interval_s, rhythm_of
from planner.months.losses import SECONDS_PER_DAY, Fact, Losses, losses_of
from planner.shape import FloatArray
from planner.specs.cluster import ClusterSpec
from planner.specs.training import TrainingSpec

NUM_RUNS, SEED = 1000, 23
_MOST_GAPS = 256
"""Failures that a run is simulated for; what is left after them goes on at the same pace, known to half a percent."""
_FEWEST_GAPS = 8


@dataclass(frozen=True, slots=True)
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
