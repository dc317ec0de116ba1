"""A thousand runs from the first step to the last, with figures and failures drawn at random.

A draw of the figures is one run's: its rate of failures, its storage, the pace of its steps. Time between two failures
is exponential. In each such gap the run trains as many whole intervals as end, and are safe, before the failure; then
it restarts, again if a failure strikes the restart. The same seed gives the same runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.months.closed_form import LEAST_RATE, Rhythm, rhythm_of
from planner.months.facts import Fact
from planner.months.losses import Losses
from planner.shape import FloatArray

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
    done_s, spent_s = np.cumsum(gained_s, axis=1), np.cumsum(gaps_s + restart_s, axis=1)
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
