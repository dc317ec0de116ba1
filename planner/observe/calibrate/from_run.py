"""The calibration that an observed run gives: the numbers of a profile with which its priced step is the measured one.

Links come first, then kernels: by family where traces show them, else one factor on all of them by the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planner.layout.confidence import hardware_width
from planner.observe.calibrate.evidence import Evidence, evidence_of
from planner.observe.calibrate.host import host
from planner.observe.calibrate.kernels import calibrated_kernels, common_factor, family_factors
from planner.observe.calibrate.links import link_shares
from planner.observe.calibrate.memory import reserved, width
from planner.observe.calibrate.priced import PricedRun
from planner.observe.observation import Observed
from planner.observe.traces.recorded import ObservedFiles
from planner.observe.traces.results import HOST, RankReport
from planner.profile.probed.doubt import TRANSFER_WIDTH
from planner.specs.cluster import ClusterSpec
from planner.trainers.calibration import Calibration

ONE_RUN_WIDTH = 0.11
"""Half-width of another layout's step where one run's whole step set the speed of kernels: that run's own error comes
along. Of pairs of published runs of one source and one kind of GPU, four in five differ by no more, in the median of
43 sets (tools/score_history)."""
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
            "memory_width": width(run, None if evidence.leaks else observation)
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


def _poor(error: float, evidence: Evidence) -> tuple[str, ...]:
    if abs(error) <= POOR:
        return ()
    off = "longer" if error > 0 else "shorter"
    return (
        f"a poor fit: the run's step of {evidence.step_s:.4g} s is {abs(math.expm1(error)):.0%} {off} than the price "
        "with what it measured; intervals are wider by that",
    )
