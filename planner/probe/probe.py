"""`probe()`: run a plan, or the largest part of it that fits here, and hold what it measures against what it says."""

from __future__ import annotations

import os
from functools import partial

import torch

from planner.answer import Plan
from planner.errors import ProbeError
from planner.probe.eager import in_eager_torch, without_waits
from planner.probe.launch.joined import joins_others, run_rank
from planner.probe.launch.launcher import launch
from planner.probe.launch.process import out_of_memory_result, stage_process
from planner.probe.model.attention import require_flash
from planner.probe.plan_runs import (
    describe_slice,
    laptop_run,
    ranks_run,
    require_memory,
    require_runnable,
    stage_asked_for,
    stages_run,
    stand_in_stages,
)
from planner.probe.plan_slice import ProbeOptions, RankGrid
from planner.probe.rank.gradients import require_fully_shard
from planner.probe.result import ComparedQuantity, MeasuredRun, ProbeResult, RankFailure, RankResult
from planner.probe.run import Place, ProbeRun
from planner.probe.run_price import Fitted, made_to_fit
from planner.probe.torch_build import require_gpu
from planner.probe.verdict.compare import compare_stage, compared, host_keeps_up, replayed_step_s
from planner.probe.verdict.evidence import seen_kernels, unpriced
from planner.probe.verdict.judge import judge_laptop, judge_ranks, judges_seconds, probe_result

__all__ = ["ProbeOptions", "probe"]


def probe(plan: Plan, options: ProbeOptions) -> ProbeResult | None:
    """Run as much of the plan's best layout as fits here, and compare. Returns None where another rank has the result.

    Raises ProbeError, which names rank, stage and phase, when it cannot run. A disagreement is part of the result.
    """
    if joins_others():
        return probe_joined(plan, options)
    require_startable(plan, options)
    if options.stages is not None:
        return probe_stages(plan, options)
    if options.device == "cuda":
        return probe_ranks(plan, options, torch.cuda.device_count())
    return probe_laptop(plan, options)


def require_startable(plan: Plan, options: ProbeOptions) -> None:
    """Raise ProbeError where the probe cannot run the plan's layers, or not on this machine."""
    require_runnable(plan, options)
    require_gpu(options.device)
    flash_hint = "prove the order and the gradients with --device cpu"
    require_flash(plan.model.spec, plan.parallelism.cp, options.device, flash_hint)


def probe_ranks(plan: Plan, options: ProbeOptions, num_gpus: int) -> ProbeResult:
    """Run as many whole tp × cp groups and stages as `num_gpus` hold, one process for each on this machine."""
    fitted = made_to_fit(plan, lambda changed: ranks_run(changed, options, num_gpus)[0], capacity_bytes(plan))
    run, grid, stages = ranks_run(fitted.plan, options, num_gpus)
    require_fully_shard(run)
    return of_plan(judge_ranks(fitted.plan, options, launch(run), grid, stages), plan, fitted)


def capacity_bytes(plan: Plan) -> float:
    """Memory of the GPU here, or of the plan's where that is less or none is here."""
    planned = plan.cluster.hardware.memory_bytes
    return min(planned, torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else planned


def of_plan(result: ProbeResult, plan: Plan, fitted: Fitted) -> ProbeResult:
    """The result of a plan that was made to fit, as one of the plan that was asked for."""
    if not fitted.changes:
        return result
    part = result.slice.model_copy(
        update={
            "asked": f"{plan.parallelism} · {plan.parallelism.schedule}",
            "reduced": (*fitted.changes, *result.slice.reduced),
            "extrapolated": (*result.slice.extrapolated, "what was changed to fit"),
        }
    )
    update = {"slice": part, "inputs_sha256": plan.inputs_sha256, "made_to_fit": fitted.changes}
    return result.model_copy(update=update)


def probe_stages(plan: Plan, options: ProbeOptions) -> ProbeResult:
    """Run each distinct stage alone, then replay the whole pipeline with the measured seconds."""
    fitted = Fitted(plan)
    of = partial(stages_run, options=options)
    if options.device == "cuda":
        fitted = made_to_fit(plan, lambda changed: of(changed)[0], capacity_bytes(plan), alone=True)
    return of_plan(_probe_stages(fitted.plan, options, *of(fitted.plan)), plan, fitted)


def _probe_stages(plan: Plan, options: ProbeOptions, run: ProbeRun, grid: RankGrid) -> ProbeResult:
    eager = in_eager_torch(plan, alone=True)
    layout = eager.best
    asked = eager.best.parallelism
    order = run.order
    require_fully_shard(run)
    stands_for = stand_in_stages(layout)
    is_judged = judges_seconds(plan, options) and asked.zero_stage <= 1
    tolerance = options.tolerance_fraction if is_judged else None
    ranks: list[RankResult] = []
    comparisons: list[ComparedQuantity] = []
    measured = MeasuredRun(run=run, ranks=())
    stages = sorted(set(stands_for)) if options.stages == "all" else [stage_asked_for(options.stages, asked.pp)]
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
        stage = rank.stage
        comparisons += compare_stage(
            eager, least, stage, [rank], tolerance, alone=True, attends_as_priced=priced, host_keeps_up=keeps_up[stage]
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
    part = describe_slice(plan, grid, order, options, [f"one of {asked.num_gpus_used:,} ranks at a time"])
    return probe_result(plan, options, part, measured, comparisons, step_s, eager)


def probe_laptop(plan: Plan, options: ProbeOptions) -> ProbeResult:
    """Prove order, exchanges, in-flight counts and gradients; or measure the bubble (options.sleep)."""
    run, grid = laptop_run(plan, options)
    require_fully_shard(run)
    return judge_laptop(plan, options, launch(run), grid)


def probe_joined(plan: Plan, options: ProbeOptions) -> ProbeResult | None:
    """Run this process's rank. Returns the result on rank 0 and on a rank whose GPU ran out of memory, None on the
    others.

    Raises ProbeError where the rank fails.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    grid = RankGrid(1, 1, 1, 1, 1)
    stages = list[int]()
    fitted = Fitted(plan)

    def make() -> ProbeRun:
        nonlocal grid, stages, fitted
        if options.stages is not None:
            raise ProbeError("--stage runs stages one at a time, in one process", "start it without torchrun and srun")
        require_startable(plan, options)
        if options.device == "cuda":
            of = partial(ranks_run, options=options, num_gpus=world_size)
            fitted = made_to_fit(plan, lambda changed: of(changed)[0], capacity_bytes(plan))
            run, grid, stages = of(fitted.plan)
        else:
            run, grid = laptop_run(plan, options._replace(num_processes=world_size))
        require_fully_shard(run)
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
    if options.device == "cuda":
        return of_plan(judge_ranks(fitted.plan, options, measured, grid, stages), plan, fitted)
    return judge_laptop(plan, options, measured, grid)
