"""The risk of running out of memory: memory has a distribution, and a job ends when its fullest rank has no more.

The memory of a rank is lognormal, M·exp(σ·ε) with ε normal: errors of counted bytes multiply, as those of seconds do.
Its median is the total that the plan shows, and its 80% interval is that total times exp(±w), so σ = w / 1.2816. The
ranks of a job err together (they run one trainer), so the risk of the job is that of its fullest rank:

    P(out of memory) = P(M·exp(σ·ε) > capacity) = ½·erfc(ln(capacity / M) / (σ·√2))

As σ is the same for every layout of a job, a layout fits with a probability of at least 1 − risk exactly if its total
is at most capacity·exp(−z·σ), where z is the normal quantile of 1 − risk. So the rule is a headroom like any other, and
the search, its bounds and its integer programs see one smaller capacity.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from planner.answer import SIGMAS_TO_END, Interval, PricedLayout, StagePlan
from planner.physics.pricing import Pricing
from planner.specs.training import SearchLimits
from planner.specs.units import GIB

MEMORY_WIDTH = {"probed": 0.02, "measured": 0.04, "family": 0.06, "spec_sheet": 0.10}
"""Half-width for a rank's memory, by the knowledge of the GPU: the libraries' buffers differ, the counted bytes hardly.
What Megatron allocates is within 1.5% of the price in 54 of 55 published peaks of dense models and 4% in all 20 of
mixtures; the rest of the width is for what the driver and the allocator take beside it. A trainer whose allocator is
known less well adds a width of its own (`RuntimeSpec.memory_width`), and so does a GPU whose libraries are, or whose
probe found other bytes than those counted (`ReservedMemory.width`)."""
MOE_MEMORY_WIDTH = 0.06
"""Half-width that mixtures of experts add to memory: the busiest expert rank's tokens are not known before the run.
Published peaks of mixtures need no more than 0.04, but nearly all of them force balanced routing."""
SCAN_MEMORY_WIDTH = 0.08
"""Half-width that layers which scan add to memory: kernels differ in the states and gates that they keep."""


def memory_width(pricing: Pricing) -> float:
    """Half the width of a rank's memory interval, in natural logarithms."""
    hardware = pricing.cluster.hardware
    return math.hypot(
        MEMORY_WIDTH[hardware.efficiency.evidence],
        hardware.reserved.width,
        pricing.runtime.memory_width,
        MOE_MEMORY_WIDTH if pricing.model.moe is not None else 0.0,
        SCAN_MEMORY_WIDTH if pricing.model.state_kinds or pricing.model.indexer is not None else 0.0,
    )


def with_risk(pricing: Pricing, layout: PricedLayout) -> PricedLayout:
    """`layout` with an 80% interval on each stage's memory, and the probability that the fullest stage has too little.

    The probability is against the GPU's whole memory, whatever headroom a search left free.
    """
    width, capacity_bytes = memory_width(pricing), pricing.cluster.hardware.memory_bytes
    risk = oom_probability(layout.worst_stage.memory.total_bytes, capacity_bytes, width)
    stages = tuple(_with_interval(stage, width) for stage in layout.stages)
    return layout.model_copy(update={"stages": stages, "oom_probability": risk})


def oom_probability(total_bytes: float, capacity_bytes: float, width: float) -> float:
    """Probability that a rank which needs `total_bytes` in the median needs more than the capacity."""
    sigmas = math.log(capacity_bytes / total_bytes) / width * SIGMAS_TO_END
    return 0.5 * math.erfc(sigmas / math.sqrt(2))


def headroom_bytes(pricing: Pricing, limits: SearchLimits) -> float:
    """Bytes that a search leaves free on every GPU: those asked for, or as many as keep the risk below `oom_risk`."""
    if limits.memory_headroom_gib is not None:
        return limits.memory_headroom_gib * GIB
    # the quantile of 1 − risk, which would be that of 1 where the risk is tiny
    margin = -NormalDist().inv_cdf(limits.oom_risk) / SIGMAS_TO_END * memory_width(pricing)
    # above a risk of one half the median may exceed the capacity; what is chosen has to fit all the same
    return max(0.0, -math.expm1(-margin)) * pricing.cluster.hardware.memory_bytes


def _with_interval(stage: StagePlan, width: float) -> StagePlan:
    interval: Interval = (stage.memory.total_bytes * math.exp(-width), stage.memory.total_bytes * math.exp(width))
    return stage.model_copy(update={"memory": stage.memory.model_copy(update={"total_bytes_interval": interval})})
