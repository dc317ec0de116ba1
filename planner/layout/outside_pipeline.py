"""Seconds of a step outside its pipeline: exposed data-parallel exchange, the optimizer, the tail on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.schedule.orders import lead_passes, passes_behind
from planner.shape import Number, Shape, maximum
from planner.trainers.spec import RuntimeSpec


class OutsidePipeline(NamedTuple):
    """Seconds of a step outside the pipeline."""

    exposed_dp_s: float
    optimizer_s: float
    tail_s: float


def outside_pipeline(pricing: Pricing, table: CostTable, ranks: Sequence[PartCost], schedule: str) -> OutsidePipeline:
    """`outside_seconds` of one split."""
    return OutsidePipeline(*(float(seconds) for seconds in outside_seconds(pricing, table, ranks, schedule)))


def outside_seconds(
    pricing: Pricing, table: CostTable, ranks: Sequence[PartCost], schedule: str
) -> tuple[Number, Number, Number]:
    """Seconds of the exposed data-parallel exchange, of the optimizer, and of the tail on every rank.

    Gradients are reduced behind the last micro-batch's backward, parameters gathered behind the first one's forward.
    The costs of ranks are numbers, or arrays of as many splits.

    A rank has as much time for this as a micro-batch takes through a chunk of each rank before it, there or back
    (`lead_passes`). Each of its chunks exchanges an equal part. The part of the last chunk can hide behind this chunk's
    own pass, and all parts together behind the passes that follow the first chunk's (`passes_behind`). Without a
    pipeline, ZeRO-2 reduces gradients in every micro-batch, and ZeRO-3 also gathers the weights twice. A hidden
    exchange slows down the passes that hide it: a share of every exchange is exposed (`contention_fraction`).
    """
    runtime, shape = pricing.runtime, table.shape
    sharded = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    exposed: Number = 0.0
    if sharded:
        (first,) = ranks
        exchanged = _each_time_s(first, sharded)
        hidden = runtime.fsdp_overlap_fraction * (first.total_s if sharded == 3 else first.backward_total_s)
        shown_s = np.maximum(runtime.contention_fraction * exchanged, exchanged - hidden)
        exposed = float(shape.num_microbatches) * shown_s
    vpp = int(shape.vpp)
    passes, led = passes_behind(schedule, int(shape.pp), vpp), lead_passes(schedule, vpp)

    def shown(exchange: str, way: str, fraction: float, lead: float) -> Number:
        """Seconds of one exchange that show on the rank where most do."""
        exchanged = np.array([getattr(rank, exchange) for rank in ranks])
        passing_s = np.array([getattr(rank, way) for rank in ranks])
        hidden = fraction * passing_s
        before_s = np.cumsum(lead * passing_s, axis=0) - lead * passing_s
        own = np.maximum((exchanged - hidden) / vpp, exchanged - passes * hidden)
        own = np.maximum(own, runtime.contention_fraction * exchanged) - before_s
        return np.asarray(np.maximum(own.max(axis=0), 0.0))

    if sharded < 2:
        fraction = float(reduce_overlap_fraction(runtime, shape))
        exposed = exposed + shown("reduce_s", "backward_total_s", fraction, led)
    if sharded < 3:
        exposed = exposed + shown("gather_s", "forward_total_s", runtime.parameter_overlap_fraction, 1 / vpp)
    optimizers_s = np.array([rank.optimizer_s for rank in ranks])
    return exposed, optimizers_s.max(axis=0), table.tail_s


def _each_time_s(rank: PartCost, sharded: int) -> Number:
    """Seconds of a rank's exchanges in every micro-batch, hidden or not."""
    return rank.reduce_s + (2 * rank.gather_s if sharded == 3 else 0.0)


def exchanged_dp_s(shape: Shape, rank: PartCost) -> float:
    """Seconds of all data-parallel exchanges of a rank in a step, hidden or not."""
    sharded = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    once_s = (sharded < 2) * float(rank.reduce_s) + (sharded < 3) * float(rank.gather_s)
    return once_s + (float(shape.num_microbatches) * float(_each_time_s(rank, sharded)) if sharded else 0.0)


def reduce_overlap_fraction(runtime: RuntimeSpec, shape: Shape) -> Number:
    """Share of the window behind the last backward that hides the reduction; torch's stages wait for that of FSDP."""
    waits = runtime.has_torch_stages & (np.asarray(shape.zero_stage) >= 2) & (np.asarray(shape.pp) > 1)
    return runtime.gradient_overlap_fraction * (1.0 - waits)


def sharded_each_time(zero_stage: int, pp: int) -> int:
    """ZeRO stage, 2 or 3, whose exchanges run in every micro-batch; 0 where they run once, in the last micro-batch."""
    return zero_stage if pp == 1 and zero_stage >= 2 else 0


PACE = 0.5
"""Share of the GPU's peak at which a stage's mean micro-batch is taken to run, where its layers are not priced yet."""


def groups_pay(pricing: Pricing, of_all: Shape, grouped: Shape) -> npt.NDArray[np.bool_]:
    """True where less of a sharded optimizer's exchanges shows in groups of ranks than among all of them.

    Weights and FLOPs are those of a mean stage, which computes at `PACE`.
    """
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    totals, expert = pricing.totals, 0.0
    if model.moe is not None:
        idle_fraction = 1 - model.moe.num_experts_per_tok / (model.moe.num_experts + model.moe.num_zero_experts)
        expert = (totals.num_parameters - totals.num_active_parameters) / max(idle_fraction, 1e-9)
    hardware = pricing.cluster.hardware
    peak = hardware.peak_flops(training.dtype) or hardware.peak_flops("bf16")
    assert peak is not None
    forward_s = totals.model_flops_per_token / 3 * of_all.tokens / (of_all.tp * of_all.pp) / (PACE * peak)
    windows = reduce_overlap_fraction(runtime, of_all) * 2 * forward_s, runtime.parameter_overlap_fraction * forward_s

    def shown_s(shape: Shape) -> Number:
        experts = expert / (shape.ep * shape.etp * shape.pp)
        held = (totals.num_parameters - expert) / (shape.tp * shape.pp) + experts
        stage = PartCost(parameters=held, expert_parameters=experts)
        if training.adapters is not None:
            adapters = totals.num_trained_parameters / (shape.tp * shape.pp)
            frozen = {"frozen_parameters": held, "frozen_expert_parameters": experts}
            stage = replace(stage, parameters=held + adapters, **frozen)
        exchanges_s = pricing.exchanges.part_s(stage, shape)
        return sum(
            maximum(runtime.contention_fraction * exchange_s, exchange_s - hidden_s)
            for exchange_s, hidden_s in zip(exchanges_s, windows, strict=True)
        )

    return np.asarray(shown_s(grouped) < shown_s(of_all))
