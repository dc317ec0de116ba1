"""The plan's pipeline replayed with the seconds of stages that were measured one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.probe.plan_side.eager import repriced
from planner.probe.plan_side.planned_seconds import replay_durations
from planner.probe.result import RankResult
from planner.probe.run import SleepSeconds
from planner.schedule.replay import Durations, makespan_s


def replayed_step_s(eager: Plan, stages: Sequence[RankResult]) -> float:
    """Seconds of the plan's whole step, changed by the difference that measured compute makes to its pipeline."""
    priced = repriced(eager)
    measured_s = makespan_s(priced.order, durations_alone(priced, stages))
    return eager.step.step_s + measured_s - makespan_s(priced.order, priced.durations)


def durations_alone(priced: Candidate, stages: Sequence[RankResult]) -> Durations:
    """Durations of every virtual stage: compute as measured for stages alone, exchanges and host time as planned."""
    planned, seconds, num_chunks_seen = priced.durations, [], [0] * len(stages)
    for stage, (rank, cost) in enumerate(zip(priced.order.stage_to_rank, priced.costs, strict=True)):
        chunk = stages[rank].chunks[num_chunks_seen[rank]]
        num_chunks_seen[rank] += 1
        weight_grad_s = min(chunk.weight_grad_s or 0.0, chunk.backward_s)
        forward_s = chunk.forward_s + planned.forward_s[stage] - float(cost.forward_s)
        beside_s = planned.input_grad_s[stage] - float(cost.input_grad_s)
        seconds.append(SleepSeconds(forward_s, chunk.backward_s - weight_grad_s + beside_s, weight_grad_s))
    return replace(replay_durations(seconds), p2p_s=planned.p2p_s, blocking_p2p=planned.blocking_p2p)
