"""The correction that kept runs ask for: a normal mean with a normal prior, shrunk while the runs are few.

A run's observation is κ, the logarithm of the one factor on kernels with which its priced step is the measured one.
Runs of one job repeat its layout's own error, so that a job counts once, with the mean of its runs. With jobs j:

    κ ~ N(0, σ₀²)        κ_j ~ N(κ, σ_j²)        precision = 1/σ₀² + Σ 1/σ_j²        mean = Σ (κ_j/σ_j²) / precision
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from planner.answer import SIGMAS_TO_END
from planner.profile.probed.doubt import TRANSFER_WIDTH
from planner.specs.base import NonNegativeFloat, PositiveFloat, Spec

LEAST_PRIOR = 0.01
"""Least standard deviation of a cluster from its profile: one measured to the digit is another after a driver."""
PRIOR_JOBS = 4
"""Jobs that the usual scatter counts for, beside the scatter of the runs at hand."""


class KeptPrice(Spec):
    """A run that is kept, beside the price of its layout by the profile that ships."""

    file: str
    """The name of its file in the folder."""
    source: str
    """The log that it was observed by."""
    belongs: str
    """The cluster and the trainer."""
    job: str
    """Model, batch and layout: runs of one job repeat its error."""
    measured_s: PositiveFloat
    predicted_s: PositiveFloat
    log_kernels: float
    """Logarithm of the factor on kernels with which the price is the measured step."""
    sensitivity: PositiveFloat
    """Change of the step by a change of all kernels, in natural logarithms."""
    job_width: NonNegativeFloat
    """Half-width of the step that the job itself adds: experts, exchanges, the host, scale."""
    own_width: NonNegativeFloat
    """Half-width of the run's own steps and their digits."""


class Posterior(NamedTuple):
    """All that the runs of one cluster and trainer say of the seconds of its kernels, in natural logarithms."""

    mean: float
    sigma: float
    """Standard deviation of the mean."""
    scatter: float
    """Factor by which jobs lie further apart than published ones do; 1 where they do not."""
    num_runs: int
    num_jobs: int

    @property
    def step_width(self) -> float:
        """Half-width of the step of a job that was not observed: never below what tells two layouts apart."""
        return self.scatter * math.hypot(SIGMAS_TO_END * self.sigma, TRANSFER_WIDTH)

    @property
    def factor(self) -> float:
        """Factor on the seconds of kernels."""
        return math.exp(self.mean)

    @property
    def factor_interval(self) -> tuple[float, float]:
        """Its 80% interval."""
        width = SIGMAS_TO_END * self.scatter * self.sigma
        return math.exp(self.mean - width), math.exp(self.mean + width)


def posterior(runs: Sequence[KeptPrice], hardware_width: float) -> Posterior:
    """The posterior of runs of one cluster and trainer, whose profile is known to `hardware_width`.

    Of the profile's width, TRANSFER_WIDTH is that between layouts of one cluster, and the rest σ₀, the cluster's own. A
    job's σ_j holds the former, what the job adds, and what its runs add, which is less the more they are.
    """
    apart = max(0.0, hardware_width**2 - TRANSFER_WIDTH**2)
    precision = 1 / max(math.sqrt(apart) / SIGMAS_TO_END, LEAST_PRIOR) ** 2
    weighted = 0.0
    jobs = defaultdict(list)
    for run in runs:
        jobs[run.job].append(run)
    known = [_job(together) for together in jobs.values()]
    for mean, variance in known:
        precision += 1 / variance
        weighted += mean / variance
    middle = weighted / precision
    squares = sum((mean - middle) ** 2 / variance for mean, variance in known)
    scatter = math.sqrt(max(1.0, (squares + PRIOR_JOBS) / (len(known) + PRIOR_JOBS)))
    return Posterior(middle, 1 / math.sqrt(precision), scatter, len(runs), len(known))


def _job(runs: Sequence[KeptPrice]) -> tuple[float, float]:
    """Mean and variance of what the runs of one job say."""
    first = runs[0]
    mean = sum(run.log_kernels for run in runs) / len(runs)
    own = sum(run.own_width**2 for run in runs) / len(runs) ** 2
    width = math.sqrt(TRANSFER_WIDTH**2 + first.job_width**2 + own) / first.sensitivity
    return mean, (width / SIGMAS_TO_END) ** 2
