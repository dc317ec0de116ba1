"""The verdict of a finished run on the plan: of ranks on GPUs, and of processes on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import Plan
from planner.probe.plan_side.describe import describe_slice
from planner.probe.plan_side.eager import in_eager_torch, without_waits
from planner.probe.plan_side.options import ProbeOptions
from planner.probe.plan_side.rank_grid import RankGrid
from planner.probe.result import ComparedQuantity, MeasuredRun, ProbeResult
from planner.probe.verdict.checks import in_flight
from planner.probe.verdict.compare import (
    compare_bubble,
    compare_data_parallel,
    compare_exchanges,
    compare_pipeline,
    compare_stage,
)
from planner.probe.verdict.kernels import seen_kernels, unpriced
from planner.probe.verdict.outcome import probe_result
from planner.schedule.orders import in_flight_chunks


def judge_ranks(
    plan: Plan, options: ProbeOptions, measured: MeasuredRun, grid: RankGrid, stages: Sequence[int]
) -> ProbeResult:
    """The measurements of ranks on GPUs beside the layout's price in eager torch, stage by stage and for the pipeline.

    Nothing is judged where ranks hold other experts than planned, where passes gather weights (ZeRO-3), which the
    planner prices separately, or where ranks share a GPU. Peaks of memory are not judged where a rank of the slice has
    another number of micro-batches in flight.
    """
    eager = in_eager_torch(plan, seen_kernels(measured.ranks))
    least, order, comparisons = without_waits(eager), measured.run.order, list[ComparedQuantity]()
    layout = plan.parallelism
    is_faithful = grid.ep == layout.ep and layout.zero_stage <= 1 and measured.run.ranks_per_gpu == 1
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
                eager,
                least,
                stage,
                ranks,
                tolerance,
                alone=False,
                holds_as_planned=in_flight_as_planned[rank],
                steps_as_planned=measured.run.dp_stands_for == 1,
                attends_as_priced=attends_as_priced,
            )
            comparisons += compare_data_parallel(plan.cluster, measured.run, ranks, stage)
        pipeline_tolerance = tolerance if attends_as_priced else None
        comparisons += compare_pipeline(eager, least, measured.run, measured.ranks, stages, pipeline_tolerance)
        comparisons += compare_exchanges(plan.cluster, measured.run, measured.ranks)
    plan_slice = describe_slice(plan, grid, order, options)
    extrapolated = [] if grid.ep == layout.ep else [f"seconds and memory at EP {layout.ep}"]
    extrapolated += [] if all(in_flight_as_planned) else ["peak memory with as many micro-batches in flight as planned"]
    plan_slice = plan_slice.model_copy(update={"extrapolated": (*plan_slice.extrapolated, *extrapolated)})
    return probe_result(plan, options, plan_slice, measured, comparisons, eager=eager)


def judges_seconds(plan: Plan, options: ProbeOptions) -> bool:
    """True if the plan is for the kind of device that runs. The seconds of a GPU say nothing about a CPU."""
    return options.device == "cuda" or plan.cluster.hardware.architecture == "cpu"


def judge_laptop(plan: Plan, options: ProbeOptions, measured: MeasuredRun, grid: RankGrid) -> ProbeResult:
    """The result of processes on a CPU: what they proved, and the bubble where they slept."""
    run, model = measured.run, plan.model.spec
    comparisons = compare_bubble(run, measured.ranks) if options.sleep and measured.ranks else []
    reduced = [
        f"{name} {getattr(model, name)} → {getattr(run.model, name)}" for name in ("hidden_size", "num_hidden_layers")
    ]
    return probe_result(plan, options, describe_slice(plan, grid, run.order, options, reduced), measured, comparisons)
