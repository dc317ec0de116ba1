"""The calibration that an observed run gives: the numbers of a profile with which its priced step is the measured one.

A run is evidence by the step that its hardware answers for, without what other causes took. One factor on all kernels
is told by the step, what the allocator holds beside by the peaks that the log prints. Links and families of kernels are
measured by `plan probe` and `plan profile`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.confidence import MEMORY_WIDTH, hardware_width
from planner.layout.price import reprice
from planner.observe.accounts import GAP_TABLE
from planner.observe.judge import differences
from planner.observe.observation import GapCause, Observation, Observed
from planner.observe.traces.recorded import ObservedFiles
from planner.physics.memory import communicators
from planner.profile.probed import (
    LEAST_SENSITIVE,
    MOST_FACTOR,
    MOST_SPREAD,
    REPEATS,
    context_of,
    fragmentation_of,
    least_factor,
)
from planner.specs.base import Fields, Texts
from planner.specs.cluster import ClusterSpec
from planner.specs.expressions import told
from planner.specs.hardware import HardwareSpec
from planner.trainers.calibration import Calibration, Factor

LEAST_STEPS = 10
"""Fewest steps of a log behind its warm-up: the median of fewer may be that of a slow minute."""
MOST_DRIFT = 0.05
"""Largest change of the step from begin to end: a run that gets slower has more than one speed."""
MOST_LEFT_OUT = 0.3
"""Largest share of a step that a cause may take for the rest to tell something about the hardware."""
OF_THE_STEP = (
    "data_stall", "straggler_rank", "expert_imbalance", "host_bound", "slow_link", "no_ep_overlap", "exposed_dp",
    "bubble", "unfused_kernels", "attention_kernel", "garbage_collection",
)  # fmt: skip
"""Causes whose seconds say nothing about the GPU's kernels: input, one slow rank, routing, the host, links and waits,
and a recipe other than the one that was priced. Clocks are the GPUs' own, and what stands beside steps is in none."""
OF_THE_MEMORY = ("leak",)


class RunEvidence(NamedTuple):
    """The step that the hardware answers for."""

    step_s: float
    width: float
    """Half-width that the run itself gives the step: its own spread and the digits that it was printed with."""
    has_log: bool
    """True where a log printed the steps, and not a profiler."""
    left_out: Texts = ()
    """Sentences on what was left out, and why."""
    leaks: bool = False


def evidence_of(observed: Observed, plan: Plan | None, cluster: ClusterSpec | None, where: str) -> RunEvidence:
    """The step of a run as evidence of the speed of `cluster`; SpecError where it is none."""
    observation = observed.observation
    low_s, high_s = observation.step_s_spread or (0.0, 0.0)
    spread = math.log(high_s / low_s) / 2 if low_s > 0 else 0.0
    width = math.hypot(spread, observation.step_s_precision_fraction)
    has_log = bool(observation.series.seconds) or not isinstance(observed, ObservedFiles)
    causes = [cause for cause in observed.causes if cause.name in OF_THE_STEP]
    names = {
        "o": observation, "plan": plan, "cluster": cluster, "has_log": has_log, "causes": causes, "width": width,
        "why": observed.says.removeprefix("no verdict: ") if observed.prediction else "", "called": _called,
        "differences": differences, "LEAST_STEPS": LEAST_STEPS, "MOST_DRIFT": MOST_DRIFT, "MOST_SPREAD": MOST_SPREAD,
        "MOST_LEFT_OUT": MOST_LEFT_OUT, "abs": abs, "map": map,
    }  # fmt: skip
    for problem, hint in told(GAP_TABLE["no_evidence"], names):
        raise SpecError(f"{where}: {problem}", hint)
    step_s = observation.step_s or 0.0
    left_out = [
        f"{cause.seconds:.3g} of {step_s:.3g} s are left out: {_called(cause)}, no property of the GPUs"
        for cause in causes
    ]
    leaks = any(cause.name in OF_THE_MEMORY for cause in observed.causes)
    left_out += ["its memory is left out: it leaked"] if leaks else []
    left_s = step_s - sum(cause.seconds or 0.0 for cause in causes)
    return RunEvidence(left_s, width, has_log, tuple(left_out), leaks)


def _called(cause: GapCause) -> str:
    return cause.name.replace("_", " ")


NO_CALIBRATION = Calibration(source="")
STEP = 0.02
"""Step of the numerical derivatives, in natural logarithms: far above what the replay rounds."""
CLOSE = 1e-9
MOST_ROUNDS = 60
MOST_FACTOR_OF_CPUS = 50.0


def plausible_factors(hardware: HardwareSpec) -> tuple[float, float]:
    """The least and the largest factor that all kernels of such GPUs can have; one profile stands for all CPUs."""
    if hardware.architecture == "cpu":
        return 1 / MOST_FACTOR_OF_CPUS, MOST_FACTOR_OF_CPUS
    return max(1 / MOST_FACTOR, least_factor("gemm_factor", hardware)), MOST_FACTOR


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A run's plan on a cluster without anything that calibrated it before."""

    plan: Plan
    cluster: ClusterSpec

    @classmethod
    def of(cls, plan: Plan, cluster: ClusterSpec) -> PricedRun:
        """The plan on GPUs and links as `cluster` has them, as many and in such nodes as the run had."""
        own = {tier.name: tier for tier in cluster.network_tiers}
        tiers = tuple(own.get(tier.name, tier) for tier in plan.cluster.network_tiers)
        ran_on = plan.cluster.changed(hardware=cluster.hardware, network_tiers=tiers)
        clean = {"microbatch_overhead_s": 0.0}
        runtime = (plan.best.runtime_spec or plan.runtime_spec).model_copy(update=clean)
        best = plan.best.model_copy(update={"runtime_spec": None})
        return cls(plan.model_copy(update={"runtime_spec": runtime, "best": best, "cluster": ran_on}), ran_on)

    def candidate(self, calibration: Calibration = NO_CALIBRATION) -> Candidate:
        """The layout with measured numbers in place of the cluster's own."""
        runtime = calibration.of_runtime(self.plan.runtime_spec)
        update = {"cluster": calibration.of_cluster(self.cluster), "runtime_spec": runtime}
        return reprice(self.plan.model_copy(update=update), self.plan.best)

    def step_s(self, calibration: Calibration = NO_CALIBRATION) -> float:
        """Seconds of the step with it."""
        return self.candidate(calibration).step_s

    def with_kernels(self, log_factor: float, calibration: Calibration = NO_CALIBRATION) -> float:
        """Seconds of the step where all kernels take exp(log_factor) times as long."""
        factor = Factor(value=math.exp(log_factor), source="")
        return self.step_s(calibration.model_copy(update={"kernels_factor": factor}))

    def sensitivity(self, calibration: Calibration = NO_CALIBRATION) -> float:
        """Change of the step by a change of all kernels, in natural logarithms: 1 where nothing else takes time."""
        low = self.with_kernels(-STEP, calibration)
        high = self.with_kernels(STEP, calibration)
        return math.log(high / low) / (2 * STEP)

    def log_kernels(self, step_s: float, calibration: Calibration = NO_CALIBRATION) -> float | None:
        """The logarithm of the one factor on all kernels with which a step takes `step_s`; None where no plausible
        factor does. Exchanges keep their price."""
        low, high = map(math.log, plausible_factors(self.cluster.hardware))
        below, above = (math.log(self.with_kernels(end, calibration) / step_s) for end in (low, high))
        if below > 0 or above < 0:
            return None
        for _ in range(MOST_ROUNDS):  # regula falsi of Illinois: a step is nearly a power of the factor
            middle = (low * above - high * below) / (above - below) if above > below else low
            at = math.log(self.with_kernels(middle, calibration) / step_s)
            if abs(at) < CLOSE or high - low < CLOSE:
                return middle
            if at > 0:
                high = middle
                above = at
                below = below / 2
            else:
                low = middle
                below = at
                above = above / 2
        return middle


def common_factor(run: PricedRun, evidence: RunEvidence, calibration: Calibration, where: str) -> tuple[Factor, float]:
    """The factor on all kernels with which the priced step is the measured one, and the error that stays, in natural
    logarithms. Raises SpecError where no factor that such GPUs can have does."""
    step_s = evidence.step_s
    planned_s = run.step_s(calibration)
    error = math.log(step_s / planned_s)
    hardware = run.cluster.hardware
    least, most = plausible_factors(hardware)
    sensitivity = run.sensitivity(calibration)
    source = f"a step of {step_s:.4g} s, priced {planned_s:.4g}"
    if sensitivity < LEAST_SENSITIVE:
        reason = f"kernels twice as slow make the step {2**sensitivity - 1:.0%} longer: host and links hold it up"
        value = min(most, max(least, math.exp(error)))
        return Factor(value=value, source=source, verdict="refused", reason=reason), error
    log_factor = run.log_kernels(step_s, calibration)
    if log_factor is None:
        asked = f"its step of {step_s:.4g} s is {math.exp(error):.2f} of the priced {planned_s:.4g}"
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


def reserved(run: PricedRun, observation: Observation) -> Fields:
    """The fields of a calibration for memory outside the allocator, and for what it holds beyond what is allocated."""
    rows = [(rank.max_reserved_bytes, rank.max_allocated_bytes, rank.device_bytes) for rank in observation.memory]
    held = [(reserved, allocated) for reserved, allocated, _ in rows if reserved and allocated]
    outside = [in_use - reserved for reserved, _, in_use in rows if reserved and in_use]
    fields: Fields = {"fragmentation_fraction": fragmentation_of(held, _ranks(len(held)))} if held else {}
    if outside:
        each_bytes = run.cluster.hardware.reserved.communicator_bytes
        exchanged = float(communicators(run.candidate().shape)) * each_bytes
        fields["context_gib"] = context_of([each - exchanged for each in outside], _ranks(len(outside)))
    return fields


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
    observation = observed.observation
    beside = {} if evidence.leaks else reserved(run, observation)
    calibration = Calibration(source=_source(observed), by="run", **beside)
    factor, error = common_factor(run, evidence, calibration, where)
    if not evidence.has_log and factor.is_applied:
        error = math.log(evidence.step_s / run.step_s(calibration))
        factor = factor.model_copy(update={"verdict": "refused", "reason": UNDER_PROFILER})
    calibration = calibration.model_copy(update={"kernels_factor": factor})
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


def _source(observed: Observed) -> str:
    plan = observed.plan
    observation = observed.observation
    assert plan is not None
    ran = f"{plan.model.name} on {plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}, {plan.runtime}"
    return f"observed run of {ran}, {plan.parallelism}, {observation.num_steps:,} steps"


def _poor(error: float, evidence: RunEvidence) -> Texts:
    if abs(error) <= POOR:
        return ()
    off = "longer" if error > 0 else "shorter"
    return (
        f"a poor fit: the run's step of {evidence.step_s:.4g} s is {abs(math.expm1(error)):.0%} {off} than the price "
        "with what it measured; intervals are wider by that",
    )
