"""What a probe's seconds say for planning: whether they are evidence of speed at all, and how slow each rank was.

Seconds are held against the price of eager torch, which the ranks are, so that what is slow is the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from statistics import median
from typing import NamedTuple

from planner.answer import Plan, PricedLayout, StagePlan
from planner.errors import SpecError
from planner.probe.eager import in_eager_torch
from planner.probe.result import ProbeResult, RankResult
from planner.probe.slices import sampled_stages
from planner.specs.hardware import HardwareSpec

SAME = 1e-6
"""Relative difference below which two predictions are the same."""
_REAL = "run the plan's own stages on the device that it is for: plan probe plan.json --device cuda, or --stage all"


def require_speed(result: ProbeResult, hardware: HardwareSpec, where: str = "the probe") -> None:
    """Raise SpecError where the result says nothing about how fast `hardware` is."""
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
    if result.run.dtype != "bfloat16":
        raise SpecError(f"{where}: ran the model in small to prove its order, not its speed", "plan probe --stage all")
    if result.run.fully_sharded and result.mode == "ranks":
        raise SpecError(f"{where}: its passes waited for gathered weights (ZeRO-3)", "plan probe --stage all")


class Slowness(NamedTuple):
    """How many times as long a pipeline rank takes as the profile says."""

    factor: float
    guessed: str = ""
    """What it is taken from where the rank's stage did not run."""


def slowness(plan: Plan, result: ProbeResult, where: str = "the probe") -> tuple[Slowness, ...]:
    """How slow each pipeline rank is, exchanges included.

    The slowest data-parallel rank of a stage counts: all others wait for it. A stage that did not run is like the
    nearest one that ran with the same parts beside layers, where all stages ran on one device; else like the median.
    Raises SpecError where the probe measured no speed, or another plan's.
    """
    layout = in_eager_torch(plan).best
    require_speed(result, plan.cluster.hardware, where)
    if result.inputs_sha256 != plan.inputs_sha256:
        raise SpecError(
            f"{where}: is of a plan with other inputs", "probe this plan: plan probe plan.json -o probe.json"
        )
    _require_same_stages(layout, result, where)
    pp, alone = layout.parallelism.pp, result.mode == "stages"
    stage_of = list(range(pp)) if alone else sampled_stages(pp, result.run.pp)
    found = {
        stage_of[stage]: _factor(layout, stage_of[stage], [rank for rank in result.ranks if rank.stage == stage], alone)
        for stage in sorted({rank.stage for rank in result.ranks})
    }
    ran = {stage: Slowness(factor) for stage, factor in found.items()}
    return tuple(ran.get(stage) or _guess(layout, found, stage, alone) for stage in range(pp))


def _require_same_stages(layout: PricedLayout, result: ProbeResult, where: str) -> None:
    """What the probe was held against is what this layout predicts, or it ran other layers."""
    for found in result.comparisons:
        if found.name == "forward" and found.stage is not None:
            known = found.stage < len(layout.stages)
            planned_s = _planned_s(layout.stages[found.stage], result.mode == "stages") if known else 0.0
            if not isclose(found.predicted, planned_s, rel_tol=SAME):
                planned = f"{found.predicted:.6g} s a forward, here {planned_s:.6g}"
                raise SpecError(
                    f"{where}: stage {found.stage} was predicted {planned}",
                    "probe this very plan: plan probe plan.json -o probe.json",
                )


def _planned_s(stage: StagePlan, alone: bool) -> float:
    return stage.forward_s + (0.0 if alone else stage.forward_comm_s)


def _factor(layout: PricedLayout, stage: int, ranks: Sequence[RankResult], alone: bool) -> float:
    """Measured over planned seconds of a micro-batch, beyond what the layout already says of this rank."""
    planned = layout.stages[stage]
    exchanged_s = planned.forward_comm_s + planned.backward_comm_s
    measured_s = max(sum(chunk.forward_s + chunk.backward_s for chunk in rank.chunks) for rank in ranks)
    known = layout.rank_factors[stage] if layout.rank_factors else 1.0
    total_s = planned.forward_s + planned.backward_s + exchanged_s
    return known * (measured_s + (exchanged_s if alone else 0.0)) / total_s


def _guess(layout: PricedLayout, found: dict[int, float], stage: int, alone: bool) -> Slowness:
    holds = layout.stages[stage].holds
    alike = [other for other in found if layout.stages[other].holds == holds] if alone else []
    if alike:
        nearest = min(alike, key=lambda other: (abs(other - stage), other))
        return Slowness(found[nearest], f"like stage {nearest}")
    return Slowness(median(found.values()), "median" if len(found) > 1 else f"like stage {min(found)}")
