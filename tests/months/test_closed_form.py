"""The share of time that trains: its limits, its laws, and the interval between checkpoints that is best."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_losses import losses

from planner.months.losses import Fact, stated
from planner.months.whole_run import LONGEST_BETWEEN_SAVES_S, Rhythm, best_interval_s, rhythm_of

HOUR_S = 3600.0
PLAIN = Rhythm(failures_per_s=1 / (3 * HOUR_S), restart_s=500.0, stall_s=20.0, write_s=0.0, evaluation_fraction=0.01)
more = st.floats(1.01, 10)
"""A factor by which something grows."""


def value(fact: Fact) -> float:
    return fact.value


def effective(rhythm: Rhythm) -> float:
    """The share at the interval that is best."""
    return float(rhythm.effective_fraction(best_interval_s(rhythm)))


def test_small_losses_are_those_of_metas_formula() -> None:
    # E[ETTR] ≈ (1 − λ·(u₀ + τ/2)) / (1 + w/τ), arXiv:2410.21680
    rhythm = replace(PLAIN, failures_per_s=1 / (500 * HOUR_S), evaluation_fraction=0.0)
    interval_s = 3000.0
    lost = (rhythm.restart_s + interval_s / 2) * rhythm.failures_per_s
    metas = (1 - lost) / (1 + rhythm.stall_s / interval_s)
    assert rhythm.effective_fraction(interval_s) == pytest.approx(metas, abs=1e-4)


def test_without_failures_only_checkpoints_and_evaluation_take_time() -> None:
    rhythm = replace(PLAIN, failures_per_s=0.0)
    assert rhythm.effective_fraction(HOUR_S) == pytest.approx(0.99 * HOUR_S / (HOUR_S + 20), rel=1e-6)
    assert best_interval_s(rhythm) == LONGEST_BETWEEN_SAVES_S


@given(more, st.sampled_from(["failures_per_s", "restart_s", "stall_s", "write_s", "evaluation_fraction"]))
def test_more_of_any_loss_leaves_less_time_to_train(factor: float, name: str) -> None:
    before = replace(PLAIN, write_s=5.0)
    after = replace(before, **{name: factor * getattr(before, name)})
    assert effective(after) < effective(before)


@given(st.floats(0.05, 1), st.floats(1, 20))
def test_the_best_interval_beats_others(shorter: float, longer: float) -> None:
    best_s = best_interval_s(PLAIN)
    for other_s in (shorter * best_s, longer * best_s):
        # Daly's formula is a series: right to a tenth of a percent
        assert PLAIN.effective_fraction(other_s) <= PLAIN.effective_fraction(best_s) + 1e-3


def test_the_best_interval_is_youngs_for_a_short_stall() -> None:
    # 16,384 H100 at 0.47 per 1,000 GPU-days: 2.5 minutes for a second of stall, 19 for a minute
    between_s = 86_400 / (0.47 * 16.384)
    for stall_s, minutes in ((1.0, 2.5), (60.0, 19.0)):
        rhythm = replace(PLAIN, failures_per_s=1 / between_s, stall_s=stall_s)
        assert best_interval_s(rhythm) / 60 == pytest.approx(minutes, rel=0.03)


def test_checkpoints_are_not_begun_before_the_last_is_written() -> None:
    assert best_interval_s(replace(PLAIN, stall_s=0.1, write_s=900.0)) == 900.0


def test_a_stall_longer_than_the_time_between_failures_is_survived() -> None:
    rhythm = replace(PLAIN, stall_s=10 * HOUR_S)
    assert best_interval_s(rhythm) == LONGEST_BETWEEN_SAVES_S
    assert 0 < effective(rhythm) < 0.05


@given(st.integers(8, 100_000), more, st.booleans())
def test_more_gpus_and_slower_storage_train_less_of_the_time(num_gpus: int, factor: float, asynchronous: bool) -> None:
    def share(num_gpus: int, storage: float) -> float:
        found = losses(num_gpus=num_gpus, asynchronous=asynchronous, storage_gb_per_s=storage)
        return effective(rhythm_of(found, value))

    here = share(num_gpus, 100.0)
    assert share(int(num_gpus * factor) + 1, 100.0) <= here + 1e-12
    assert share(num_gpus, 100.0 * factor) > here


def test_spare_nodes_help_until_there_are_enough() -> None:
    shares = [effective(rhythm_of(losses(num_gpus=16_384, num_spare_nodes=n), value)) for n in range(9)]
    assert shares == sorted(shares)
    enough = losses(num_gpus=16_384).num_spare_nodes_advised
    assert shares[8] - shares[enough] < 0.01 < shares[1] - shares[0]


def test_enough_spare_nodes_beat_the_pool() -> None:
    pool, kept = losses(num_gpus=16_384), losses(num_gpus=16_384, num_spare_nodes=9)
    assert effective(rhythm_of(kept, value)) > effective(rhythm_of(pool, value))


def test_a_rhythm_of_draws_is_that_of_each_draw() -> None:
    found = replace(losses(), failures_per_1000_gpu_days=stated(0.5))
    drawn = rhythm_of(found, lambda fact: fact.value * np.array([1.0, 1.0]))
    assert drawn.effective_fraction(600.0) == pytest.approx(rhythm_of(found, value).effective_fraction(600.0))
