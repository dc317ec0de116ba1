"""A measured step and the predicted one as Chrome trace events, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.answer import Plan
from planner.probe.plan_side.eager import in_eager_torch, repriced
from planner.probe.plan_side.gpu_run import stand_in_stages
from planner.probe.plan_side.planned_seconds import planned_seconds, replay_durations
from planner.probe.plan_side.rank_grid import sampled_stages
from planner.probe.result import ProbeResult
from planner.probe.verdict.activity import by_stage, span_s
from planner.probe.verdict.kernels import seen_kernels
from planner.probe.verdict.replay_stages import durations_alone
from planner.schedule.replay import Durations, replay

MEASURED, PREDICTED = 0, 1
_MICROSECONDS = 1e6

TraceEvent = dict[str, Any]


def trace_events(plan: Plan, result: ProbeResult) -> dict[str, Any]:
    """Trace events in µs: a process of measured ranks and one of predicted ranks, with a thread per pipeline rank.

    Stages that ran alone are replayed with the seconds that each of them took. If one is missing, there are no events.
    """
    events: list[TraceEvent] = []
    if result.mode == "ranks" and result.ranks:
        events = [*_measured(result), *_predicted(plan, result)]
    elif result.mode == "stages":
        rank_of_stage = {rank.stage: rank for rank in result.ranks}
        eager = in_eager_torch(plan, seen_kernels(result.ranks), alone=True)
        stands_for, priced = stand_in_stages(eager.best), repriced(eager)
        if rank_of_stage.keys() >= set(stands_for):
            alone = durations_alone(priced, [rank_of_stage[stage] for stage in stands_for])
            events = [
                *_replayed(MEASURED, f"replayed from stages measured alone on {result.device}", result, alone),
                *_replayed(PREDICTED, "predicted", result, priced.durations),
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _measured(result: ProbeResult) -> Iterator[TraceEvent]:
    error_s = result.clock_error_s
    clocks = "" if error_s is None else f", clocks within {_MICROSECONDS * error_s:.0f} µs"
    yield _process(MEASURED, f"measured on {result.device}{clocks}")
    for rank in by_stage(result.run, result.ranks):
        for timed in rank.actions:
            if timed.start_s > timed.ready_s:
                yield _span(MEASURED, rank.stage, "wait", timed.ready_s, timed.start_s)
            yield _span(MEASURED, rank.stage, timed.action, timed.start_s, timed.end_s)


def _predicted(plan: Plan, result: ProbeResult) -> Iterator[TraceEvent]:
    run, seconds = result.run, result.run.sleep
    if seconds is None:
        stages = sampled_stages(plan.parallelism.pp, run.pp)
        seconds = planned_seconds(in_eager_torch(plan, seen_kernels(result.ranks)).best, run.order, stages)
    predicted = replay_durations(seconds)
    if run.dtype == "bfloat16" or run.sleep is not None:
        yield from _replayed(PREDICTED, "predicted", result, predicted)
        return
    times = span_s(result.ranks) / replay(run.order, predicted).makespan_s
    name = f"predicted of the plan's own stages, × {times:.3g} to be as long as measured"
    yield from _replayed(PREDICTED, name, result, predicted, times)


def _replayed(pid: int, name: str, result: ProbeResult, seconds: Durations, times: float = 1.0) -> Iterator[TraceEvent]:
    timeline = replay(result.run.order, seconds)
    yield _process(pid, name)
    for rank, actions in enumerate(result.run.ranks):
        starts, ends = (times * timeline.start_s[rank]).tolist(), (times * timeline.end_s[rank]).tolist()
        for action, start_s, end_s in zip(actions, starts, ends, strict=True):
            yield _span(pid, rank, action, start_s, end_s)


def _process(pid: int, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _span(pid: int, rank: int, name: str, start_s: float, end_s: float) -> TraceEvent:
    return {
        "ph": "X",
        "pid": pid,
        "tid": rank,
        "name": name,
        "ts": start_s * _MICROSECONDS,
        "dur": (end_s - start_s) * _MICROSECONDS,
    }
