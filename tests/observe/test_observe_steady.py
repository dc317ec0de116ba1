"""Laws of the statistics: slow steps move no median, scale is scale, a drift is found, outliers get their names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.observe.steady import Steady, quantile, steady

SETTINGS = settings(max_examples=50, deadline=None)
NOISE = st.lists(st.floats(0.99, 1.01), min_size=20, max_size=200)


def told(seconds: list[float] | np.ndarray, covers: list[float] | None = None, **more: object) -> Steady:
    values = np.asarray(seconds, dtype=float)
    weights = np.ones(len(values)) if covers is None else np.asarray(covers, dtype=float)
    return steady(np.arange(1, len(values) + 1), values, weights, **more)  # type: ignore[arg-type]


@SETTINGS
@given(NOISE, st.floats(1e-3, 1e3))
def test_scale_is_scale(seconds: list[float], factor: float) -> None:
    one, other = told(seconds), told([factor * value for value in seconds])
    assert other.step_s == pytest.approx(factor * one.step_s)
    assert (other.low_s, other.high_s) == pytest.approx((factor * one.low_s, factor * one.high_s))
    assert other.drift_fraction == pytest.approx(one.drift_fraction, abs=1e-6)


@SETTINGS
@given(NOISE, st.data())
def test_a_tenth_of_slow_steps_moves_the_median_inside_the_noise(seconds: list[float], data: st.DataObject) -> None:
    rows = data.draw(st.sets(st.integers(0, len(seconds) - 1), max_size=len(seconds) // 10))
    slowed = [value * 20 if row in rows else value for row, value in enumerate(seconds)]
    found = told(slowed)
    assert 0.99 <= found.step_s <= 1.01
    assert sum(one.num_steps for one in found.outliers) + int(found.warmup.sum()) == len(rows)


@SETTINGS
@given(NOISE, st.randoms(use_true_random=False))
def test_order_changes_neither_median_nor_spread(seconds: list[float], random: object) -> None:
    shuffled = list(seconds)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = told(seconds), told(shuffled)
    assert (one.step_s, one.low_s, one.high_s) == (other.step_s, other.low_s, other.high_s)


@SETTINGS
@given(st.floats(0.5, 100), st.integers(20, 300), st.floats(-0.2, 0.2))
def test_a_drift_is_found(step_s: float, count: int, drift: float) -> None:
    line = step_s * (1 + drift * np.linspace(-0.5, 0.5, count))
    assert told(line).drift_fraction == pytest.approx(drift, abs=1e-3)


@SETTINGS
@given(st.floats(1e-3, 1e3), st.integers(1, 100))
def test_equal_steps_have_no_outliers_no_spread_and_no_drift(step_s: float, count: int) -> None:
    found = told([step_s] * count)
    assert (found.step_s, found.low_s, found.high_s, found.outliers) == (step_s, step_s, step_s, ())
    assert found.drift_fraction in (None, 0.0)
    assert not found.warmup.any()


@SETTINGS
@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 5)), min_size=1, max_size=30), st.floats(0.05, 0.95))
def test_weights_are_repetitions(rows: list[tuple[float, int]], fraction: float) -> None:
    values, weights = np.array([value for value, _ in rows]), np.array([float(count) for _, count in rows])
    each = np.repeat(values, weights.astype(int))
    assert quantile(values, weights, fraction) == quantile(each, np.ones(len(each)), fraction)


def test_a_warm_up_is_at_the_begin_and_ends() -> None:
    found = told([30.0, 12.0, *[10.0] * 30, 12.0])
    assert np.flatnonzero(found.warmup).tolist() == [0, 1]
    assert found.warmup_extra_s == pytest.approx(22.0)
    assert [outlier.steps for outlier in found.outliers] == [(33,)]


def test_outliers_that_the_log_explains_have_its_name() -> None:
    seconds = [1.0] * 40
    seconds[10] = seconds[20] = 3.0
    found = told(seconds, marks={10: {"checkpoint"}, 20: {"evaluation"}})
    assert [(outlier.kind, outlier.steps, outlier.extra_s) for outlier in found.outliers] == [
        ("checkpoint", (11,), pytest.approx(2.0)),
        ("evaluation", (21,), pytest.approx(2.0)),
    ]


def test_outliers_at_equal_distances_are_periodic() -> None:
    seconds = [1.5 if row % 25 == 24 else 1.0 for row in range(200)]
    (outlier,) = told(seconds).outliers
    assert (outlier.kind, outlier.period_steps, outlier.num_steps) == ("periodic", 25, 8)
    assert outlier.extra_s == pytest.approx(4.0)


def test_outliers_in_a_row_are_a_slow_spell() -> None:
    seconds = [1.0] * 50 + [1.4] * 8 + [1.0] * 50
    (outlier,) = told(seconds).outliers
    assert (outlier.kind, outlier.num_steps, outlier.steps[0]) == ("slow_spell", 8, 51)


def test_outliers_here_and_there_are_unexplained() -> None:
    seconds = [1.0] * 100
    for row in (13, 21, 54, 71, 90):
        seconds[row] = 1.3
    (outlier,) = told(seconds).outliers
    assert (outlier.kind, outlier.period_steps) == ("unexplained", None)


def test_digits_that_are_not_printed_are_no_outliers() -> None:
    seconds = [1.0, 1.1] * 10 + [1.2]
    assert told(seconds, precision_fraction=0.05).outliers == ()
