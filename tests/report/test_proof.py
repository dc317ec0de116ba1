"""A report claims what the search proved: of the schedules searched, and to the gap that it reached."""

from __future__ import annotations

from typing import Any

import pytest

from planner.answer import SearchReport
from planner.report.proof import says_bound, says_outcome


def report(**changes: Any) -> SearchReport:
    fields = {"num_shapes": 4, "num_fitting": 2, "num_ilps": 1, "outcome": "proven", "lower_bound_s": 20.0, "gap": 0.0}
    return SearchReport.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gap": 0.0026}, "proven, gap 0.26%"),
        # 0.5% of the step is a little more of the bound
        ({"gap": 1 / 0.995 - 1, "asked_gap_fraction": 0.005}, "proven, gap 0.50%"),
        ({"gap": 0.0525, "asked_gap_fraction": 0.005}, "proven to a gap of 5.25% only, where 0.50% was asked for"),
        ({"gap": 0.0525, "outcome": "feasible"}, "stopped by the time limit, gap 5.25%"),
    ],
)
def test_a_proof_that_falls_short_says_so(changes: dict[str, Any], says: str) -> None:
    assert says_outcome(report(**changes)) == says


@pytest.mark.parametrize(
    ("schedules", "under"),
    [
        ((), ""),
        (("1f1b",), " under 1f1b"),
        (("1f1b", "zb-h1", "zb-v"), " under 1f1b, zb-h1 or zb-v"),
    ],
)
def test_the_bound_is_of_the_schedules_searched(schedules: tuple[str, ...], under: str) -> None:
    says = f"no layout that fits is faster than 20.00 s in this model{under}"
    assert says_bound(report(schedules=schedules)) == says
