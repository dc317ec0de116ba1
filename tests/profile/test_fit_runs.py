"""The fit to published runs: it finds what made them, and what it cannot see it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from planner.profile.coefficients import COEFFICIENTS, Coefficient
from planner.profile.fit_runs import Fit, Priced, replaced
from planner.specs.registry import load_hardware
from planner.validate.rows import Row, load_rows

ROWS = [row for row in load_rows() if row.family == "korthikanti"][:4]
PRODUCTS = Coefficient("products", "hardware", ("a100-sxm-80gb",), "efficiency.gemm_factor", 1.0, 0.5, 2.0, 10.0)
NETWORK = Coefficient("network", "hardware", ("h100-sxm-80gb",), "tiers.1.efficiency_fraction", 0.8, 0.3, 0.95, 0.2)


def made_with(value: float) -> list[Row]:
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


@pytest.mark.parametrize("coefficient", COEFFICIENTS, ids=lambda c: c.name)
def test_every_coefficient_names_a_number_within_its_bounds(coefficient: Coefficient) -> None:
    assert coefficient.low < coefficient.start < coefficient.high
    rows = [row for row in load_rows() if row.counts and Priced.of(row).applies(coefficient)]
    assert rows, "nothing is fitted to nothing"


def test_a_dotted_path_reaches_into_tuples() -> None:
    hardware = replaced(load_hardware("a100"), "tiers.1.efficiency_fraction", 0.5)
    assert [tier.efficiency_fraction == 0.5 for tier in hardware.tiers] == [False, True]
