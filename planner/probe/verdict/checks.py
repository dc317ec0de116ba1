"""Checks of a finished run: order, exchanges, activations in flight, finite losses; and how its ranks spent the time.

That is their utilisation, waits, idle time by cause, and queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.probe.plan_slice import replay_durations
from planner.probe.result import Check, RankResult, StageActivity, shown
from planner.probe.run import Message, ProbeRun, SleepSeconds, message_of, needed_by
from planner.schedule.actions import Action, Schedule
from planner.schedule.replay import replay


def by_stage(run: ProbeRun, ranks: Sequence[RankResult]) -> list[RankResult]:
    """One rank of each pipeline stage."""
    return [next(r for r in ranks if r.stage == stage) for stage in range(run.pp)]


def span_s(ranks: Sequence[RankResult]) -> float:
    """Seconds from the start of the step to the end of the last action of any rank."""
    return max(rank.actions[-1].end_s for rank in ranks)


def busy_s(rank: RankResult) -> float:
    return sum(timed.end_s - timed.start_s for timed in rank.actions)


def waited_s(rank: RankResult) -> float:
    """Seconds in which the rank was free and its next action had not received what it works on."""
    return sum(timed.start_s - timed.ready_s for timed in rank.actions)


def bubble_fraction(ranks: Sequence[RankResult]) -> float:
    """1 − mean busy seconds / span, as `Timeline.bubble_fraction`."""
    return 1 - sum(map(busy_s, ranks)) / len(ranks) / span_s(ranks)


def activity(run: ProbeRun, ranks: Sequence[RankResult]) -> tuple[StageActivity, ...]:
    """Utilisation, waits, idle time by cause and queue of each stage's busiest rank, for which its peers wait."""
    total_s, activities = span_s(ranks), []
    for stage in range(run.pp):
        rank = max((rank for rank in ranks if rank.stage == stage), key=busy_s)
        sent = sent_to(run.order, [other for other in ranks if other.replica == rank.replica])
        queue = queue_of(run.order, sent, rank)
        activities.append(
            StageActivity(
                stage=stage,
                rank=rank.rank,
                utilisation_fraction=busy_s(rank) / total_s,
                wait_s=waited_s(rank),
                idle_s=idle_of(run.order, sent, rank, total_s),
                queue=tuple(queue),
                max_queue=max((depth for _, depth in queue), default=0),
            )
        )
    return tuple(activities)


def sent_to(order: Schedule, pipeline: Sequence[RankResult]) -> dict[Message, float]:
    """The time at which each message of one pipeline's ranks was ready to be sent."""
    actions = [actions for rank in pipeline for actions in rank.actions]
    messages = [message_of(order, Action.parse(action.action)) for action in actions]
    return {message: action.end_s for message, action in zip(messages, actions, strict=True) if message is not None}


def idle_of(order: Schedule, sent: Mapping[Message, float], rank: RankResult, total_s: float) -> dict[str, float]:
    """A rank's idle seconds by cause, with the replay's names for causes. With its busy seconds they add up to
    `total_s`.

    A wait counts as one for an activation or a gradient until the sender has computed it, and then as transfer. Time
    between two actions without a wait belongs to the host. Waits that unequal stages cause are among the waits.
    """
    idle = dict.fromkeys(("fill", "activation", "gradient", "transfer", "host", "drain"), 0.0)
    idle["fill"], free_s = rank.actions[0].start_s, rank.actions[0].end_s
    for timed in rank.actions[1:]:
        needed = needed_by(order, Action.parse(timed.action))
        ready_s = timed.start_s if needed is None else timed.ready_s
        idle["host"] += ready_s - free_s
        if needed is not None:
            sent_s = min(max(sent[needed], ready_s), timed.start_s)
            idle["activation" if needed.kind == "F" else "gradient"] += sent_s - ready_s
            idle["transfer"] += timed.start_s - sent_s
        free_s = timed.end_s
    idle["drain"] = total_s - free_s
    return idle


def queue_of(order: Schedule, sent: Mapping[Message, float], rank: RankResult) -> list[tuple[float, int]]:
    """Number of micro-batches that have arrived at a rank and are not started, over time."""
    changes: list[tuple[float, int]] = []
    for timed in rank.actions:
        needed = needed_by(order, Action.parse(timed.action))
        if needed is not None:
            changes += [(min(sent[needed], timed.start_s), 1), (timed.start_s, -1)]
    depth, curve = 0, []
    for time_s, change in sorted(changes, key=lambda item: (item[0], -item[1])):
        depth += change
        curve.append((time_s, depth))
    return curve


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
