"""The host's time per micro-batch that no kernel hides, by the gaps of traces."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from planner.observe.calibrate.evidence import Evidence
from planner.observe.calibrate.priced import PricedRun
from planner.observe.traces.results import RankReport
from planner.profile.probed.plausible import Opinion, opinion_of_host
from planner.specs.cluster import ClusterSpec
from planner.trainers.calibration import Quantity

MOST_SLOWED = 0.03
"""Largest share by which a step under the profiler may be longer than the log's for its gaps to be the host's own."""


def host(run: PricedRun, ranks: Sequence[RankReport], evidence: Evidence) -> Quantity | None:
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
