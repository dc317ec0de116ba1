"""Checks of a finished run: the order, the exchanges, the activations in flight, and finite losses."""

from __future__ import annotations

from collections.abc import Sequence

from planner.probe.plan_side.planned_seconds import replay_durations
from planner.probe.rank.messages import message_of
from planner.probe.result import Check, RankResult, shown
from planner.probe.run import ProbeRun, SleepSeconds
from planner.schedule.replay import replay


def in_flight(run: ProbeRun) -> list[int]:
    """The largest number of activations that each pipeline rank holds at once, according to its order."""
    equal_seconds = [SleepSeconds(1.0, 1.0, 1.0)] * len(run.chunks)
    return [int(count) for count in replay(run.order, replay_durations(equal_seconds)).peak_in_flight_chunks]


def run_checks(run: ProbeRun, ranks: Sequence[RankResult]) -> list[Check]:
    """Checks of what a finished run proves. A message of the wrong shape or a deadlock would have ended the run."""
    as_listed = [tuple(timed.action for timed in rank.actions) == run.ranks[rank.stage] for rank in ranks]
    num_messages = sum(message_of(run.order, action) is not None for actions in run.order.ranks for action in actions)
    planned = in_flight(run)
    measured = [max(rank.peak_in_flight_chunks for rank in ranks if rank.stage == stage) for stage in range(run.pp)]
    checks = [
        Check(name="order", passed=all(as_listed), detail=f"{sum(map(len, run.ranks))} actions without a deadlock"),
        Check(name="in flight", passed=measured == planned, detail=f"{measured} chunks at most, planned {planned}"),
    ]
    if num_messages:
        detail = f"{num_messages} messages, each of the planned shape"
        checks.insert(1, Check(name="exchanges", passed=True, detail=detail))
    if run.sleep is None and not run.check:
        checks.append(check_finite(ranks))
    for name in dict.fromkeys(check.name for rank in ranks for check in rank.checks):
        same = [check for rank in ranks for check in rank.checks if check.name == name]
        worst = next((check for check in same if not check.passed), same[0])
        checks.append(worst)
    return checks


def check_finite(ranks: Sequence[RankResult]) -> Check:
    """A check that losses and gradient norms are numbers, for runs whose losses are compared with nothing."""
    passed = all(None not in (step.loss, step.gradient_norm) for rank in ranks for step in rank.steps)
    last = ranks[-1].steps[-1]
    detail = f"loss {shown(last.loss, 4)}, gradient norm {shown(last.gradient_norm, 4)}"
    return Check(name="finite", passed=passed, detail=detail)
