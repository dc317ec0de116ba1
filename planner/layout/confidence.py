"""The risk of running out of memory: memory has a distribution, and a job ends when its fullest rank has no more.

The memory of a rank is lognormal, M·exp(σ·ε) with ε normal: errors of counted bytes multiply, as those of seconds do.
Its median is the total that the plan shows, and its 80% interval is that total times exp(±w), so σ = w / 1.2816. The
ranks of a job err together (they run one trainer), so the risk of the job is that of its fullest rank:

    P(out of memory) = P(M·exp(σ·ε) > capacity) = ½·erfc(ln(capacity / M) / (σ·√2))

As σ is the same for every layout of a job, a layout fits with a probability of at least 1 − risk exactly if its total
is at most capacity·exp(−z·σ), where z is the normal quantile of 1 − risk. So the rule is a headroom like any other, and
the search, its bounds and its integer programs see one smaller capacity.

80% intervals of step times, from the errors that calibration left; `risk` has those of memory.

An interval is [t·e⁻ʷ, t·eʷ], because errors of a model of speed multiply. The half-width w is the root of a sum of
squares, with one term per thing that was not measured. In four of five published runs of that kind the error is no
larger than the term (`plan validate`; each family is predicted by a fit without it: `tools/calibrate runs`); 90% of
the runs lie inside their intervals. Where no published run tells, the term is wide and its comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from planner.answer import SIGMAS_TO_END, Interval, PricedLayout, StagePlan
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.hardware import HardwareSpec
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
ROUTING_WIDTH = 0.30
"""Half-width per unit by which the fullest expert rank is taken to have more than the mean: it is seldom measured."""
SCAN_STEP_WIDTH, SPARSE_STEP_WIDTH = 0.25, 0.35
"""Half-widths that layers which scan, and layers that attend to chosen keys, add to a step: their kernels are priced
from the data sheet and the algorithm, and five published runs of one model have been held against it."""
TRACED_WIDTH = 0.15
"""Half-width that layers traced in eager torch add under a trainer that runs other kernels than torch's."""
VISION_WIDTH = 0.10
"""Half-width that a tower adds: no run of one was held against its price."""
HOST_WIDTH = 0.20
SAID_HOST_WIDTH = 0.15
TEXTS_WIDTH = 0.20
"""Half-widths per share of a layer's time that its host needs: hosts differ, unless someone says which one it is, one
host differs among layouts that keep it equally busy (vTrain's small models), and versions of Megatron rotate packed
texts in unlike ways (Moonlight's 22 texts a sequence take no longer than others' five)."""
OVERLAP_WIDTH = 0.20
DRIVEN_WIDTH = 0.30
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
        *(
            _of_mixture(pricing, ranks, layout.parallelism.ep)
            if is_mixture
            else (SCALE_WIDTH * _doublings(ranks, SCALE_KNOWN_RANKS),)
        ),
        NARROW_WIDTH.get(training.dtype, 0.0),
        SCAN_STEP_WIDTH if pricing.model.state_kinds else 0.0,
        SPARSE_STEP_WIDTH if pricing.model.indexer is not None else 0.0,
        TRACED_WIDTH if pricing.model.traced is not None and pricing.runtime.family != "torch-eager" else 0.0,
        VISION_WIDTH if pricing.model.vision is not None else 0.0,
        (SAID_HOST_WIDTH if hardware.host.kind else HOST_WIDTH) * host_fraction,
        TEXTS_WIDTH * host_fraction * bool(pricing.runtime.packs_documents),
        (DRIVEN_WIDTH if driven else OVERLAP_WIDTH) * exchanges_s / step_s,
    ]
    return math.hypot(*terms)


def _of_mixture(pricing: Pricing, num_ranks: int, ep: int) -> Iterator[float]:
    """The half-widths that experts add."""
    yield MOE_STEP_WIDTH if pricing.runtime.family in FITTED_TO_MIXTURES else MOE_UNFITTED_WIDTH
    yield ROUTING_WIDTH * (float(pricing.imbalance(ep)) - 1) * (ep > 1)
    yield MOE_SCALE_WIDTH * _doublings(num_ranks, MOE_KNOWN_RANKS)


def _doublings(num_ranks: int, known: int) -> float:
    return math.log2(max(1.0, num_ranks / known))


def hardware_width(hardware: HardwareSpec) -> float:
    """The part of the width that is due to the speed of kernels.

    A probe or a run that corrected or confirmed them decides it. One that found errors that it could not explain widens
    it.
    """
    evidence, by_probe = hardware.efficiency.evidence, hardware.efficiency.step_width
    known = STEP_WIDTH[evidence]
    if hardware.is_amd and evidence != "probed":
        known = max(AMD_STEP_WIDTH, known)
    if by_probe is None:
        return known
    return by_probe if evidence == "probed" else max(known, by_probe)


def _around(value: float, width: float) -> Interval:
    return value * math.exp(-width), value * math.exp(width)
