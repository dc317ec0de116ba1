"""Seconds of a micro-batch's forward and backward on each rank, from traces or from the trainer's timers.

    from planner.observe.ideal.passes import passes_of

    for one in passes_of(case):  # by rank; empty where no file tells forward and backward apart
        print(one.rank, one.stage, one.forward_s, one.backward_s, one.holds_exchanges, one.source)

Traces give what a rank computes, and the gaps inside of a pass, without exchanges; those are `exchanges_s`. Timers hold
them: Megatron-LM's `forward-compute` and `backward-compute` synchronise the GPU before and behind a pass, so that the
transfers between stages are outside, and exchanges of tp, cp and ep, the loader of data, and the waits for their other
ranks are inside (megatron/core/pipeline_parallel/schedules.py). They add up all micro-batches of a step. What a plan
says of the same seconds is `planned_pass_s(candidate, stage, holds_exchanges)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.ideal.grid import Grid, grid_of
from planner.observe.measured import RankPasses, Timer
from planner.observe.traces.groups import PLANNED
from planner.observe.traces.results import PhaseTime, RankReport, TraceStep
from planner.physics.passes import COMM_GROUPS

INSIDE = tuple(group for group, planned in PLANNED.items() if planned in COMM_GROUPS)
"""Groups whose exchanges are inside of passes."""
MOST_STEPS = 16
"""The most steps of a trace that are replayed, evenly spread over it."""
_TIMERS = (("forward-compute", "backward-compute"), ("fwd", "bwd_inner"))
"""Timers of forward and backward that hold all micro-batches of a step: Megatron-LM's and DeepSpeed's."""


def passes_of(case: Case) -> tuple[RankPasses, ...]:
    """The passes of each rank that the files show, by rank; those of traces where there are any."""
    grid = grid_of(case)
    return case.observation.passes or _of_traces(case, grid) or _of_timers(case, grid)


def planned_pass_s(candidate: Candidate, stage: int, holds_exchanges: bool) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward through all chunks of a pipeline rank, by a plan's prices.

    The host's seconds of a micro-batch are among them, exchanges of tp, cp and ep only if asked for.
    """
    parts = candidate.durations
    chunks = [chunk for chunk, rank in enumerate(candidate.placement) if rank == stage]
    forward_s = sum(parts.forward_s[chunk] for chunk in chunks)
    backward_s = sum(parts.input_grad_s[chunk] + parts.weight_grad_s[chunk] for chunk in chunks)
    if holds_exchanges:
        return forward_s, backward_s
    cost = candidate.rank_costs[stage]
    exchanges = cost.forward_total_s - cost.forward_s, cost.input_grad_total_s - cost.input_grad_s
    return forward_s - float(exchanges[0]), backward_s - float(exchanges[1])


def passes_by_step(case: Case, most: int = MOST_STEPS) -> tuple[tuple[RankPasses, ...], ...]:
    """The passes of each step that all traces show, of `most` if there are more; without traces, those of any step."""
    traces, grid = case.recorded.traces if case.recorded else None, grid_of(case)
    reports = [report for report in traces.ranks if any(step.phases for step in report.steps)] if traces else []
    of_steps = [{step.number: step for step in report.steps if not step.warm_up} for report in reports]
    shared = set.intersection(*(set(steps) for steps in of_steps)) if of_steps else set()
    numbers = sorted(number for number in shared if number is not None)
    found = []
    for number in numbers[:: -(-len(numbers) // most)] if numbers else ():
        each = [_of_trace(report, [steps[number]], grid) for report, steps in zip(reports, of_steps, strict=True)]
        found.append(tuple(one for one in each if one is not None))
    return tuple(one for one in found if one) or (passes_of(case),)


def _of_traces(case: Case, grid: Grid | None) -> tuple[RankPasses, ...]:
    traces = case.recorded.traces if case.recorded else None
    found = [
        _of_trace(report, [step for step in report.steps if not step.warm_up], grid)
        for report in (traces.ranks if traces else ())
    ]
    return tuple(sorted((one for one in found if one), key=lambda one: -1 if one.rank is None else one.rank))


def _of_trace(report: RankReport, steps: Sequence[TraceStep], grid: Grid | None) -> RankPasses | None:
    """The passes of one rank's trace: medians over some steps; None where nothing tells them apart."""
    forward_s, backward_s = (_median(_pass_s(step, name, grid) for step in steps) for name in ("forward", "backward"))
    if forward_s is None and backward_s is None:
        return None
    rank, stage, pipeline = report.rank, report.stage, report.pipeline
    if grid and rank is not None:
        stage = grid.stage(rank) if stage is None else stage
        pipeline = grid.pipeline(rank) // (grid.tp * grid.cp)
    told = next(phase.source for step in steps for phase in step.phases if phase.phase in ("forward", "backward"))
    return RankPasses(
        rank=rank, stage=stage, pipeline=pipeline, forward_s=forward_s, backward_s=backward_s,
        holds_exchanges=told == "operators", source=f"{told} in the trace",
        exchanges_s=None if told == "operators" else _median(_exchanges_s(step, grid) for step in steps),
        num_microbatches=None if (count := _median(_counted(step, grid) for step in steps)) is None else round(count),
        microbatch_sizes=_sizes(steps[0]) if len(steps) == 1 and not (grid and grid.vpp > 1) else (),
    )  # fmt: skip


def _sizes(step: TraceStep) -> tuple[float, ...]:
    """Seconds of each micro-batch's forward and backward over their mean; empty where they are alike."""
    phases = [phase for phase in step.phases if phase.phase in ("forward", "backward")]
    counts = {phase.num_ranges for phase in phases}
    if len(counts) != 1 or not any(phase.each_s for phase in phases):
        return ()
    (count,) = counts
    each = [phase.each_s or (phase.seconds / count,) * count for phase in phases]
    totals = [sum(passes) for passes in zip(*each, strict=True)]
    return tuple(total * count / sum(totals) for total in totals)


def _pass_s(step: TraceStep, name: str, grid: Grid | None) -> float | None:
    """Seconds of one micro-batch's pass in a step, through all chunks of the rank."""
    phase = next((phase for phase in step.phases if phase.phase == name), None)
    count = _num_microbatches(phase, grid)
    if phase is None or not count:
        return None
    return (phase.seconds if phase.own_s is None else phase.own_s) / count


def _num_microbatches(phase: PhaseTime | None, grid: Grid | None) -> float | None:
    """Micro-batches of a step: as many as were annotated, or as the batch has."""
    if phase is not None and phase.num_ranges:
        return phase.num_ranges / (grid.vpp if grid else 1)
    return grid.num_microbatches if grid else None


def _counted(step: TraceStep, grid: Grid | None) -> float | None:
    return _num_microbatches(next((phase for phase in step.phases if phase.phase == "forward"), None), grid)


def _exchanges_s(step: TraceStep, grid: Grid | None) -> float | None:
    count = _counted(step, grid)
    return sum(group.exposed_s for group in step.groups if group.group in INSIDE) / count if count else None


def _of_timers(case: Case, grid: Grid | None) -> tuple[RankPasses, ...]:
    """The passes by timers; of the least and the most over the ranks two, whose ranks nobody names."""
    timers = {timer.name: timer for timer in case.observation.timers}
    names = next((pair for pair in _TIMERS if all(name in timers for name in pair)), None)
    if names is None or grid is None or not grid.num_microbatches or _overlaps_passes(case):
        return ()
    forward, backward = (timers[name] for name in names)
    count, told = grid.num_microbatches, f"timers {names[0]} and {names[1]}"
    tensor = grid.tp * grid.cp
    if ranks := sorted(forward.per_rank_s.keys() & backward.per_rank_s.keys()):
        return tuple(
            _timed(forward.per_rank_s[rank], backward.per_rank_s[rank], count, f"{told} of the rank").model_copy(
                update={"rank": rank, "stage": grid.stage(rank), "pipeline": grid.pipeline(rank) // tensor}
            )
            for rank in ranks
        )
    stage = 0 if grid.pp == 1 else None
    least = _timed(forward.min_s, backward.min_s, count, f"{told}, the least over the ranks", stage)
    most = _timed(forward.max_s, backward.max_s, count, f"{told}, the most over the ranks", stage)
    return (most,) if _is_one(forward) and _is_one(backward) else (least, most)


def _is_one(timer: Timer) -> bool:
    return timer.min_s == timer.max_s


def _timed(forward_s: float, backward_s: float, count: int, told: str, stage: int | None = None) -> RankPasses:
    return RankPasses(
        rank=None, stage=stage, forward_s=forward_s / count, backward_s=backward_s / count, holds_exchanges=True,
        source=f"{told} ÷ {count} micro-batches", num_microbatches=count,
    )  # fmt: skip


def _overlaps_passes(case: Case) -> bool:
    """True where a forward runs beside another micro-batch's backward, under one timer (combined_1f1b.py)."""
    features = case.observation.facts.run.get("features") or {}
    return bool(features.get("ep_overlap")) or (
        case.candidate is not None and case.candidate.pricing.runtime.ep_overlap_fraction > 0
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
