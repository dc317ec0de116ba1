"""80% intervals of step times, from the errors that calibration left; `risk` has those of memory.

An interval is [t·e⁻ʷ, t·eʷ], because errors of a model of speed multiply. The half-width w is the root of a sum of
squares, with one term per thing that was not measured. In four of five published runs of that kind the error is no
larger than the term (`plan validate`; each family is predicted by a fit without it: `tools/calibrate runs`); 90% of
the runs lie inside their intervals. Where no published run tells, the term is wide and its comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.answer import Interval, PricedLayout
from planner.layout.risk import with_risk
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.hardware import HardwareSpec

STEP_WIDTH = {"probed": 0.09, "measured": 0.09, "family": 0.095, "spec_sheet": 0.28}
"""Half-width for a dense model's step, by the knowledge of the GPU. Four published runs on MI300X, when only its data
sheet was known, were predicted 27 to 36% too fast. They set its speed since then, and the width for GPUs like it. A
probe's own residuals say how wide it is (`Efficiency.step_width`); one that does not say is worth a measurement."""
AMD_STEP_WIDTH = 0.22
"""Half-width for a dense model's step on AMD's GPUs, however well kernels are known, unless a probe or a run timed the
software too: its generations span more than kernels do. 54 of 59 published runs lie inside theirs (docs/AMD.md)."""
MOE_STEP_WIDTH = 0.09
"""Half-width that mixtures of experts add to a step: routing, grouped products of small experts, the host's time."""
FITTED_TO_MIXTURES = ("megatron", "primus-megatron")
"""Trainers of whose mixtures many runs were published."""
MOE_UNFITTED_WIDTH = 0.16
"""The same under a trainer to whose mixtures nothing was fitted: all but Megatron and Primus' kind of it."""
ROUTING_WIDTH = 0.20
"""Half-width per unit by which the fullest expert rank is taken to have more than the mean: it is seldom measured."""
SCAN_STEP_WIDTH, SPARSE_STEP_WIDTH = 0.25, 0.35
"""Half-widths that layers which scan, and layers that attend to chosen keys, add to a step: their kernels are priced
from the data sheet and the algorithm, and five published runs of one model have been held against it."""
HOST_WIDTH, SAID_HOST_WIDTH = 0.20, 0.15
"""Half-widths per share of a layer's time that its host needs: hosts differ, unless someone says which one it is, and
one host differs among layouts that keep it equally busy (vTrain's small models)."""
OVERLAP_WIDTH, DRIVEN_WIDTH = 0.20, 0.30
"""Half-widths per share of the step that exchanges take: versions of a trainer hide different shares of them, and on a
network that the host drives two jobs were published."""
NARROW_WIDTH = {"nvfp4": 0.06}
"""Half-widths of dtypes of which few runs were published."""
SCALE_WIDTH, SCALE_KNOWN_RANKS = 0.03, 4096
"""Half-width per doubling of ranks beyond 4096, up to which there are many published runs: stragglers, congestion."""
MOE_SCALE_WIDTH, MOE_KNOWN_RANKS = 0.06, 512
"""The same for mixtures: DeepSeek-V3 on GB200 drifts from the prediction by 7 points a doubling (MLPerf v6.0)."""


def with_intervals(pricing: Pricing, layout: PricedLayout, shape: Shape) -> PricedLayout:
    """`layout`, of `shape`, with an 80% interval on its step time, and all that is said of its memory's risk."""
    width = step_width(pricing, layout, pricing.host_fraction(shape))
    step = layout.step.model_copy(update={"step_s_interval": _around(layout.step.step_s, width)})
    return with_risk(pricing, layout.model_copy(update={"step": step}))


def step_width(pricing: Pricing, layout: PricedLayout, host_fraction: float) -> float:
    """Half the width of a step's interval, in natural logarithms."""
    parts, step_s = layout.step.breakdown, layout.step.step_s
    exchanges_s = parts.tp_comm_s + parts.cp_comm_s + parts.ep_comm_s + parts.pp_comm_s + parts.exposed_dp_s
    hardware, training = pricing.cluster.hardware, pricing.training
    is_mixture, ranks = pricing.model.moe is not None, layout.parallelism.num_gpus_used
    driven = pricing.cluster.tiers[-1].is_host_driven
    terms = [
        hardware_width(hardware),
        pricing.runtime.step_width,
        *(_of_mixture(pricing, ranks) if is_mixture else (SCALE_WIDTH * _doublings(ranks, SCALE_KNOWN_RANKS),)),
        NARROW_WIDTH.get(training.dtype, 0.0),
        SCAN_STEP_WIDTH if pricing.model.state_kinds else 0.0,
        SPARSE_STEP_WIDTH if pricing.model.indexer is not None else 0.0,
        (SAID_HOST_WIDTH if hardware.host.kind else HOST_WIDTH) * host_fraction,
        (DRIVEN_WIDTH if driven else OVERLAP_WIDTH) * exchanges_s / step_s,
    ]
    return math.hypot(*terms)


def _of_mixture(pricing: Pricing, num_ranks: int) -> Iterator[float]:
    """The half-widths that experts add."""
    yield MOE_STEP_WIDTH if pricing.runtime.family in FITTED_TO_MIXTURES else MOE_UNFITTED_WIDTH
    yield ROUTING_WIDTH * (pricing.training.moe_imbalance - 1)
    yield MOE_SCALE_WIDTH * _doublings(num_ranks, MOE_KNOWN_RANKS)


def _doublings(num_ranks: int, known: int) -> float:
    return math.log2(max(1.0, num_ranks / known))


def hardware_width(hardware: HardwareSpec) -> float:
    """The part of the width that is due to the speed of kernels.

    A probe or a run that corrected or confirmed them decides it. One that found errors that it could not explain widens
    it.
    """
    evidence, by_probe = hardware.efficiency.evidence, hardware.efficiency.step_width
    known = AMD_STEP_WIDTH if hardware.is_amd and evidence != "probed" else STEP_WIDTH[evidence]
    if by_probe is None:
        return known
    return by_probe if evidence == "probed" else max(known, by_probe)


def _around(value: float, width: float) -> Interval:
    return value * math.exp(-width), value * math.exp(width)
