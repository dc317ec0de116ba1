"""The fit to published runs: it finds what made them, and what it cannot see it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import cache

import numpy as np
import pytest

from planner.errors import Unsupported
from planner.specs.registry import load_hardware
from planner.validate.rows import HELD_OUT, PublishedRun, load_rows
from tools.calibrate.runs import COEFFICIENTS, Coefficient, Fit, Priced, left_out_errors, replaced

ROWS = [row for row in load_rows() if row.family == "korthikanti"][:4]
PRODUCTS = Coefficient("products", "hardware", ("a100-sxm-80gb",), "efficiency.gemm_factor", 1.0, 0.5, 2.0, 10.0)
NETWORK = Coefficient("network", "hardware", ("h100-sxm-80gb",), "tiers.1.efficiency_fraction", 0.8, 0.3, 0.95, 0.2)


def made_with(value: float) -> list[PublishedRun]:
    """The rows, as measured on a GPU whose products take `value` times as long."""
    seconds = [Priced.of(row).step_s({PRODUCTS: value}) for row in ROWS]
    measured = [row.measured.model_copy(update={"step_s": s}) for row, s in zip(ROWS, seconds, strict=True)]
    return [row.model_copy(update={"measured": m}) for row, m in zip(ROWS, measured, strict=True)]


@pytest.mark.parametrize("value", [0.8, 1.3])
def test_a_fit_finds_the_coefficient_that_made_the_rows(value: float) -> None:
    fit = Fit(made_with(value), [PRODUCTS])
    assert float(np.exp(fit.solve()[0])) == pytest.approx(value, rel=0.01)


def test_a_coefficient_that_no_row_shows_stays_at_its_guess() -> None:
    fit = Fit(made_with(1.1), [PRODUCTS, NETWORK])
    assert float(np.exp(fit.solve()[1])) == pytest.approx(NETWORK.start)


def test_a_family_left_out_does_not_pull() -> None:
    fit = Fit(made_with(1.3), [PRODUCTS])
    assert float(np.exp(fit.solve(left_out="korthikanti")[0])) == pytest.approx(PRODUCTS.start)


@cache
def counted() -> list[Priced]:
    """The published runs that a fit may use."""
    runs = []
    for row in load_rows():
        with suppress(Unsupported):
            runs += [Priced.of(row)] if row.counts else []
    return runs


@pytest.mark.parametrize("coefficient", COEFFICIENTS, ids=lambda c: c.name)
def test_every_coefficient_names_a_number_within_its_bounds(coefficient: Coefficient) -> None:
    assert coefficient.low < coefficient.start < coefficient.high
    assert any(priced.applies(coefficient) for priced in counted()), "nothing is fitted to nothing"


def test_a_dotted_path_reaches_into_tuples() -> None:
    hardware = replaced(load_hardware("a100"), "tiers.1.efficiency_fraction", 0.5)
    assert [tier.efficiency_fraction == 0.5 for tier in hardware.tiers] == [False, True]


def test_left_out_errors_are_those_of_the_fit_without_the_family() -> None:
    rows = made_with(1.3)
    other = [row.model_copy(update={"family": "other"}) for row in made_with(1.1)]
    fit = Fit([*rows, *other], [PRODUCTS])
    best = fit.solve()
    errors = left_out_errors(fit, best)
    # each half is predicted by the other: the products of one take 1.1 / 1.3 of the time of the other's
    assert np.all(errors[:4] < -0.05)
    assert np.all(errors[4:] > 0.05)
    assert np.all(np.abs(errors) > np.abs(fit.log_errors(best)))


@pytest.mark.thorough(0)
def test_nothing_is_fitted_to_what_is_held_out() -> None:
    rows = made_with(1.3)
    held_out = [row.model_copy(update={"family": HELD_OUT[0]}) for row in made_with(1.1)]
    alone, beside = Fit(rows, [PRODUCTS]), Fit([*rows, *held_out], [PRODUCTS])
    assert beside.solve() == pytest.approx(alone.solve())
    best = beside.solve()
    assert left_out_errors(beside, best)[4:] == pytest.approx(beside.log_errors(best)[4:])


def test_runs_published_again_share_a_price() -> None:
    again = [ROWS[0], ROWS[1], ROWS[0].model_copy(update={"id": "again"})]
    first, second, third = Priced.all_of(again)
    assert first is third
    assert first is not second


def test_a_coefficient_applies_where_no_feature_of_the_run_says_what_it_is() -> None:
    overlap = next(c for c in COEFFICIENTS if c.name == "Megatron TP overlap")
    row = next(row for row in load_rows() if row.family == "simumax-b200")
    silent = row.model_copy(update={"run": {**row.run, "features": {}}})
    assert row.run["features"]["tp_comm_overlap"] is False
    assert not Priced.of(row).applies(overlap)
    assert Priced.of(silent).applies(overlap)
    asynchronous = next(c for c in COEFFICIENTS if c.feature == "async_tp")
    titan = {str(r.run.get("features", {}).get("async_tp")): r for r in load_rows() if r.family == "torchtitan"}
    assert Priced.of(titan["True"]).applies(asynchronous)
    assert not Priced.of(titan["False"]).applies(asynchronous)


@pytest.mark.parametrize(("what", "name"), [("kernels", "v100-sxm-16gb"), ("kernels", "nope"), ("runs", "nope")])
def test_calibrating_what_is_not_there_says_what_is(what: str, name: str) -> None:
    command = [sys.executable, "-m", "tools.calibrate", what, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error, hint = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert error.startswith("error: ")
    assert name in error
    assert hint.startswith("hint: one of ")
