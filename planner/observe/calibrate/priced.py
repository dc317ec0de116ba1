"""The price of an observed run's layout on a cluster whose numbers may be changed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.replan import reprice
from planner.profile.probed.plausible import MOST_FACTOR, least_factor
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.trainers.calibration import Calibration, Factor

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
        low, high = self.with_kernels(-STEP, calibration), self.with_kernels(STEP, calibration)
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
                high, above, below = middle, at, below / 2
            else:
                low, below, above = middle, at, above / 2
        return middle
