"""The correction of kept runs: shrunk while they are few, the truth when they are many, and never too sure."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.answer import SIGMAS_TO_END
from planner.observe.history import KeptPrice, KernelPosterior, posterior
from planner.profile.probed import TRANSFER_WIDTH

factors = st.floats(0.7, 1.6)
widths = st.floats(0.08, 0.3)


def kept(log_factor: float, job: str = "a", own_width: float = 0.005, **changes: float) -> KeptPrice:
    numbers = {"sensitivity": 0.9, "job_width": 0.02, **changes}
    return KeptPrice(
        file=f"run-{job}.json", source="train.log", belongs="here", job=job, measured_s=math.exp(log_factor),
        predicted_s=1.0, log_kernels=log_factor, own_width=own_width, **numbers,
    )  # fmt: skip


def of_jobs(num_jobs: int, log_factor: float, width: float = 0.09) -> KernelPosterior:
    return posterior([kept(log_factor, f"job {number}") for number in range(num_jobs)], width)


@settings(max_examples=15, deadline=None)
@given(factors, widths)
def test_many_jobs_tend_to_the_truth_and_one_is_shrunk(factor: float, width: float) -> None:
    truth = math.log(factor)
    means = [abs(of_jobs(count, truth, width).mean) for count in (1, 2, 4, 16, 512)]
    assert means == sorted(means)
    assert means[-1] == pytest.approx(abs(truth), rel=0.02, abs=1e-9)
    assert means[0] <= abs(truth) * 0.97
    assert all(
        math.copysign(1, of_jobs(count, truth, width).mean or truth) == math.copysign(1, truth) for count in (1, 4)
    )


@settings(max_examples=15, deadline=None)
@given(widths)
def test_the_interval_narrows_with_the_jobs_and_never_below_what_tells_layouts_apart(width: float) -> None:
    found = [of_jobs(count, 0.0, width).step_width for count in (0, 1, 2, 4, 16, 512)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(width)
    assert found[-1] == pytest.approx(TRANSFER_WIDTH, rel=0.01)
    assert found[-1] >= TRANSFER_WIDTH


def test_a_job_that_ran_often_counts_once() -> None:
    """A hundred runs of one layout say how fast that layout is, and little more than one of them of the cluster."""
    once, often = posterior([kept(0.1)], 0.09), posterior([kept(0.1)] * 100, 0.09)
    apart = of_jobs(100, 0.1)
    assert (often.num_runs, often.num_jobs) == (100, 1)
    assert often.mean == pytest.approx(once.mean, rel=0.01)
    assert often.step_width == pytest.approx(once.step_width, rel=0.01)
    assert apart.mean > 1.3 * often.mean


def test_noisy_insensitive_and_uncertain_runs_count_for_less() -> None:
    plain = posterior([kept(0.1)], 0.09).mean
    assert posterior([kept(0.1, own_width=0.1)], 0.09).mean < 0.8 * plain
    assert posterior([kept(0.1, sensitivity=0.5)], 0.09).mean < 0.8 * plain
    assert posterior([kept(0.1, job_width=0.1)], 0.09).mean < 0.8 * plain
    assert posterior([kept(0.1)], 0.28).mean > 1.4 * plain, "a GPU that only its data sheet describes believes runs"


def test_runs_that_contradict_each_other_widen() -> None:
    agree = [kept(0.02 * (-1) ** number, str(number)) for number in range(6)]
    contradict = [kept(0.3 * (-1) ** number, str(number)) for number in range(6)]
    assert posterior(agree, 0.09).scatter == 1.0
    assert posterior(contradict, 0.09).scatter > 2
    assert posterior(contradict, 0.09).step_width > 2 * posterior(agree, 0.09).step_width


def test_four_in_five_of_jobs_to_come_lie_inside() -> None:
    """Clusters differ as the prior says, jobs as the noise says: the interval holds 80% of the next jobs."""
    dice, inside, width = random.Random(5), 0, 0.09
    between = math.sqrt(width**2 - TRANSFER_WIDTH**2) / SIGMAS_TO_END
    layouts = TRANSFER_WIDTH / SIGMAS_TO_END
    for _ in range(2000):
        cluster = dice.gauss(0, between)
        runs = [kept(cluster + dice.gauss(0, layouts), str(n), 0.0, sensitivity=1, job_width=0) for n in range(3)]
        found = posterior(runs, width)
        inside += abs(cluster + dice.gauss(0, layouts) - found.mean) <= found.step_width
    assert inside / 2000 == pytest.approx(0.8, abs=0.04)
