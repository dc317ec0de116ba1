"""`rehearse()`: count the bytes of a plan's stages without a GPU, and put them beside the plan's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from planner.answer import Plan, PricedLayout
from planner.layout.candidate import Candidate
from planner.layout.replan import order_of
from planner.probe.plan_side.chunks import real_chunks, slice_schedule
from planner.probe.plan_side.describe import describe_slice
from planner.probe.plan_side.eager import in_eager_torch, knows_peak, repriced, static_bytes
from planner.probe.plan_side.gpu_run import real_run, stage_asked_for, stand_in_stages
from planner.probe.plan_side.options import ProbeOptions
from planner.probe.plan_side.rank_grid import RankGrid, sharing_dp
from planner.probe.rehearse.count import KEPT, CountedStage, count_stage
from planner.probe.rehearse.result import RehearsalResult
from planner.probe.result import ComparedQuantity, PlanSlice
from planner.probe.run import ProbeRun
from planner.schedule.actions import Schedule
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks, violation
from planner.specs.model import LayerKind

OPTIONS = ProbeOptions(device="cpu", stages="all")
ROUNDS = 3
"""Rounds of as many micro-batches as there are stages."""
BYTES_TOLERANCE = 0.01
"""Fraction of a plan's bytes by which a count may differ: stages measured on an H200 are planned within 1%."""


def rehearse(plan: Plan, stages: Literal["all"] | int, tolerance_fraction: float = BYTES_TOLERANCE) -> RehearsalResult:
    """Run the distinct stages of the plan (or the one named) one after another on fake tensors, and compare."""
    eager = in_eager_torch(plan)
    layout, architecture = eager.best, plan.cluster.hardware.architecture
    pp = layout.parallelism.pp
    names = sorted(set(stand_in_stages(layout))) if stages == "all" else [stage_asked_for(stages, pp)]
    comparisons: list[ComparedQuantity] = []
    layers: dict[tuple[LayerKind, str], int] = {}
    for stage in names:
        counted = count_stage(stage_run(plan, eager, stage), stage, architecture)
        comparisons += compare_stage_bytes(eager, stage, counted, tolerance_fraction)
        layers |= counted.layers
    comparisons += compare_layers(repriced(eager), layers)
    return RehearsalResult(
        architecture=architecture,
        torch_version=torch.__version__,
        inputs_sha256=plan.inputs_sha256,
        slice=in_words(plan, eager),
        tolerance_fraction=tolerance_fraction,
        comparisons=tuple(comparisons),
    )


def stage_run(plan: Plan, eager: Plan, stage: int) -> ProbeRun:
    """The run of one of the plan's stages, with as few micro-batches as fill it."""
    order = shortest_order(eager.best, stage)
    chunks = real_chunks(eager.best, order, range(order.pp))
    return real_run(plan, OPTIONS, order, chunks, whole_grid(eager.best))


def whole_grid(layout: PricedLayout) -> RankGrid:
    """All ranks of the layout that share something."""
    asked = layout.parallelism
    return RankGrid(asked.pp, sharing_dp(layout), asked.cp, asked.tp, asked.ep)


def in_words(plan: Plan, eager: Plan) -> PlanSlice:
    """The part of the plan that is counted."""
    asked = eager.best.parallelism
    reduced = ["to as many micro-batches as fill a stage", f"one of {asked.num_gpus_used:,} ranks at a time"]
    order = shortest_order(eager.best, 0)
    part = describe_slice(plan, whole_grid(eager.best), order, OPTIONS, reduced)
    return part.model_copy(
        update={
            "verified": ("bytes that tensors of each stage take",),
            "extrapolated": ("seconds", "bytes of the driver, of communicators and of cuBLAS"),
        }
    )


def shortest_order(layout: PricedLayout, stage: int) -> Schedule:
    """The plan's schedule with the fewest micro-batches that hold as many in flight on a stage as all of them.

    Where backwards are split, weight gradients wait for several rounds: three are run, and of an order that was made to
    measure its first three.
    """
    if layout.actions:
        return first_microbatches(order_of(layout), ROUNDS * layout.parallelism.pp)
    asked = layout.parallelism
    name, pp, vpp, total = asked.schedule, asked.pp, asked.vpp, asked.num_microbatches
    if SCHEDULES[name].splits_backward:
        return slice_schedule(layout, pp, min(total, ROUNDS * pp))
    wanted = in_flight_chunks(name, pp, vpp, total)[stage]
    for count in range(1, total):
        if violation(name, pp, vpp, count) is None and in_flight_chunks(name, pp, vpp, count)[stage] == wanted:
            return build_schedule(name, pp, vpp, count)
    return slice_schedule(layout, pp, total)


def first_microbatches(order: Schedule, count: int) -> Schedule:
    """An order without the actions of later micro-batches, which none of the others waits for."""
    ranks = tuple([action for action in actions if action.microbatch < count] for actions in order.ranks)
    return replace(order, ranks=ranks, num_microbatches=min(count, order.num_microbatches))


def compare_stage_bytes(
    eager: Plan, stage: int, counted: CountedStage, tolerance_fraction: float
) -> Iterator[ComparedQuantity]:
    """Bytes before a step and at its peak, and what the peak is made of."""
    planned, judged = eager.stages[stage].memory, tolerance_fraction if knows_peak(eager) else None
    kept = counted.at_peak.get(KEPT, 0)
    moment = counted.peak_bytes - kept - counted.at_peak.get("", 0)
    rows = (
        ("static memory", static_bytes(eager, stage), counted.static_bytes, tolerance_fraction),
        ("peak allocated", planned.peak_allocated_bytes, counted.peak_bytes, judged),
        ("  kept by forwards", planned.activations_bytes, kept, None),
        ("  for a moment", planned.logits_bytes + planned.workspace_bytes, moment, None),
    )
    for name, predicted, measured, tolerance in rows:
        yield ComparedQuantity(
            name=name,
            stage=stage,
            unit="bytes",
            predicted=predicted,
            measured=measured,
            agrees=None if tolerance is None else abs(measured - predicted) <= tolerance * predicted,
        )


def compare_layers(priced: Candidate, layers: dict[tuple[LayerKind, str], int]) -> Iterator[ComparedQuantity]:
    """Bytes that one layer of each kind keeps of a micro-batch."""
    for (kind, mode), num_bytes in layers.items():
        planned = float(priced.table.layers[kind, mode].live_bytes)  # type: ignore[index]
        recomputed = "" if mode == "none" else f", {mode} recomputation"
        yield ComparedQuantity(
            name=f"layer: {kind.attention}, {kind.mlp}{recomputed}", unit="bytes", predicted=planned, measured=num_bytes
        )
