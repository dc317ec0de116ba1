"""`probe()`: run a plan, or the largest part of it that fits here, and hold what it measures against what it says.

The verdict of a run on the plan, on GPUs or on a CPU, and its measured step as a Chrome trace follow from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import torch

from planner.answer import Plan, StagePlan
from planner.errors import ProbeError
from planner.probe.compare import (
    by_stage,
    check_finite,
    compare_exchanges,
    compare_pipeline,
    compare_stage,
    compared,
    durations_alone,
    host_keeps_up,
    in_flight,
    replayed_step_s,
    run_checks,
    span_s,
)
from planner.probe.evidence import conditions_of, kernel_notes, seen_kernels, unpriced
from planner.probe.launch.joined import joins_others, run_rank
from planner.probe.launch.launcher import launch
from planner.probe.launch.process import out_of_memory_result, stage_process
from planner.probe.model.attention import require_flash
from planner.probe.plan_runs import (
    PlannedRun,
    describe_slice,
    laptop_run,
    ranks_run,
    require_memory,
    require_runnable,
    stage_asked_for,
    stages_run,
    stand_in_stages,
)
from planner.probe.plan_slice import ProbeOptions, planned_seconds, sampled_stages
from planner.probe.result import ComparedQuantity, MeasuredRun, ProbeResult, RankFailure, RankResult
from planner.probe.run import Place, ProbeRun
from planner.probe.run_price import in_eager_torch, made_to_fit, repriced, without_waits
from planner.probe.torch_build import require_gpu
from planner.schedule.orders import in_flight_chunks
from planner.schedule.replay import Durations, replay
from planner.specs.base import Fields
from planner.specs.units import gib


def probe_result(
    asked: Plan,
    options: ProbeOptions,
    planned: PlannedRun,
    measured: MeasuredRun,
    comparisons: Sequence[ComparedQuantity],
    reduced: Sequence[str] = (),
    extrapolated: Sequence[str] = (),
    *,
    step_s: float | None = None,
    eager: Plan | None = None,
) -> ProbeResult:
    """The result of a probe of the plan `asked`. `step_s` is given where no rank ran a whole step, `eager` where the
    plan's own stages ran."""
    plan, ranks, run = planned.plan, measured.ranks, measured.run
    alone = options.stages is not None
    complete = bool(ranks) and not alone
    same_steps = zip(*(rank.steps for rank in ranks), strict=True) if complete else ()
    steps = [max(step.step_s for step in same) for same in same_steps]
    steps_by_rank = [steps] if complete else [[step.step_s for step in rank.steps] for rank in ranks]
    out_of_memory = measured.out_of_memory
    part = describe_slice(asked, planned, options, reduced, extrapolated)
    predicted = None if out_of_memory is None else (eager or plan).stages[planned.stages[out_of_memory.stage]]
    if predicted is not None and eager is not None:
        _refuse_expected(predicted, plan)
    return ProbeResult(
        mode="stages" if alone else "ranks",
        device=ranks[0].device_name if ranks else options.device,
        torch_version=ranks[0].torch_version if ranks else "",
        inputs_sha256=asked.inputs_sha256,
        slice=part if ranks else part.model_copy(update={"verified": ()}),
        made_to_fit=planned.changes,
        tolerance_fraction=options.tolerance_fraction,
        comparisons=tuple(comparisons),
        checks=tuple(run_checks(run, ranks) if complete else [check_finite(ranks)] if ranks else []),
        step_s=median(steps) if steps else step_s,
        step_spread_s=max((max(seconds) - min(seconds) for seconds in steps_by_rank), default=0.0),
        loss=ranks[0].steps[-1].loss if complete else None,
        conditions=conditions_of(ranks),
        run=run,
        ranks=ranks,
        out_of_memory=out_of_memory,
        predicted_bytes=None if predicted is None else predicted.memory.total_bytes,
        plan_runtime=plan.runtime,
        plan_step_s=None if eager is None else plan.step.step_s,
        notes=() if eager is None else kernel_notes(run, ranks, plan.cluster.hardware),
    )


def _refuse_expected(stage: StagePlan, plan: Plan) -> None:
    """Raise ProbeError if the plan predicts that the stage runs out of memory in eager torch: then nothing contradicts
    it."""
    needed_bytes = stage.memory.total_bytes
    capacity_bytes = plan.cluster.hardware.memory_bytes
    if needed_bytes > capacity_bytes:
        raise ProbeError(
            f"stage {stage.stage} ran out of memory as predicted: eager torch, which the probe runs, needs "
            f"{gib(needed_bytes):.1f} GiB there of {gib(capacity_bytes):.1f}",
            f"this says nothing of the plan under {plan.runtime}; what fits in eager torch can be probed: "
            "plan with --runtime torch-eager",
        )


def judge_ranks(asked: Plan, options: ProbeOptions, planned: PlannedRun, measured: MeasuredRun) -> ProbeResult:
    """The measurements of ranks on GPUs beside the layout's price in eager torch, stage by stage and for the pipeline.

    Nothing is judged where ranks hold other experts than planned, where passes gather weights (ZeRO-3), which the
    planner prices separately. Peaks of memory are not judged where a rank of the slice has
    another number of micro-batches in flight.
    """
    plan, grid, stages = planned.plan, planned.grid, planned.stages
    eager = in_eager_torch(plan, seen_kernels(measured.ranks))
    least = without_waits(eager)
    comparisons = []
    layout = plan.parallelism
    is_faithful = grid.ep == layout.ep and layout.zero_stage <= 1
    tolerance = options.tolerance_fraction if is_faithful else None
    attends_as_priced = not unpriced(measured.ranks, plan.cluster.hardware)
    planned_in_flight = in_flight_chunks(layout.schedule, layout.pp, layout.vpp, layout.num_microbatches)
    in_flight_as_planned = [
        planned_in_flight[stage] == num_in_flight
        for stage, num_in_flight in zip(stages, in_flight(measured.run), strict=True)
    ]
    if measured.ranks:
        for rank, stage in enumerate(stages):
            ranks = [measured_rank for measured_rank in measured.ranks if measured_rank.stage == rank]
            comparisons += compare_stage(
                eager, least, stage, ranks, tolerance, alone=False, passes=attends_as_priced,
                optimizer=measured.run.dp_stands_for == 1, peak=in_flight_as_planned[rank] and attends_as_priced,
            )  # fmt: skip
        pipeline_tolerance = tolerance if attends_as_priced else None
        comparisons += compare_pipeline(eager, least, measured.run, measured.ranks, stages, pipeline_tolerance)
        comparisons += compare_exchanges(plan.cluster, measured.run, measured.ranks)
    extrapolated = [] if grid.ep == layout.ep else [f"seconds and memory at EP {layout.ep}"]
    extrapolated += [] if all(in_flight_as_planned) else ["peak memory with as many micro-batches in flight as planned"]
    return probe_result(asked, options, planned, measured, comparisons, extrapolated=extrapolated, eager=eager)


def judges_seconds(plan: Plan, options: ProbeOptions) -> bool:
    """True if the plan is for the kind of device that runs. The seconds of a GPU say nothing about a CPU."""
    return options.device == "cuda" or plan.cluster.hardware.architecture == "cpu"


MEASURED, PREDICTED = 0, 1
_MICROSECONDS = 1e6

TraceEvent = Fields


def trace_events(plan: Plan, result: ProbeResult) -> Fields:
    """Trace events in µs: a process of measured ranks and one of predicted ranks, with a thread per pipeline rank.

    Stages that ran alone are replayed with the seconds that each of them took. If one is missing, there are no events.
    """
    events = []
    if result.mode == "ranks" and result.ranks:
        events = [*_measured(result), *_predicted(plan, result)]
    elif result.mode == "stages":
        rank_of_stage = {rank.stage: rank for rank in result.ranks}
        eager = in_eager_torch(plan, seen_kernels(result.ranks), alone=True)
        stands_for = stand_in_stages(eager.best)
        priced = repriced(eager)
        if rank_of_stage.keys() >= set(stands_for):
            alone = durations_alone(priced, [rank_of_stage[stage] for stage in stands_for])
            events = [
                *_replayed(MEASURED, f"replayed from stages measured alone on {result.device}", result, alone),
                *_replayed(PREDICTED, "predicted", result, priced.durations),
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _measured(result: ProbeResult) -> Iterator[TraceEvent]:
    yield _process(MEASURED, f"measured on {result.device}")
    for rank in by_stage(result.run, result.ranks):
        for timed in rank.actions:
            if timed.start_s > timed.ready_s:
                yield _span(MEASURED, rank.stage, "wait", timed.ready_s, timed.start_s)
            yield _span(MEASURED, rank.stage, timed.action, timed.start_s, timed.end_s)


def _predicted(plan: Plan, result: ProbeResult) -> Iterator[TraceEvent]:
    run = result.run
    stages = sampled_stages(plan.parallelism.pp, run.pp)
    predicted = planned_seconds(in_eager_torch(plan, seen_kernels(result.ranks)).best, run.order, stages)
    if run.dtype == "bfloat16":
        yield from _replayed(PREDICTED, "predicted", result, predicted)
        return
    times = span_s(result.ranks) / replay(run.order, predicted).makespan_s
    name = f"predicted of the plan's own stages, × {times:.3g} to be as long as measured"
    yield from _replayed(PREDICTED, name, result, predicted, times)


def _replayed(pid: int, name: str, result: ProbeResult, seconds: Durations, times: float = 1.0) -> Iterator[TraceEvent]:
    timeline = replay(result.run.order, seconds)
    yield _process(pid, name)
    for rank, actions in enumerate(result.run.ranks):
        starts = (times * timeline.start_s[rank]).tolist()
        ends = (times * timeline.end_s[rank]).tolist()
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


__all__ = ["ProbeOptions", "probe"]


def probe(plan: Plan, options: ProbeOptions) -> ProbeResult | None:
    """Run as much of the plan's best layout as fits here, and compare. Returns None where another rank has the result.

    Raises ProbeError, which names rank, stage and phase, when it cannot run. A disagreement is part of the result.
    """
    if joins_others():
        return probe_joined(plan, options)
    planned = planned_run(plan, options, torch.cuda.device_count())
    if options.stages is not None:
        return probe_stages(plan, options, planned)
    return judged(plan, options, planned, launch(planned.run))


def planned_run(plan: Plan, options: ProbeOptions, num_gpus: int) -> PlannedRun:
    """The run of a plan here: of stages alone, of as many tp × cp groups and stages as `num_gpus` hold, or, on the CPU,
    of the plan in small. Raises ProbeError where nothing of it can run."""
    require_startable(plan, options)
    alone, of = options.stages is not None, partial(laptop_run, options=options)
    if alone:
        of = partial(stages_run, options=options)
    elif options.device == "cuda":
        of = partial(ranks_run, options=options, num_gpus=num_gpus)
    return made_to_fit(plan, of, capacity_bytes(plan), alone) if options.device == "cuda" else of(plan)


def judged(plan: Plan, options: ProbeOptions, planned: PlannedRun, measured: MeasuredRun) -> ProbeResult:
    """The result of ranks that ran together; of processes on a CPU, what they proved."""
    if options.device == "cuda":
        return judge_ranks(plan, options, planned, measured)
    whole, small = planned.plan.model.spec, measured.run.model
    names = ("hidden_size", "num_hidden_layers")
    reduced = [f"{name} {getattr(whole, name)} → {getattr(small, name)}" for name in names]
    return probe_result(plan, options, planned, measured, (), reduced)


def require_startable(plan: Plan, options: ProbeOptions) -> None:
    """Raise ProbeError where the probe cannot run the plan's layers, or not on this machine."""
    require_runnable(plan, options)
    require_gpu(options.device)
    flash_hint = "prove the order and the gradients with --device cpu"
    require_flash(plan.parallelism.cp, options.device, flash_hint)


def capacity_bytes(plan: Plan) -> float:
    """Memory of the GPU here, or of the plan's where that is less or none is here."""
    planned = plan.cluster.hardware.memory_bytes
    return min(planned, torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else planned


def probe_stages(asked: Plan, options: ProbeOptions, planned: PlannedRun) -> ProbeResult:
    """Run each distinct stage alone, then replay the whole pipeline with the measured seconds."""
    plan, run = planned.plan, planned.run
    eager = in_eager_torch(plan, alone=True)
    layout = eager.best
    sizes = layout.parallelism
    stands_for = stand_in_stages(layout)
    is_judged = judges_seconds(plan, options) and sizes.zero_stage <= 1
    tolerance = options.tolerance_fraction if is_judged else None
    ranks: list[RankResult] = []
    comparisons: list[ComparedQuantity] = []
    measured = MeasuredRun(run=run, ranks=())
    stages = sorted(set(stands_for)) if options.stages == "all" else [stage_asked_for(options.stages, sizes.pp)]
    if options.device == "cpu":
        require_memory([layout.stages[stage] for stage in stages])
    for stage in stages:
        measured = launch(run, stage_process, ranks=(run.rank(Place(stage, 0, 0, 0)),))
        ranks += measured.ranks
        if measured.out_of_memory is not None:
            break
    eager = in_eager_torch(plan, seen_kernels(ranks), alone=True)
    least = without_waits(eager)
    priced = not unpriced(ranks, plan.cluster.hardware)
    keeps_up = host_keeps_up(eager, least, options.tolerance_fraction)
    for rank in ranks:
        judged = priced and keeps_up[rank.stage]
        comparisons += compare_stage(
            eager, least, rank.stage, [rank], tolerance, alone=True, passes=judged, peak=priced
        )
    step_s = None
    if options.stages == "all" and measured.out_of_memory is None:
        rank_of_stage = {rank.stage: rank for rank in ranks}
        step_s = replayed_step_s(eager, [rank_of_stage[stage] for stage in stands_for])
        step_tolerance = tolerance if priced and all(keeps_up) else None
        planned_s = eager.step.step_s
        least_s = least.step.step_s
        comparisons.append(compared("step", "s", planned_s, step_s, step_tolerance, least=least_s))
    measured = measured.model_copy(update={"ranks": tuple(ranks)})
    reduced = [f"one of {sizes.num_gpus_used:,} ranks at a time"]
    return probe_result(asked, options, planned, measured, comparisons, reduced, step_s=step_s, eager=eager)


def probe_joined(plan: Plan, options: ProbeOptions) -> ProbeResult | None:
    """Run this process's rank. Returns the result on rank 0 and on a rank whose GPU ran out of memory, None on the
    others.

    Raises ProbeError where the rank fails.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    planned: PlannedRun

    def make() -> ProbeRun:
        nonlocal planned
        if options.stages is not None:
            raise ProbeError("--stage runs stages one at a time, in one process", "start it without torchrun and srun")
        planned = planned_run(plan, options._replace(num_processes=world_size), world_size)
        run = planned.run
        if run.world_size != world_size:
            raise ProbeError(
                f"{world_size} ranks were started, the largest slice of the plan that fits has {run.world_size}",
                f"start {run.world_size} ranks: {run.pp} stages × dp {run.dp} × cp {run.cp} × tp {run.tp}",
            )
        return run

    run, outcome = run_rank(make, options.timeout_s)
    if isinstance(outcome, RankFailure):
        measured = out_of_memory_result(run, outcome)
    elif rank:
        return None
    else:
        measured = MeasuredRun(run=run, ranks=outcome)
    return judged(plan, options, planned, measured)
