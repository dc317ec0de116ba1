"""Factors on the seconds of kernels: by family where traces show them, of all kernels alike by whole steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from statistics import median
from typing import Any

from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.observe.calibrate.observed_run import STEP, PricedRun, RunEvidence, plausible_factors
from planner.observe.traces.kernels_and_groups import NAMES, OTHER
from planner.observe.traces.results import RankReport, TraceStep
from planner.physics.passes import lateness
from planner.profile.probed.doubt import LEAST_SENSITIVE, REPEATS
from planner.profile.probed.plausible import TAKEN, Opinion, kernel_objection
from planner.specs.hardware import HardwareSpec
from planner.trainers.calibration import Calibration, Factor

PRODUCTS, ATTENTION, STREAM = "gemm_factor", "attention_factor", "stream_factor"
"""Factors of a profile."""
NOT_MEMORY_BOUND = {"communication", "gemm", "attention", "convolution", "scan", "dispatch on the host", OTHER}
MEMORY_BOUND = frozenset(NAMES) - NOT_MEMORY_BOUND
"""Families that the price has as memory-bound kernels."""
MOST_UNKNOWN = 0.1
"""Largest share of a step's computing that kernels of no known family may take."""
LEAST_SHARE = 0.02
"""Least share of a step's computing by which a kind of kernel is told."""


def common_factor(run: PricedRun, evidence: RunEvidence, calibration: Calibration, where: str) -> tuple[Factor, float]:
    """The factor on all kernels with which the priced step is the measured one, and the error that stays, in natural
    logarithms. Raises SpecError where no factor that such GPUs can have does."""
    step_s, planned_s = evidence.step_s, run.step_s(calibration)
    error = math.log(step_s / planned_s)
    sensitivity = run.sensitivity(calibration)
    source = f"a step of {step_s:.4g} s, priced {planned_s:.4g}"
    if sensitivity < LEAST_SENSITIVE:
        reason = f"kernels twice as slow make the step {2**sensitivity - 1:.0%} longer: host and links hold it up"
        least, most = plausible_factors(run.cluster.hardware)
        value = min(most, max(least, math.exp(error)))
        return Factor(value=value, source=source, verdict="refused", reason=reason), error
    log_factor = run.log_kernels(step_s, calibration)
    if log_factor is None:
        hardware = run.cluster.hardware
        asked = f"its step of {step_s:.4g} s is {math.exp(error):.2f} of the priced {planned_s:.4g}"
        least, most = plausible_factors(hardware)
        raise SpecError(
            f"{where}: {asked}, which no factor on the kernels of {hardware.name} explains "
            f"({least:.2f} to {most:g} is plausible)",
            "check --hardware and that the plan is the run's, and read what plan observe says of it",
        )
    value = math.exp(log_factor)
    if abs(error) <= (repeats := max(REPEATS, evidence.width)):
        reason = f"the priced step is {abs(error):.1%} off, and steps repeat within {repeats:.1%}"
        return Factor(value=value, source=source, verdict="confirmed", reason=reason), error
    return Factor(value=value, source=source), 0.0


def family_factors(run: PricedRun, ranks: Iterable[RankReport]) -> dict[str, Factor]:
    """The factors on products, attention and memory-bound kernels by the families of kernels in traces, by the path of
    what they change in a profile; empty where no rank's stage is known."""
    pp = run.plan.parallelism.pp
    steps = [(_stage(rank, pp), step) for rank in ranks for step in rank.steps if not step.warm_up and step.compute_s]
    placed = [(stage, step) for stage, step in steps if stage is not None]
    planned = {stage: _planned(run, stage) for stage in {stage for stage, _ in placed}}
    unknown = median(_share_of(step, {OTHER}) for _, step in placed) if placed else 0.0
    found = {}
    for path, families in {PRODUCTS: {"gemm"}, ATTENTION: {"attention"}, STREAM: MEMORY_BOUND}.items():
        ratios = [_seconds_of(step, families) / planned[stage][path] for stage, step in placed if planned[stage][path]]
        share = median(_share_of(step, families) for _, step in placed) if placed else 0.0
        if ratios and share >= LEAST_SHARE:
            spread = (max(ratios) - min(ratios)) / 2 / median(ratios)
            opinion = _opinion(path, median(ratios), spread, unknown, run.cluster.hardware)
            source = f"{share:.0%} of the computing in {len(placed)} steps of traces"
            found[path] = Factor(value=median(ratios), source=source, **opinion)
    return found


def calibrated_kernels(factors: Mapping[str, Factor], run: PricedRun) -> dict[str, Any]:
    """The fields of a calibration that hold these factors; that on attention is one on every kernel that may be it."""
    fields: dict[str, Any] = {path: factor for path, factor in factors.items() if path != ATTENTION}
    if ATTENTION in factors:
        fields["attention_factor"] = dict.fromkeys(_attention_kernels(run), factors[ATTENTION])
    return fields


def _attention_kernels(run: PricedRun) -> tuple[str, ...]:
    """The names in the profile of the kernels that the run's attention may be."""
    has = ("flash",) if run.cluster.hardware.efficiency.cudnn is None else ("flash", "cudnn")
    named = run.plan.runtime_spec.attention_kernel.removeprefix("sdpa-")
    return (named,) if named in has else ("flash",) if named == "flash1" else has


def _opinion(path: str, value: float, spread: float, unknown: float, hardware: HardwareSpec) -> Opinion:
    if unknown > MOST_UNKNOWN:
        return {"verdict": "refused", "reason": f"kernels of no known family take {unknown:.0%} of the computing"}
    if objection := kernel_objection("flash.seconds_factor" if path == ATTENTION else path, value, hardware):
        return {"verdict": "refused", "reason": f"{objection}: is the trace of this job?"}
    if abs(math.log(value)) <= (repeats := max(REPEATS, spread)):
        return {"verdict": "confirmed", "reason": f"the profile's is as near as the steps repeat ({repeats:.1%})"}
    return TAKEN


def _stage(rank: RankReport, pp: int) -> int | None:
    return 0 if pp == 1 else rank.stage if rank.stage is not None and rank.stage < pp else None


def _seconds_of(step: TraceStep, families: Collection[str]) -> float:
    return sum(family.seconds for family in step.families if family.family in families)


def _share_of(step: TraceStep, families: Collection[str]) -> float:
    return _seconds_of(step, families) / step.compute_s


def _planned(run: PricedRun, rank: int) -> dict[str, float]:
    """Seconds of a step that a rank's kernels of each kind take: the change of its computing by their factor.

    What no factor changes, launches and the like, is memory-bound kernels'. The GPU never waits for its host, and the
    rank is no late one.
    """
    hardware = run.cluster.hardware
    unhurried = hardware.model_copy(update={"efficiency": hardware.efficiency.model_copy(update={"host_us": 0.0})})
    alone = PricedRun(run.plan, run.cluster.changed(hardware=unhurried))
    slower = Factor(value=math.exp(STEP), source="")
    total_s = _computed_s(alone.candidate(), rank)
    planned = {}
    for path in (PRODUCTS, ATTENTION, STREAM):
        moved = Calibration(source="", **calibrated_kernels({path: slower}, run))
        planned[path] = (_computed_s(alone.candidate(moved), rank) - total_s) / math.expm1(STEP)
    planned[STREAM] += max(0.0, total_s - sum(planned.values()))
    late = lateness(run.plan.training, run.cluster)
    return {path: seconds / late for path, seconds in planned.items()}


def _computed_s(candidate: Candidate, rank: int) -> float:
    """Seconds of a step that a rank computes and updates its weights."""
    cost = candidate.rank_costs[rank]
    passes_s = float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)
    return candidate.num_microbatches * passes_s + float(cost.optimizer_s)
