"""The calibration that an observed run gives: the numbers of a profile with which its priced step is the measured one.

Links come first, then kernels: by family where traces show them, else one factor on all of them by the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from planner.layout.confidence import hardware_width
from planner.layout.risk import MEMORY_WIDTH
from planner.observe.calibrate.kernels import calibrated_kernels, common_factor, family_factors
from planner.observe.calibrate.links import link_shares
from planner.observe.calibrate.observed_run import PricedRun, RunEvidence, evidence_of
from planner.observe.observation import Observation, Observed, RankMemory
from planner.observe.traces.recorded import ObservedFiles
from planner.observe.traces.results import HOST, RankReport
from planner.physics.memory import communicators
from planner.profile.probed.doubt import TRANSFER_WIDTH
from planner.profile.probed.plausible import (
    Opinion,
    opinion_of_context,
    opinion_of_fragmentation,
    opinion_of_host,
)
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.units import GIB
from planner.trainers.calibration import Calibration, Quantity, Share


def reserved(run: PricedRun, observation: Observation) -> dict[str, Any]:
    """The fields of a calibration for memory outside the allocator, and for what it holds beyond what is allocated."""
    fields = {"context_gib": _context(run, observation.memory), "fragmentation_fraction": _held(observation.memory)}
    return {name: number for name, number in fields.items() if number is not None}


def _held(memory: Sequence[RankMemory]) -> Share | None:
    ratios = [
        rank.max_reserved_bytes / rank.max_allocated_bytes - 1
        for rank in memory
        if rank.max_reserved_bytes and rank.max_allocated_bytes
    ]
    if not ratios:
        return None
    fraction = median(ratios)
    opinion = opinion_of_fragmentation(fraction)
    return Share(value=min(1.0, max(0.0, fraction)), source=_ranks(len(ratios)), **opinion)


def _context(run: PricedRun, memory: Sequence[RankMemory]) -> Quantity | None:
    """Memory in use on the device beyond the allocator's, less what communicators take."""
    outside = [
        rank.device_bytes - rank.max_reserved_bytes for rank in memory if rank.device_bytes and rank.max_reserved_bytes
    ]
    if not outside:
        return None
    hardware = run.cluster.hardware
    exchanged = float(communicators(run.candidate().shape)) * hardware.reserved.communicator_bytes
    context_gib = (median(outside) - exchanged) / GIB
    opinion = opinion_of_context(context_gib)
    return Quantity(value=max(0.0, context_gib), source=_ranks(len(outside)), **opinion)


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'} of the run"


def reserved_width(run: PricedRun, observation: Observation | None) -> float:
    """The width of reserved memory after a run: as before, but no surer than the run's own peak was predicted."""
    error = 0.0
    if observation is not None and observation.peak_memory_kind == "allocated" and observation.peak_memory_bytes:
        planned = max(stage.peak_allocated_bytes for stage in run.candidate().memory)
        error = abs(math.log(observation.peak_memory_bytes / planned))
    return kept_width(run.cluster.hardware, error)


def kept_width(hardware: HardwareSpec, error: float = 0.0) -> float:
    """The width that reserved memory needs for a rank's memory to be as sure as before, now that kernels are `probed`,
    or `error` where that is wider: whole steps correct seconds, and one peak says little of another layout's."""
    before = math.hypot(MEMORY_WIDTH[hardware.efficiency.evidence], hardware.reserved.width)
    return math.sqrt(max(0.0, max(before, error) ** 2 - MEMORY_WIDTH["probed"] ** 2))


MOST_SLOWED = 0.03
"""Largest share by which a step under the profiler may be longer than the log's for its gaps to be the host's own."""


def host(run: PricedRun, ranks: Sequence[RankReport], evidence: RunEvidence) -> Quantity | None:
    """The gaps of a step beyond those that are priced already, for each micro-batch; None without traces of a GPU.

    The profiler takes the host's time too: gaps are believed where the log's steps are about as long as the traces'.
    """
    steps = [step for rank in ranks for step in rank.steps if not step.warm_up and step.compute_s > 0]
    if not steps:
        return None
    count = run.plan.parallelism.num_microbatches
    seconds = max(0.0, (median(step.host_gaps_s for step in steps) - _priced_s(run)) / count)
    slowed = median(step.wall_s for step in steps) / evidence.step_s - 1
    opinion: Opinion = opinion_of_host(seconds)
    if not evidence.has_log:
        reason = "the profiler's own time is in it: give a log of steps without one, too"
        opinion = {"verdict": "refused", "reason": reason}
    elif slowed > MOST_SLOWED:
        reason = f"the profiler's own time is in it: steps in the traces are {slowed:.0%} longer than the log's"
        opinion = {"verdict": "refused", "reason": reason}
    return Quantity(value=seconds, source=f"idle between the kernels of {len(steps)} steps of traces", **opinion)


def _priced_s(run: PricedRun) -> float:
    """Seconds of a step that the price has the GPU wait for its host."""
    hardware = run.cluster.hardware
    unhurried = hardware.model_copy(update={"efficiency": hardware.efficiency.model_copy(update={"host_us": 0.0})})
    alone: ClusterSpec = run.cluster.changed(hardware=unhurried)
    candidate = run.candidate()
    waited_s = candidate.step_s - PricedRun(run.plan, alone).candidate().step_s
    return waited_s + float(candidate.outside.tail_s)


ONE_RUN_WIDTH = 0.11
"""Half-width of another layout's step where one run's whole step set the speed of kernels: that run's own error comes
along. Of pairs of published runs of one source and one kind of GPU, four in five differ by no more, in the median of
43 sets (docs/HISTORY.md)."""
UNDER_PROFILER = "a profiler makes steps longer: observe a log of steps without one"
POOR = 0.07
"""Error of the calibrated price on the run itself from which the fit is called poor: that between layouts."""


def from_run(observed: Observed, cluster: ClusterSpec, where: str = "the run") -> Calibration:
    """The numbers that an observed run measured, laid beside those of `cluster`, each with a verdict and a reason.

    Raises SpecError if the run is no evidence of the speed of this hardware.
    """
    evidence = evidence_of(observed, observed.plan, cluster, where)
    assert observed.plan is not None, "evidence_of refuses a run without one"
    run = PricedRun.of(observed.plan, cluster)
    ranks = _traced(observed)
    observation = observed.observation
    beside: dict[str, Any] = {"efficiency_fraction": link_shares(run, ranks, observation.links)}
    if not evidence.leaks:
        beside |= reserved(run, observation)
    if (gaps := host(run, ranks, evidence)) is not None:
        beside["microbatch_overhead_s"] = gaps
    calibration = Calibration(source=_source(observed), by="run", **beside)
    families = family_factors(run, ranks)
    if any(factor.verdict != "refused" for factor in families.values()):
        calibration = calibration.model_copy(update=calibrated_kernels(families, run))
        error, transfer = math.log(evidence.step_s / run.step_s(calibration)), TRANSFER_WIDTH
    else:
        factor, error = common_factor(run, evidence, calibration, where)
        if not evidence.has_log and factor.is_applied:
            error = math.log(evidence.step_s / run.step_s(calibration))
            factor = factor.model_copy(update={"verdict": "refused", "reason": UNDER_PROFILER})
        calibration = calibration.model_copy(update={"kernels_factor": factor, **calibrated_kernels(families, run)})
        transfer = ONE_RUN_WIDTH if factor.is_applied else min(hardware_width(cluster.hardware), ONE_RUN_WIDTH)
    return calibration.model_copy(
        update={
            "step_width": math.hypot(transfer, error, evidence.width),
            "memory_width": reserved_width(run, None if evidence.leaks else observation)
            if calibration.explains_kernels
            else None,
            "warnings": (*evidence.left_out, *_poor(error, evidence)),
        }
    )


def _traced(observed: Observed) -> Sequence[RankReport]:
    """The ranks whose traces show a GPU."""
    traces = observed.recorded.traces if isinstance(observed, ObservedFiles) else None
    return [rank for rank in traces.ranks if rank.device != HOST] if traces else []


def _source(observed: Observed) -> str:
    plan, observation = observed.plan, observed.observation
    assert plan is not None
    ran = f"{plan.model.name} on {plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}, {plan.runtime}"
    return f"observed run of {ran}, {plan.parallelism}, {observation.num_steps:,} steps"


def _poor(error: float, evidence: RunEvidence) -> tuple[str, ...]:
    if abs(error) <= POOR:
        return ()
    off = "longer" if error > 0 else "shorter"
    return (
        f"a poor fit: the run's step of {evidence.step_s:.4g} s is {abs(math.expm1(error)):.0%} {off} than the price "
        "with what it measured; intervals are wider by that",
    )
