"""Traces that torch recorded of two ranks on a CPU: rank 1 computes its forward three times (data/TRACES.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.observe.traces.events import TraceReport
from planner.observe.traces.recorded import read_traces

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def report() -> TraceReport:
    return read_traces([DATA / "cpu_rank0.json.gz", DATA / "cpu_rank1.json.gz"])


def test_steps_are_found_and_cut_exactly(report: TraceReport) -> None:
    for rank in report.ranks:
        assert [step.number for step in rank.steps] == [2, 3, 4]
        for step in rank.steps:
            parts = (step.compute_s, step.exposed_communication_s, step.copies_s)
            idle = (step.host_gaps_s, step.dependencies_s, step.idle_s)
            assert sum(parts) + sum(idle) == pytest.approx(step.wall_s, abs=1e-12)
            assert sum(family.seconds for family in step.families) == pytest.approx(step.compute_s, abs=1e-12)
            assert {"gemm", "elementwise"} <= {family.family for family in step.families}


def test_waits_are_told_apart_from_transfers(report: TraceReport) -> None:
    for rank in report.ranks:
        reduced = next(row for row in rank.collectives if row.collective == "all_reduce")
        assert reduced.transfer_s is not None
        assert reduced.wait_s is not None
    assert report.clock_error_s is not None


def test_what_a_cpu_s_trace_cannot_show_is_said(report: TraceReport) -> None:
    assert all("no GPU's events" in rank.warnings[0] for rank in report.ranks)
    assert any("neither group nor bytes" in told for told in report.not_shown)
