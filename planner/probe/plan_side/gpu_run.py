"""The run of a plan's stages at their real size: on GPUs with all their ranks, or one stage after another."""

from __future__ import annotations

import os
from collections.abc import Sequence

from planner.answer import Plan, PricedLayout, StagePlan
from planner.errors import ProbeError, SpecError
from planner.probe.plan_side.chunks import fully_shards, real_chunks, recompute_modules, slice_schedule
from planner.probe.plan_side.options import ProbeOptions
from planner.probe.plan_side.rank_grid import RankGrid, fit_gpus, sampled_stages, sharing_dp
from planner.probe.run import ChunkSpec, ProbeRun
from planner.schedule.actions import Schedule
from planner.specs.units import gib

MICROBATCHES_PER_STAGE = 3
"""Micro-batches per stage of a stage alone: enough for a steady state after the warm-up."""


def ranks_run(plan: Plan, options: ProbeOptions, num_gpus: int) -> tuple[ProbeRun, RankGrid, list[int]]:
    """The run of the GPUs, its grid of ranks, and the plan's stage that each of its stages is."""
    layout = plan.best
    grid = fit_gpus(layout, num_gpus)
    order = options.order or slice_schedule(layout, grid.pp)
    if order.pp != grid.pp:
        raise ProbeError(
            f"--order has {order.pp} ranks, the slice of the plan that fits here {grid.pp} stages",
            f"an order of {grid.pp} ranks, or prove it with --device cpu",
        )
    if layout.parallelism.zero_stage > 1 and not fully_shards(layout, order):
        raise ProbeError(
            f"the probe runs no ZeRO-{layout.parallelism.zero_stage} under {order.name}: ZeRO-1 or, where no backward "
            "is split, ZeRO-3",
            "plan with --zero-stage 1, or 3 and another --schedule",
        )
    stages = sampled_stages(layout.parallelism.pp, grid.pp)
    return real_run(plan, options, order, real_chunks(layout, order, stages), grid), grid, stages


def real_run(
    plan: Plan, options: ProbeOptions, order: Schedule, chunks: Sequence[ChunkSpec], grid: RankGrid
) -> ProbeRun:
    """The plan's stages at full size in bf16; on the CPU too, for models that it can hold."""
    layout = plan.best.parallelism
    return ProbeRun.of(
        order,
        model=plan.model.spec,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        backend=options.backend,
        dtype="bfloat16",
        tp=grid.tp,
        dp=grid.dp,
        ep=grid.ep,
        cp=grid.cp,
        dp_outermost=layout.dp_outermost,
        zero=layout.zero_stage > 0,
        dp_stands_for=sharing_dp(plan.best) // grid.dp if layout.zero_stage == 1 else 1,
        fully_sharded=fully_shards(plan.best, order),
        sequence_parallel=layout.sequence_parallel and grid.tp > 1,
        micro_batch_size=layout.micro_batch_size,
        seq_length=plan.training.seq_length // layout.cp,
        chunks=tuple(chunks),
        recompute_modules=recompute_modules(plan.best),
        balanced_routing=True,
        **options.repeats,
        timeout_s=options.timeout_s,
    )


def require_memory(stages: Sequence[StagePlan]) -> None:
    """Raise ProbeError if a stage needs more memory than this machine has. The kernel would kill it without an
    error."""
    largest = max(stages, key=lambda stage: stage.memory.peak_allocated_bytes)
    needed_bytes = largest.memory.peak_allocated_bytes
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > memory_bytes:
        raise ProbeError(
            f"--stage {largest.stage}: its tensors are {gib(needed_bytes):.1f} GiB, "
            f"this machine has {gib(memory_bytes):.1f}",
            "leave out --stage to run the plan in small, or run the stage on a GPU",
        )


def stage_asked_for(stage: object, pp: int) -> int:
    if not isinstance(stage, int) or not 0 <= stage < pp:
        raise SpecError(f"--stage {stage}: the plan has stages 0 to {pp - 1}", "name one of them, or all")
    return stage


def stand_in_stages(layout: PricedLayout) -> list[int]:
    """For each stage, the first stage with the same layers, recomputation and number of micro-batches in flight."""

    def key(stage: StagePlan) -> tuple[object, ...]:
        seconds = (round(stage.forward_s, 9), round(stage.backward_s, 9))  # tells apart layers of different kinds
        return stage.num_layers, stage.holds, str(stage.recompute), stage.in_flight_microbatches, seconds

    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(key(stage), stage.stage) for stage in layout.stages]
