"""The slowness of each rank that a probe measured, after a test that its seconds are evidence of speed at all.

Seconds are compared with the price of eager torch, which is what the ranks run, so that any difference is the rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from statistics import median
from typing import NamedTuple

from planner.answer import Plan, PricedLayout, StagePlan
from planner.errors import SpecError
from planner.probe.plan_side.eager import in_eager_torch
from planner.probe.plan_side.rank_grid import sampled_stages
from planner.probe.result import ProbeResult, RankResult
from planner.probe.verdict.conditions import fault_of
from planner.probe.verdict.kernels import seen_kernels
from planner.probe.verdict.same_hardware import objection_to_device
from planner.specs.hardware import HardwareSpec

SAME = 1e-6
"""Relative difference below which two predictions are the same."""
_REAL = "run the plan's own stages on the device that it is for: plan probe plan.json --device cuda, or --stage all"


def require_speed(result: ProbeResult, hardware: HardwareSpec, where: str = "the probe") -> None:
    """Raise SpecError if the result says nothing about the speed of `hardware`."""
    for_cpu = hardware.architecture == "cpu"
    if result.out_of_memory is not None or not result.ranks:
        raise SpecError(f"{where}: ran out of memory and measured no seconds", "probe a plan that fits")
    if result.sleeps:
        raise SpecError(f"{where}: slept instead of computing, and says nothing about speed", _REAL)
    if result.run.device == "cpu" and not for_cpu:
        raise SpecError(f"{where}: ran on a CPU, which proves nothing about the speed of {hardware.name}", _REAL)
    if result.run.device == "cuda" and for_cpu:
        raise SpecError(
            f"{where}: ran on {result.device}, the hardware is {hardware.name}, a CPU", "probe --device cpu"
        )
    devices = () if for_cpu else dict.fromkeys([result.device, *(rank.device_name for rank in result.ranks)])
    objections = (objection_to_device(device, result.torch_version, hardware) for device in devices)
    if (objection := next(filter(None, objections), None)) is not None:
        raise SpecError(f"{where}: {objection[0]}", objection[1])
    if result.run.dtype != "bfloat16":
        raise SpecError(f"{where}: ran the model in small to prove its order, not its speed", "plan probe --stage all")
    if result.run.fully_sharded and result.mode == "ranks":
        raise SpecError(f"{where}: its passes waited for gathered weights (ZeRO-3)", "plan probe --stage all")
    if result.run.device == "cuda" and (result.run.ranks_per_gpu > 1 or result.run.backend == "gloo"):
        how = "its ranks shared GPUs" if result.run.ranks_per_gpu > 1 else "its messages went through the host (gloo)"
        raise SpecError(f"{where}: {how}, which proves its order and not its speed", "plan probe --stage all")
    if not any(chunk.forward_s > 0 and chunk.backward_s > 0 for rank in result.ranks for chunk in rank.chunks):
        raise SpecError(f"{where}: timed no forward and backward", _REAL)
    fault = fault_of(result)
    if fault is not None:
        raise SpecError(
            f"{where}: {fault}: its seconds are no evidence of the speed of {hardware.name}",
            "plan probe again, on GPUs that are idle and cool",
        )


class Slowness(NamedTuple):
    """The factor by which a pipeline rank takes longer than the profile says."""

    factor: float
    guessed: str = ""
    """The source of a guess, if the rank's stage did not run."""


def slowness(plan: Plan, result: ProbeResult, where: str = "the probe") -> tuple[Slowness, ...]:
    """The slowness of each pipeline rank, exchanges included.

    The slowest data-parallel rank of a stage counts, because all others wait for it. A stage that did not run takes the
    factor of the nearest stage that ran with the same parts (embedding, head) if all stages ran on one device, else the
    median. Raises SpecError if the probe measured no speed, or another plan.
    """
    layout = in_eager_torch(plan, seen_kernels(result.ranks), alone=result.mode == "stages").best
    require_speed(result, plan.cluster.hardware, where)
    if result.inputs_sha256 != plan.inputs_sha256:
        raise SpecError(
            f"{where}: is of a plan with other inputs", "probe this plan: plan probe plan.json -o probe.json"
        )
    _require_same_stages(layout, result, where)
    pp, alone = layout.parallelism.pp, result.mode == "stages"
    stage_of = list(range(pp)) if alone else sampled_stages(pp, result.run.pp)
    factors = {
        stage_of[stage]: _factor(layout, stage_of[stage], [rank for rank in result.ranks if rank.stage == stage], alone)
        for stage in sorted({rank.stage for rank in result.ranks})
    }
    slowness_of_stage = {stage: Slowness(factor) for stage, factor in factors.items()}
    return tuple(slowness_of_stage.get(stage) or _guess(layout, factors, stage, alone) for stage in range(pp))


def _require_same_stages(layout: PricedLayout, result: ProbeResult, where: str) -> None:
    """Raise SpecError unless the probe's predictions are those of this layout; else it ran other layers."""
    for comparison in result.comparisons:
        if comparison.name == "forward" and comparison.stage is not None:
            is_in_plan = comparison.stage < len(layout.stages)
            planned_s = _planned_s(layout.stages[comparison.stage], result.mode == "stages") if is_in_plan else 0.0
            if not isclose(comparison.predicted, planned_s, rel_tol=SAME):
                planned = f"{comparison.predicted:.6g} s a forward, here {planned_s:.6g}"
                raise SpecError(
                    f"{where}: stage {comparison.stage} was predicted {planned}",
                    "probe this very plan: plan probe plan.json -o probe.json",
                )


def _planned_s(stage: StagePlan, alone: bool) -> float:
    return stage.forward_s + (0.0 if alone else stage.forward_comm_s)


def _factor(layout: PricedLayout, stage: int, ranks: Sequence[RankResult], alone: bool) -> float:
    """Measured over planned seconds of a micro-batch, times the factor that the layout already has for this rank."""
    planned = layout.stages[stage]
    exchanged_s = planned.forward_comm_s + planned.backward_comm_s
    measured_s = max(sum(chunk.own_forward_s + chunk.own_backward_s for chunk in rank.chunks) for rank in ranks)
    layout_factor = layout.rank_factors[stage] if layout.rank_factors else 1.0
    total_s = planned.forward_s + planned.backward_s + exchanged_s
    return layout_factor * (measured_s + (exchanged_s if alone else 0.0)) / total_s


def _guess(layout: PricedLayout, factors: dict[int, float], stage: int, alone: bool) -> Slowness:
    holds = layout.stages[stage].holds
    similar_stages = [other for other in factors if layout.stages[other].holds == holds] if alone else []
    if similar_stages:
        nearest = min(similar_stages, key=lambda other: (abs(other - stage), other))
        return Slowness(factors[nearest], f"like stage {nearest}")
    return Slowness(median(factors.values()), "median" if len(factors) > 1 else f"like stage {min(factors)}")
