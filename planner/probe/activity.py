"""What the ranks did with their time: utilisation, waits, idle time by cause, queues."""

from __future__ import annotations

from collections.abc import Sequence

from planner.probe.result import RankResult, StageActivity
from planner.probe.run import ProbeRun, SleepSeconds
from planner.probe.wires import message_of, needed_by
from planner.schedule.actions import Action, Schedule
from planner.schedule.replay import Durations, replay


def durations(seconds: Sequence[SleepSeconds]) -> Durations:
    """Seconds per virtual stage as the replay takes them."""
    return Durations(
        forward_s=[s.forward_s for s in seconds],
        input_grad_s=[s.input_grad_s for s in seconds],
        weight_grad_s=[s.weight_grad_s for s in seconds],
    )


def by_stage(run: ProbeRun, ranks: Sequence[RankResult]) -> list[RankResult]:
    """One rank of each pipeline stage."""
    return [next(r for r in ranks if r.stage == stage) for stage in range(run.pp)]


def measured_seconds(run: ProbeRun, ranks: Sequence[RankResult]) -> tuple[SleepSeconds, ...]:
    """Measured medians of every virtual stage; a backward that was not split is all input gradient."""
    found: dict[int, SleepSeconds] = {}
    for rank in ranks:
        for chunk in rank.chunks:
            whole = SleepSeconds(chunk.forward_s, chunk.backward_s, 0.0)
            if chunk.input_grad_s is not None and chunk.weight_grad_s is not None and run.order.splits_backward:
                whole = SleepSeconds(chunk.forward_s, chunk.input_grad_s, chunk.weight_grad_s)
            found.setdefault(chunk.stage % len(run.chunks), whole)
    return tuple(found[stage] for stage in range(len(run.chunks)))


def span_s(ranks: Sequence[RankResult]) -> float:
    """From the start of the step to the last rank's last action."""
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
    """Utilisation, waits, idle time by cause and queue of every pipeline rank."""
    stages = by_stage(run, ranks)
    timeline = replay(run.order, durations(measured_seconds(run, stages)))
    total_s = span_s(stages)
    found = []
    for rank in stages:
        queue = queue_of(run.order, stages, rank)
        found.append(
            StageActivity(
                stage=rank.stage,
                utilisation_fraction=busy_s(rank) / total_s,
                wait_s=waited_s(rank),
                idle_s={cause: float(seconds[rank.stage]) for cause, seconds in timeline.idle_s.items()},
                queue=tuple(queue),
                max_queue=max((depth for _, depth in queue), default=0),
            )
        )
    return tuple(found)


def queue_of(order: Schedule, stages: Sequence[RankResult], rank: RankResult) -> list[tuple[float, int]]:
    """Micro-batches that have arrived at a rank and wait to be taken up, over time."""
    sent = {}
    for other in stages:
        for timed in other.actions:
            message = message_of(order, Action.parse(timed.action))
            if message is not None:
                sent[message] = timed.end_s
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
