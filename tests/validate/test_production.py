"""Production runs lie in the intervals of their sustained steps."""

from __future__ import annotations

import math

import pytest

from planner.months.losses import load_facts
from planner.validate.rows import PRODUCTION, load_rows
from planner.validate.score import Month, evaluate_rows, months_of, production, says_production


@pytest.fixture(scope="module", name="months")
def _months() -> list[Month]:
    return months_of(evaluate_rows(row for row in load_rows() if row.family == PRODUCTION))


def test_four_of_five_lie_inside(months: list[Month]) -> None:
    found = production(months)
    assert found is not None
    assert found.num_runs == len(months) >= 14
    assert found.num_inside >= 0.8 * found.num_runs
    # and nearly as many where a model's own runs do not decide its factor
    assert found.num_inside_left_out >= 0.75 * found.num_runs


def test_the_factor_is_what_the_runs_say(months: list[Month]) -> None:
    found, factor = production(months), load_facts().sustained_factor
    assert found is not None
    assert found.median_ratio == pytest.approx(factor.value, rel=0.05)
    assert math.log(factor.high / factor.low) / 2 < 0.12


def test_production_runs_count_as_no_benchmarks() -> None:
    assert not any(row.counts for row in load_rows() if row.family == PRODUCTION)


def test_the_line_says_how_many(months: list[Month]) -> None:
    found = production(months)
    assert found is not None
    assert f"{found.num_inside} of {found.num_runs} runs" in says_production(found)


def test_one_model_alone_says_nothing(months: list[Month]) -> None:
    assert production(months[:1]) is None
