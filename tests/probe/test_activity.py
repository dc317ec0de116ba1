"""What ranks did with their time: every idle second has a cause, and a slow peer is seen."""

from __future__ import annotations

from typing import Any

import pytest

from planner.probe.result import RankResult, StepSeconds, TimedAction
from planner.probe.verdict.compare import activity, bubble_fraction, run_checks

pytest.importorskip("torch", reason="needs the probe extra (torch)")

STEP = StepSeconds(pipeline_s=1.0, reduce_s=0.0, optimizer_s=0.0, step_s=1.0, loss=1.0, gradient_norm=1.0)
FIRST = (("0F0", 0.5, 0.5, 2.0), ("0F1", 2.1, 2.1, 3.6), ("0B0", 3.6, 8.0, 9.0), ("0B1", 9.0, 12.0, 13.0))
LAST = (("1F0", 0.0, 3.0, 5.0), ("1B0", 5.0, 5.0, 7.5), ("1F1", 7.5, 7.5, 9.0), ("1B1", 9.0, 9.2, 11.0))
"""Action, ready, start, end: 1F1B of two stages and two micro-batches."""


def rank_of(stage: int, timed: Any, dp: int = 0, slower: float = 1.0) -> RankResult:
    actions = tuple(
        TimedAction(action=name, ready_s=slower * ready, start_s=slower * start, end_s=slower * end)
        for name, ready, start, end in timed
    )
    return RankResult(
        rank=2 * stage + dp, stage=stage, dp=dp, tp=0, torch_version="", device_name="cpu", num_parameters=1,
        steps=(STEP,), actions=actions, peak_in_flight_chunks=2 - stage,
    )  # fmt: skip


def test_idle_seconds_are_those_of_the_run_by_what_they_were_for(make_run: Any) -> None:
    ranks = [rank_of(0, FIRST), rank_of(1, LAST)]
    first, last = activity(make_run(("1f1b", 2, 1, 2), num_steps=1), ranks)
    idle = {"fill": 0.5, "activation": 0.0, "gradient": 3.9 + 2.0, "transfer": 0.5 + 1.0, "host": 0.1, "drain": 0.0}
    assert first.idle_s == pytest.approx(idle)
    # its first wait is the fill; 1B1 needs nothing but the rank's own forward
    idle = {"fill": 3.0, "activation": 0.0, "gradient": 0.0, "transfer": 0.0, "host": 0.2, "drain": 2.0}
    assert last.idle_s == pytest.approx(idle)
    for stage in (first, last):
        assert sum(stage.idle_s.values()) == pytest.approx((1 - stage.utilisation_fraction) * 13.0)


def test_a_slow_replica_is_shown_for_its_stage_and_counts_in_the_bubble(make_run: Any) -> None:
    run = make_run(("1f1b", 2, 1, 2), dp=2, num_steps=1)
    usual, slow = ([rank_of(0, FIRST, dp, slower), rank_of(1, LAST, dp, slower)] for dp, slower in ((0, 1.0), (1, 1.5)))
    assert [(stage.rank, stage.wait_s) for stage in activity(run, [*usual, *slow])] == [
        (1, pytest.approx(1.5 * 7.4)),
        (3, pytest.approx(1.5 * 3.2)),
    ]
    assert bubble_fraction([*usual, *slow]) > bubble_fraction(slow)


def test_what_one_replica_did_otherwise_fails(make_run: Any) -> None:
    run = make_run(("1f1b", 2, 1, 2), dp=2, num_steps=1)
    ranks = [rank_of(stage, timed, dp) for dp in (0, 1) for stage, timed in enumerate((FIRST, LAST))]
    order, _, in_flight = run_checks(run, ranks)
    assert order.passed
    assert in_flight.passed
    ranks[2] = ranks[2].model_copy(update={"actions": ranks[2].actions[::-1], "peak_in_flight_chunks": 3})
    order, _, in_flight = run_checks(run, ranks)
    assert not order.passed
    assert in_flight.detail == "[3, 1] chunks at most, planned [2, 1]"
