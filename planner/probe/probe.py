"""`probe()`: run a plan, or the largest part of it that fits here, and hold what it measures against what it says."""

from __future__ import annotations

import os

import torch

from planner.answer import Plan
from planner.errors import ProbeError
from planner.probe.eager import in_eager_torch, without_waits
from planner.probe.launch.failure import out_of_memory_result
from planner.probe.launch.joined import joins_others, run_rank
from planner.probe.launch.launcher import launch
from planner.probe.launch.process import stage_process
from planner.probe.model.attention import require_flash
from planner.probe.plan_runs import (
    MICROBATCHES_PER_STAGE,
    describe_slice,
    laptop_run,
    ranks_run,
    real_run,
    require_memory,
    stage_asked_for,
    stand_in_stages,
)
from planner.probe.plan_slice import ProbeOptions, RankGrid, real_chunks, sharing_dp, slice_schedule
from planner.probe.rank.gradients import require_fully_shard
from planner.probe.rehearse import rehearse
from planner.probe.result import ComparedQuantity, MeasuredRun, ProbeResult, RankFailure, RankResult, RehearsalResult
from planner.probe.run import Place, ProbeRun
from planner.probe.torch_build import rehearsed_build, require_gpu
from planner.probe.verdict.compare import compare_stage, compared, host_keeps_up, replayed_step_s
from planner.probe.verdict.evidence import seen_kernels, unpriced
from planner.probe.verdict.judge import judge_laptop, judge_ranks, judges_seconds, probe_result
from planner.specs.training import tokens_split
from planner.trainers.rules.torch import runner_objection

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


def probe_bytes(plan: Plan, options: ProbeOptions) -> RehearsalResult:
    """Count the bytes of the plan's stages without a GPU, and compare them with the plan's; nothing is started."""
    assert options.stages is not None
    require_runnable(plan, options)
    with rehearsed_build(plan.cluster.hardware.architecture):
        require_flash(plan.model.spec, plan.parallelism.cp, "cuda", "plan with --cp 1, or for a GPU of NVIDIA's")
    return rehearse(plan, options.stages, options.tolerance_fraction)


def require_runnable(plan: Plan, options: ProbeOptions) -> None:
    """Raise ProbeError where the probe has no modules, no exchanges or no kernels for the plan's layers."""
    layout, model = plan.parallelism, plan.model.spec
    if model.moe is not None and layout.etp > 1:
        raise ProbeError(f"the probe shards no single expert: etp {layout.etp} must be 1", "plan again with --etp 1")
    if model.moe is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ProbeError("the probe's experts need sequence parallelism beside tp", "plan with --sequence-parallel")
    require_layers(plan)
    require_split(plan, options)


def require_layers(plan: Plan) -> None:
    """Raise ProbeError where the probe has no modules for the model's layers, or for adapters beside them."""
    adapters = plan.training.adapters
    if adapters is not None:
        raise ProbeError(
            f"training.adapters: LoRA of rank {adapters.rank} cannot be probed: the probe trains all weights",
            "plan export PLAN.json --to hf writes the job itself, whose launch.sh takes 20 steps with MOCK=1",
        )
    if plan.training.objective.name != "lm":
        raise ProbeError(
            f"training.objective: {plan.training.objective.name} cannot be probed: the probe learns the next token",
            "probe a plan with --objective lm",
        )
    objection = runner_objection(plan.model.spec, plan.training)
    if objection is not None:
        raise ProbeError(
            f"{plan.model.name} cannot be probed: {objection}",
            "probe a plan of a plain model of its size, such as llama-3.1-8b",
        )
    model, seq_length = plan.model.spec, plan.training.seq_length
    if model.position_embedding == "learned" and seq_length > (model.max_position_embeddings or 0):
        raise ProbeError(
            f"{plan.model.name} has {model.max_position_embeddings} learned positions for sequences of {seq_length}",
            f"plan with --seq-length {model.max_position_embeddings}",
        )


def require_split(plan: Plan, options: ProbeOptions) -> None:
    """Raise ProbeError where the probe cannot split the plan's sequences over its context-parallel ranks."""
    layout, model, seq_length = plan.parallelism, plan.model.spec, plan.training.seq_length
    if layout.cp == 1:
        return
    unit = tokens_split(layout.cp, layout.tp if layout.sequence_parallel else 1)
    if seq_length % unit:
        raise ProbeError(
            f"sequences of {seq_length} tokens do not split into two equal chunks for each of cp {layout.cp} ranks"
            + (f" and tp {layout.tp} shards" if unit > 2 * layout.cp else ""),
            f"plan with a --seq-length that is a multiple of {unit}",
        )
    chunk = model.attention_chunk_size or seq_length
    unsplit = f"chunks of {chunk} tokens" if chunk < seq_length else ""
    unsplit = "ALiBi" if model.position_embedding == "alibi" else unsplit
    if unsplit and options.device == "cuda":
        raise ProbeError(
            f"flash attention over split sequences (cp {layout.cp}) takes no {unsplit}",
            "plan with --cp 1, or prove the order and the gradients with --device cpu",
        )


def probe_ranks(plan: Plan, options: ProbeOptions, num_gpus: int) -> ProbeResult:
    """Run as many whole tp × cp groups and stages as `num_gpus` hold, one process for each on this machine."""
    run, grid, stages = ranks_run(plan, options, num_gpus)
    require_fully_shard(run)
    return judge_ranks(plan, options, launch(run), grid, stages)


def probe_stages(plan: Plan, options: ProbeOptions) -> ProbeResult:
    """Run each distinct stage alone, then replay the whole pipeline with the measured seconds."""
    eager = in_eager_torch(plan, alone=True)
    layout, asked = eager.best, eager.best.parallelism
    order = slice_schedule(layout, asked.pp, max(4, MICROBATCHES_PER_STAGE * asked.pp))
    grid = RankGrid(asked.pp, sharing_dp(layout), asked.cp, asked.tp, asked.ep)
    run = real_run(plan, options, order, real_chunks(layout, order, range(asked.pp)), grid)
    run = run.model_copy(update={"warm_up_steps": 2})
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
    least, priced = without_waits(eager), not unpriced(ranks, plan.cluster.hardware)
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
        planned_s, least_s = eager.step.step_s, least.step.step_s
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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    grid, stages = RankGrid(1, 1, 1, 1, 1), list[int]()

    def make() -> ProbeRun:
        nonlocal grid, stages
        if options.stages is not None:
            raise ProbeError("--stage runs stages one at a time, in one process", "start it without torchrun and srun")
        require_startable(plan, options)
        if options.device == "cuda":
            run, grid, stages = ranks_run(plan, options, world_size)
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
        return judge_ranks(plan, options, measured, grid, stages)
    return judge_laptop(plan, options, measured, grid)
