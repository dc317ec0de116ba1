"""A pipeline replayed with seconds that were measured: of stages one by one, and of chunks with and without messages
beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.probe.plan_side.eager import repriced
from planner.probe.plan_side.planned_seconds import replay_durations
from planner.probe.result import ChunkSeconds, RankResult
from planner.probe.run import ProbeRun, SleepSeconds
from planner.schedule.replay import Durations, makespan_s


def replayed_step_s(eager: Plan, stages: Sequence[RankResult]) -> float:
    """Seconds of the plan's whole step, changed by the difference that measured compute makes to its pipeline."""
    priced = repriced(eager)
    measured_s = priced.run(durations=durations_alone(priced, stages)).makespan_s
    return eager.step.step_s + measured_s - priced.run().makespan_s


def durations_alone(priced: Candidate, stages: Sequence[RankResult]) -> Durations:
    """Durations of every virtual stage: compute as measured for stages alone, exchanges and host time as planned."""
    planned, seconds, num_chunks_seen = priced.durations, [], [0] * len(stages)
    for stage, (rank, cost) in enumerate(zip(priced.placement, priced.costs, strict=True)):
        chunk = stages[rank].chunks[num_chunks_seen[rank]]
        num_chunks_seen[rank] += 1
        weight_grad_s = min(chunk.weight_grad_s or 0.0, chunk.backward_s)
        forward_s = chunk.forward_s + planned.forward_s[stage] - float(cost.forward_s)
        beside_s = planned.input_grad_s[stage] - float(cost.input_grad_s)
        seconds.append(SleepSeconds(forward_s, chunk.backward_s - weight_grad_s + beside_s, weight_grad_s))
    return replace(replay_durations(seconds), p2p_s=planned.p2p_s, blocking_p2p=planned.blocking_p2p)


def beside_messages_s(run: ProbeRun, ranks: Sequence[RankResult]) -> float:
    """Seconds by which the pipeline is longer because messages take a part of the GPUs that compute beside them: its
    replay with the chunks' seconds within the step, less that with their own seconds."""
    among, alone = list[SleepSeconds](), list[SleepSeconds]()
    for stage in range(run.order.num_model_stages):
        chunks = [c for rank in ranks for c in rank.chunks if c.stage % run.order.num_model_stages == stage]
        if not any(chunk.quiet_forward_s is not None for chunk in chunks):
            return 0.0
        among.append(_typical(run, chunks, [(chunk.forward_s, chunk.backward_s) for chunk in chunks]))
        alone.append(_typical(run, chunks, [(chunk.own_forward_s, chunk.own_backward_s) for chunk in chunks]))
    return makespan_s(run.order, replay_durations(among)) - makespan_s(run.order, replay_durations(alone))


def _typical(run: ProbeRun, chunks: Sequence[ChunkSeconds], seconds: Sequence[tuple[float, float]]) -> SleepSeconds:
    """Medians over the replicas of a chunk, of which `seconds` has forward and backward."""
    weight_share = median((chunk.weight_grad_s or 0.0) / (chunk.backward_s or 1.0) for chunk in chunks)
    forward_s, backward_s = (median(values) for values in zip(*seconds, strict=True))
    weight_grad_s = weight_share * backward_s if run.order.splits_backward else 0.0
    return SleepSeconds(forward_s, backward_s - weight_grad_s, weight_grad_s)
