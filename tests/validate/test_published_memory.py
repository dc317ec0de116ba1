"""Published memory: peaks lie in their interval as often as it says, and runs that ran out of memory had the risk."""

from __future__ import annotations

import pytest

from planner.validate.rows import load_rows
from planner.validate.score import Outcomes, Scored, evaluate_rows, load_memory_rows, memory_coverage, memory_outcomes


@pytest.fixture(scope="module")
def scored() -> list[Scored]:
    """All but AMD's."""
    rows = [row for row in load_rows() if row.measured.peak_memory_gib is not None]
    return evaluate_rows([row for row in rows if not row.on_amd])


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, bool], Outcomes]:
    return {(each.name, each.ran_out): each for each in memory_outcomes(load_memory_rows(), [])}


def test_peaks_lie_in_their_interval_as_often_as_it_says(scored: list[Scored]) -> None:
    found = {each.kind: each for each in memory_coverage(scored)}
    assert found["all but unverified"].num_rows >= 147
    assert 0.8 <= found["all but unverified"].coverage <= 0.97
    assert found["device"].coverage >= 0.8
    assert found["reserved"].coverage >= 0.7
    assert found["unverified"].coverage >= 0.8


@pytest.mark.parametrize(
    ("start", "num_rows", "tolerance"),
    [
        ("primus-dsv2lite-mi355x8", 6, 0.04),
        # no number was read from these
        ("primus-llama3.1-8b-mi300x8-fp8", 2, 0.04),
        ("primus-qwen2.5-7b-mi300x8-fp8", 1, 0.04),
        ("primus-safe-llama3.1-8b-mi325x8", 1, 0.04),
        ("primus-qwen3-235b-mi355x32-1f1b", 1, 0.08),
        ("primus-qwen3-235b-mi355x32-v", 3, 0.12),
        ("primus-qwen3-235b-mi355x32-z", 2, 0.12),
    ],
)
def test_peaks_on_amd_gpus_are_near_and_in_their_interval(start: str, num_rows: int, tolerance: float) -> None:
    rows = [row for row in load_rows() if row.id.startswith(start) and row.measured.peak_memory_gib]
    runs = evaluate_rows(rows)
    assert len(rows) == num_rows
    for run in runs:
        assert run.memory_error is not None
        assert abs(run.memory_error) <= tolerance
    assert all(each.coverage == 1 for each in memory_coverage(runs))


def test_runs_that_ran_out_of_memory_had_a_risk_and_runs_that_ran_had_none(
    outcomes: dict[tuple[str, bool], Outcomes],
) -> None:
    failed, ran = outcomes["aleph-alpha", True], outcomes["aleph-alpha", False]
    assert failed.num_rows > 100
    assert failed.num_likely / failed.num_rows > 0.6
    assert failed.mean_risk > 0.6
    assert ran.num_likely / ran.num_rows < 0.02
    assert ran.mean_risk < 0.02
    assert all(
        each.num_likely >= 5 / 6 * each.num_rows for (name, out), each in outcomes.items() if out and "bloom" in name
    )


def test_every_row_is_priced_and_says_where_it_stands() -> None:
    rows = load_memory_rows()
    assert len({row.id for row in rows}) == len(rows) > 300
    for row in rows[::25]:
        assert row.source
        layout = row.priced()
        assert layout.parallelism.num_gpus_used == row.run["num_gpus"]
        assert layout.oom_probability is not None
