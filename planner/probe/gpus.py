"""The plan's stages at their real size: on GPUs with all their ranks, or one stage after the other on one device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from planner.answer import Plan, PricedLayout, StagePlan
from planner.errors import ProbeError, SpecError
from planner.layout.candidate import Candidate
from planner.probe import slices
from planner.probe.activity import durations
from planner.probe.compare import (
    compare_data_parallel,
    compare_exchanges,
    compare_pipeline,
    compare_stage,
    compared,
    in_flight,
)
from planner.probe.eager import in_eager_torch, repriced
from planner.probe.launch import launch
from planner.probe.outcome import Options, result, slice_of
from planner.probe.result import Comparison, Measured, ProbeResult, RankResult
from planner.probe.run import ChunkSpec, Device, Place, ProbeRun, SleepSeconds
from planner.probe.stage import stage_child
from planner.schedule.actions import Schedule
from planner.schedule.orders import in_flight_chunks
from planner.schedule.replay import Durations, makespan_s
from planner.specs.units import gib

MICROBATCHES_PER_STAGE = 3
"""Of a stage alone: enough for a steady state beyond its warm-up."""
MAX_CONNECTIONS = "32"
"""Of the host to a GPU: each channel between ranks has a stream of its own, and of streams that share one of the usual
eight connections one that waits for a peer holds back the other. CUDA reads it once, and started ranks inherit it."""


def sees_gpu() -> bool:
    """Whether torch does; nothing asks CUDA for anything before."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MAX_CONNECTIONS)
    return torch.cuda.is_available()


def default_device() -> Device:
    """cuda where torch sees a GPU."""
    return "cuda" if sees_gpu() else "cpu"


def require_gpu(device: Device) -> None:
    """Raise ProbeError where the device asked for is not there."""
    if device == "cuda" and not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")


def probe_ranks(plan: Plan, options: Options, num_gpus: int) -> ProbeResult:
    """As many whole tp × cp groups and stages as `num_gpus` hold, started here, one process a GPU."""
    run, grid, stages = ranks_run(plan, options, num_gpus)
    return ranks_result(plan, options, launch(run), grid, stages)


def ranks_run(plan: Plan, options: Options, num_gpus: int) -> tuple[ProbeRun, slices.Grid, list[int]]:
    """What the GPUs run, its sizes, and which of the plan's stages its stages are."""
    layout = plan.best
    grid = slices.fit_gpus(layout, num_gpus)
    order = options.order or slices.slice_schedule(layout, grid.pp)
    if order.pp != grid.pp:
        raise ProbeError(
            f"--order has {order.pp} ranks, the slice of the plan that fits here {grid.pp} stages",
            f"an order of {grid.pp} ranks, or prove it with --device cpu",
        )
    if layout.parallelism.zero_stage > 1 and not slices.fully_shards(layout, order):
        raise ProbeError(
            f"the probe runs no ZeRO-{layout.parallelism.zero_stage} under {order.name}: ZeRO-1 or, where no backward "
            "is split, ZeRO-3",
            "plan with --zero-stage 1, or 3 and another --schedule",
        )
    stages = slices.sampled_stages(layout.parallelism.pp, grid.pp)
    return real_run(plan, options, order, slices.real_chunks(layout, order, stages), grid), grid, stages


def ranks_result(
    plan: Plan, options: Options, measured: Measured, grid: slices.Grid, stages: Sequence[int]
) -> ProbeResult:
    """What the layout costs in eager torch beside measured, stage by stage and for the pipeline.

    Not judged where ranks hold other experts than planned, or passes gather weights (ZeRO-3), which the planner prices
    beside them; peaks of memory neither where a rank of the slice holds other micro-batches.
    """
    eager, order, comparisons = in_eager_torch(plan), measured.run.order, list[Comparison]()
    asked = plan.parallelism
    is_faithful = grid.ep == asked.ep and not measured.run.fully_sharded
    tolerance = options.tolerance_fraction if is_faithful else None
    planned_in_flight = in_flight_chunks(asked.schedule, asked.pp, asked.vpp, asked.num_microbatches)
    holds = [planned_in_flight[stage] == held for stage, held in zip(stages, in_flight(measured.run), strict=True)]
    if measured.ranks:
        for rank, stage in enumerate(stages):
            ranks = [found for found in measured.ranks if found.stage == rank]
            comparisons += compare_stage(
                eager,
                stage,
                ranks,
                tolerance,
                alone=False,
                holds_as_planned=holds[rank],
                steps_as_planned=measured.run.dp_stands_for == 1,
            )
            comparisons += compare_data_parallel(plan.cluster, measured.run, ranks, stage)
        planned = slices.planned_seconds(eager.best, order, stages)
        comparisons += compare_pipeline(measured.run, measured.ranks, planned, stages, tolerance)
        comparisons += compare_exchanges(plan.cluster, measured.run, measured.ranks)
    part = slice_of(plan, grid, order, options)
    beyond = [] if grid.ep == asked.ep else [f"seconds and memory at EP {asked.ep}"]
    beyond += [] if all(holds) else ["peak memory with as many micro-batches in flight as planned"]
    part = part.model_copy(update={"extrapolated": (*part.extrapolated, *beyond)})
    return result(plan, options, part, measured, comparisons, eager=eager)


def probe_stages(plan: Plan, options: Options) -> ProbeResult:
    """Each distinct stage alone, then the replay of the whole pipeline with measured seconds."""
    eager = in_eager_torch(plan)
    layout = eager.best
    asked = layout.parallelism
    order = slices.slice_schedule(layout, asked.pp, max(4, MICROBATCHES_PER_STAGE * asked.pp))
    grid = slices.Grid(asked.pp, slices.sharing_dp(layout), asked.cp, asked.tp, asked.ep)
    run = real_run(plan, options, order, slices.real_chunks(layout, order, range(asked.pp)), grid)
    run = run.model_copy(update={"warm_up_steps": 2})
    stands_for = distinct_stages(layout)
    is_judged = judges_seconds(plan, options) and not run.fully_sharded
    tolerance = options.tolerance_fraction if is_judged else None
    ranks: list[RankResult] = []
    comparisons: list[Comparison] = []
    measured = Measured(run=run, ranks=())
    stages = sorted(set(stands_for)) if options.stages == "all" else [_wanted(options.stages, asked.pp)]
    if options.device == "cpu":
        require_memory([layout.stages[stage] for stage in stages])
    for stage in stages:
        measured = launch(run, stage_child, ranks=(run.rank(Place(stage, 0, 0, 0)),))
        if measured.out_of_memory is not None:
            break
        ranks += measured.ranks
        comparisons += compare_stage(eager, stage, measured.ranks, tolerance, alone=True)
    step_s = None
    if options.stages == "all" and measured.out_of_memory is None:
        found = {rank.stage: rank for rank in ranks}
        step_s = replayed_step_s(eager, [found[stage] for stage in stands_for])
        comparisons.append(compared("step", "s", layout.step.step_s, step_s, tolerance))
    measured = measured.model_copy(update={"ranks": tuple(ranks)})
    part = slice_of(plan, grid, order, options, [f"one of {asked.num_gpus_used:,} ranks at a time"])
    return result(plan, options, part, measured, comparisons, step_s, eager)


def require_memory(stages: Sequence[StagePlan]) -> None:
    """Raise ProbeError where a stage is larger than this machine: the kernel would kill it, and no allocator say so."""
    largest = max(stages, key=lambda stage: stage.memory.peak_allocated_bytes)
    needed, there = largest.memory.peak_allocated_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ProbeError(
            f"--stage {largest.stage}: its tensors are {gib(needed):.1f} GiB, this machine has {gib(there):.1f}",
            "leave out --stage to run the plan in small, or run the stage on a GPU",
        )


def judges_seconds(plan: Plan, options: Options) -> bool:
    """Whether the plan's seconds are of the kind of device that runs: a GPU's say nothing about a CPU's."""
    return options.device == "cuda" or plan.cluster.hardware.architecture == "cpu"


def _wanted(stage: object, pp: int) -> int:
    if not isinstance(stage, int) or not 0 <= stage < pp:
        raise SpecError(f"--stage {stage}: the plan has stages 0 to {pp - 1}", "name one of them, or all")
    return stage


def distinct_stages(layout: PricedLayout) -> list[int]:
    """For each stage the first one that has the same layers to hold, to recompute and to keep in flight."""

    def key(stage: StagePlan) -> tuple[object, ...]:
        seconds = (round(stage.forward_s, 9), round(stage.backward_s, 9))  # tells apart layers of different kinds
        return stage.num_layers, stage.holds, str(stage.recompute), stage.in_flight_microbatches, seconds

    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(key(stage), stage.stage) for stage in layout.stages]


def replayed_step_s(eager: Plan, stages: Sequence[RankResult]) -> float:
    """The plan's whole step, by as much longer as measured compute makes its pipeline."""
    priced = repriced(eager)
    measured_s = makespan_s(priced.order, durations_alone(priced, stages))
    return eager.step.step_s + measured_s - makespan_s(priced.order, priced.durations)


def durations_alone(priced: Candidate, stages: Sequence[RankResult]) -> Durations:
    """Of every virtual stage: compute as the stages measured it alone; exchanges and the host as planned."""
    planned, seconds, taken = priced.durations, [], [0] * len(stages)
    for stage, (rank, cost) in enumerate(zip(priced.order.stage_to_rank, priced.costs, strict=True)):
        chunk = stages[rank].chunks[taken[rank]]
        taken[rank] += 1
        weight_grad_s = min(chunk.weight_grad_s or 0.0, chunk.backward_s)
        forward_s = chunk.forward_s + planned.forward_s[stage] - float(cost.forward_s)
        beside_s = planned.input_grad_s[stage] - float(cost.input_grad_s)
        seconds.append(SleepSeconds(forward_s, chunk.backward_s - weight_grad_s + beside_s, weight_grad_s))
    return replace(durations(seconds), p2p_s=planned.p2p_s, blocking_p2p=planned.blocking_p2p)


def real_run(plan: Plan, options: Options, order: Schedule, chunks: Sequence[ChunkSpec], grid: slices.Grid) -> ProbeRun:
    """The plan's stages at full size in bf16; on the CPU too, for models that it can hold."""
    layout = plan.best.parallelism
    return ProbeRun.of(
        order,
        model=plan.model.spec,
        device=options.device,
        dtype="bfloat16",
        tp=grid.tp,
        dp=grid.dp,
        ep=grid.ep,
        cp=grid.cp,
        zero=layout.zero_stage > 0,
        dp_stands_for=slices.sharing_dp(plan.best) // grid.dp if layout.zero_stage == 1 else 1,
        fully_sharded=slices.fully_shards(plan.best, order),
        sequence_parallel=layout.sequence_parallel and grid.tp > 1,
        micro_batch_size=layout.micro_batch_size,
        seq_length=plan.training.seq_length // layout.cp,
        chunks=tuple(chunks),
        recompute_modules=slices.recompute_modules(plan.best),
        balanced_routing=True,
        num_steps=options.num_steps,
        timeout_s=options.timeout_s,
    )
