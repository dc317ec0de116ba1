"""How sure a number is: 80% intervals from what the calibration behind it left unexplained.

An interval is [t·e⁻ʷ, t·eʷ]: errors of a model of speed multiply. The half-width w is the root of a sum of squares, one
term per thing that was not measured. Each term is what the published runs of that kind (`plan validate`, each family
predicted by a fit without it: `scripts/calibrate runs`) miss by in four of five cases; 90% of them lie inside.
Where no run tells, a term is set wide and says so.
"""

from __future__ import annotations

import math

from planner.answer import Interval, PricedLayout, StagePlan
from planner.physics.pricing import Pricing
from planner.shape import Shape

STEP_WIDTH = {"probed": 0.05, "measured": 0.09, "family": 0.095, "spec_sheet": 0.28}
"""Of a dense model's step, by what is known of the GPU. Of MI300X, known by its data sheet alone, four published runs
were predicted 27 to 36% too fast; they set its level since, and the width for others like it."""
MEMORY_WIDTH = {"probed": 0.02, "measured": 0.04, "family": 0.06, "spec_sheet": 0.10}
"""Of a rank's memory: the allocator's slack and the libraries' buffers differ; counted bytes hardly do."""

MOE_STEP_WIDTH = 0.09
"""Routing, grouped products of small experts and the host's time: what mixtures of experts add to a step's error."""
MOE_MEMORY_WIDTH = 0.06
"""The busiest expert rank's tokens are not known before the run."""
HOST_WIDTH = 0.20
"""Of the share of a layer's time that its host needs: hosts differ, and the same one does among layouts that keep it
equally busy (vTrain's small models)."""
OVERLAP_WIDTH = 0.20
"""Of the share of the step that exchanges take: how much of them hides differs between versions of a trainer."""
SCALE_WIDTH, SCALE_KNOWN_RANKS = 0.03, 4096
"""Per doubling of ranks beyond those that the published runs reach in numbers: stragglers, congestion."""


def with_intervals(pricing: Pricing, layout: PricedLayout, shape: Shape) -> PricedLayout:
    """`layout`, of `shape`, with an 80% interval on its step time and on each stage's memory."""
    width = step_width(pricing, layout, pricing.host_fraction(shape))
    step = layout.step.model_copy(update={"step_s_interval": _around(layout.step.step_s, width)})
    width = memory_width(pricing)
    stages = tuple(_stage_with_interval(stage, width) for stage in layout.stages)
    return layout.model_copy(update={"step": step, "stages": stages})


def step_width(pricing: Pricing, layout: PricedLayout, host_fraction: float) -> float:
    """Half the width of a step's interval, in natural logarithms."""
    parts, step_s = layout.step.breakdown, layout.step.step_s
    exchanges_s = parts.tp_comm_s + parts.cp_comm_s + parts.ep_comm_s + parts.pp_comm_s + parts.exposed_dp_s
    doublings = math.log2(max(1.0, layout.parallelism.num_gpus_used / SCALE_KNOWN_RANKS))
    terms = [
        STEP_WIDTH[pricing.cluster.hardware.efficiency.evidence],
        MOE_STEP_WIDTH if pricing.model.moe is not None else 0.0,
        HOST_WIDTH * host_fraction,
        OVERLAP_WIDTH * exchanges_s / step_s,
        SCALE_WIDTH * doublings,
    ]
    return math.hypot(*terms)


def memory_width(pricing: Pricing) -> float:
    """Half the width of a rank's memory interval, in natural logarithms."""
    known = MEMORY_WIDTH[pricing.cluster.hardware.efficiency.evidence]
    return math.hypot(known, MOE_MEMORY_WIDTH if pricing.model.moe is not None else 0.0)


def _stage_with_interval(stage: StagePlan, width: float) -> StagePlan:
    memory = stage.memory.model_copy(update={"total_bytes_interval": _around(stage.memory.total_bytes, width)})
    return stage.model_copy(update={"memory": memory})


def _around(value: float, width: float) -> Interval:
    return value * math.exp(-width), value * math.exp(width)
