"""How sure a price is: the risk of running out of memory, and the 80% interval of a step.

The memory of a rank is lognormal, M·exp(σ·ε) with ε normal: errors of counted bytes multiply, as those of seconds do.
Its median is the total that the plan shows, and its 80% interval is that total times exp(±w), so σ = w / 1.2816. The
ranks of a job err together (they run one trainer), so the risk of the job is that of its fullest rank:

    P(out of memory) = P(M·exp(σ·ε) > capacity) = ½·erfc(ln(capacity / M) / (σ·√2))

As σ is the same for every layout of a job, a layout fits with a probability of at least 1 − risk exactly if its total
is at most capacity·exp(−z·σ), where z is the normal quantile of 1 − risk. So the rule is a headroom like any other, and
the search, its bounds and its integer programs see one smaller capacity.

The interval of a step is [t·e⁻ʷ, t·eʷ]. Its half-width w is the root of a sum of squares, with one term per thing that
was not measured. In four of five published runs of that kind the error is no larger than the term (`plan validate`;
each family is predicted by a fit without it: `tools/calibrate runs`); 90% of the runs lie inside their intervals. Where
no published run tells, the term is wide and its comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType

from planner.answer import SIGMAS_TO_END, DecidingFact, Interval, PricedLayout, StagePlan
from planner.physics.operators import NARROW_BYTES
from planner.physics.pricing import Pricing
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
TUNED_MEMORY_WIDTH = 0.28
"""The same, in place of it, of mixtures that are fine-tuned: ten peaks of ms-swift miss by up to 15%, but for two of 20
and 34%, and one of Primus by 18."""
NARROW_MEMORY_WIDTH = 0.06
"""Half-width that products in 8 or 4 bits add to memory: what they keep beside and instead of 16 bits differs."""
SCAN_MEMORY_WIDTH = 0.08
"""Half-width that layers which scan add to memory: kernels differ in the states and gates that they keep."""
OWN_MEMORY_WIDTH = 0.30
"""Half-width that a trainer adds which a user describes: what it keeps beside what its file says. Of 33 published peaks
of two such (Kempner's and prime-rl's, `tools/accuracy/data/finetunes.jsonl`) four in five miss by less than 36%."""
CACHED_WIDTH = 0.25
"""Half-width that the upper end alone has besides, up to the whole GPU: blocks that the allocator keeps while nobody
needs them, which nvidia-smi shows and no risk counts."""


def memory_width(pricing: Pricing) -> float:
    """Half the width of a rank's memory interval, in natural logarithms."""
    hardware = pricing.cluster.hardware
    return math.hypot(
        MEMORY_WIDTH[hardware.efficiency.evidence],
        hardware.reserved.width,
        pricing.runtime.memory_width,
        OWN_MEMORY_WIDTH * pricing.runtime.is_unmeasured_on(hardware),
        0.0 if pricing.model.moe is None else TUNED_MEMORY_WIDTH if pricing.training.moe_spread else MOE_MEMORY_WIDTH,
        NARROW_MEMORY_WIDTH if pricing.training.dtype in NARROW_BYTES else 0.0,
        SCAN_MEMORY_WIDTH if pricing.model.state_kinds or pricing.model.indexer is not None else 0.0,
    )


def with_risk(pricing: Pricing, layout: PricedLayout) -> PricedLayout:
    """`layout` with an 80% interval on each stage's memory, and the probability that the fullest stage has too little.

    The probability is against the GPU's whole memory, whatever headroom a search left free.
    """
    hardware, width = pricing.cluster.hardware, memory_width(pricing)
    risk = oom_probability(layout.worst_stage.memory.total_bytes, hardware.memory_bytes, width)
    is_measured = (
        math.hypot(MEMORY_WIDTH[hardware.efficiency.evidence], hardware.reserved.width) < MEMORY_WIDTH["measured"]
    )
    cached = width if is_measured else math.hypot(width, CACHED_WIDTH)
    stages = tuple(_with_memory(stage, width, cached, hardware.memory_bytes) for stage in layout.stages)
    return layout.model_copy(update={"stages": stages, "oom_probability": risk})


def with_other_memory(
    layout: PricedLayout, totals_bytes: Sequence[float], pricing: Pricing, fraction: float
) -> PricedLayout:
    """`layout` with memory that may as well be that of another pricing, which a fraction of runs have."""
    width, stages = memory_width(pricing), []
    for stage, total_bytes in zip(layout.stages, totals_bytes, strict=True):
        low, high = stage.memory.total_bytes_interval or (stage.memory.total_bytes,) * 2
        stages.append(_with_interval(stage, low, max(high, total_bytes * math.exp(width))))
    risk = oom_probability(max(totals_bytes), pricing.cluster.hardware.memory_bytes, width)
    risk = (1 - fraction) * (layout.oom_probability or 0.0) + fraction * risk
    return layout.model_copy(update={"stages": tuple(stages), "oom_probability": risk})


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


def _with_memory(stage: StagePlan, width: float, cached: float, capacity_bytes: float) -> StagePlan:
    total_bytes = stage.memory.total_bytes
    low, high = _around(total_bytes, width)
    return _with_interval(stage, low, max(high, min(total_bytes * math.exp(cached), capacity_bytes)))


def _with_interval(stage: StagePlan, low: float, high: float) -> StagePlan:
    memory = stage.memory.model_copy(update={"total_bytes_interval": (low, high)})
    return stage.model_copy(update={"memory": memory})


STEP_WIDTH = {"probed": 0.085, "measured": 0.085, "family": 0.09, "spec_sheet": 0.28}
"""Half-width for a dense model's step, by the knowledge of the GPU. Four published runs on MI300X, when only its data
sheet was known, were predicted 27 to 36% too fast. They set its speed since then, and the width for GPUs like it. A
probe's own residuals say how wide it is (`Efficiency.step_width`); one that does not say is worth a measurement."""
AMD_STEP_WIDTH = 0.20
"""Half-width for a dense model's step on AMD's GPUs, however well kernels are known, unless a probe or a run timed the
software too: its generations span more than kernels do. 54 of 59 published runs lie inside theirs (docs/AMD.md)."""
OWN_TRAINER_WIDTH = 0.20
"""Half-width that a trainer adds which a user describes, beside that of the one it is based on: four in five of 27
published steps of two such miss by less than 27%."""
MOE_STEP_WIDTH = 0.11
"""Half-width that mixtures of experts add to a step: routing, grouped products of small experts, the host's time. With
0.08 67 of 93 were inside that were predicted before they were added."""
FITTED_TO_MIXTURES = ("megatron", "primus-megatron")
"""Trainers of whose mixtures many runs were published."""
MOE_UNFITTED_WIDTH = 0.16
"""The same under a trainer to whose mixtures nothing was fitted: all but Megatron and Primus' kind of it."""
ROUTING_WIDTH = 0.30
"""Half-width per unit by which the fullest expert rank is taken to have more than the mean: it is seldom measured."""
SCAN_STEP_WIDTH, DELTA_STEP_WIDTH, SPARSE_STEP_WIDTH = 0.15, 0.3, 0.35
"""Half-widths that layers which scan, delta nets among them, and layers that attend to chosen keys add to a step: their
kernels are priced from the data sheet and the algorithm. 50 published runs of Nemotron 3 lie within 24%, 11 of Qwen3.5
at 128k miss by 16 to 62."""
LATENT_WIDTH = 0.25
"""Half-width where no kernel is tuned for the keys of latent attention: torchtitan's runs ask for 7 to 16 times."""
TRACED_WIDTH = 0.15
"""Half-width that layers traced in eager torch add under a trainer that runs other kernels than torch's."""
VISION_WIDTH = 0.10
"""Half-width that a tower adds: no run of one was held against its price."""
HOST_WIDTH = 0.19
SAID_HOST_WIDTH = 0.15
TEXTS_WIDTH = 0.20
"""Half-widths per share of a layer's time that its host needs: hosts differ, unless someone says which one it is, one
host differs among layouts that keep it equally busy (vTrain's small models), and versions of Megatron rotate packed
texts in unlike ways (Moonlight's 22 texts a sequence take no longer than others' five)."""
TUNED_WIDTH = 0.35
"""Half-width of a mixture that is fine-tuned: how its texts spread over experts is known of no job before it runs.
Twelve published runs (Bridge's cards, Primus, ms-swift) miss by 3 to 53%, four in five of them by less than 40%."""
OVERLAP_WIDTH = 0.20
DRIVEN_WIDTH = 0.30
"""Half-widths per share of the step that exchanges take, those of data parallelism also where they hide: versions of a
trainer hide different shares of them. Of 105 published runs with more than 35% of a step hidden, 98 are within, and
90 without this. On a network that the host drives 51 runs of five jobs were published; 18 of the 22 that
nothing was read from are within."""
NARROW_WIDTH = {"nvfp4": 0.06}
"""Half-widths of dtypes of which few runs were published."""
SCALE_WIDTH, SCALE_KNOWN_RANKS = 0.03, 4096
"""Half-width per doubling of ranks beyond 4096, up to which there are many published runs: stragglers, congestion."""
MOE_SCALE_WIDTH, MOE_KNOWN_RANKS = 0.09, 512
"""The same for mixtures: DeepSeek-V3 on GB200 drifts from the prediction by 7 to 12 points a doubling (MLPerf v6.0), on
GB300 by none, with the same software."""


def with_intervals(pricing: Pricing, layout: PricedLayout, host_fraction: float, hidden_s: float) -> PricedLayout:
    """`layout` with an 80% interval on its step time, and all that is said of its memory's risk."""
    terms = width_terms(pricing, layout, host_fraction, hidden_s)
    step = layout.step.model_copy(update={"step_s_interval": _around(layout.step.step_s, math.hypot(*terms.values()))})
    layout = layout.model_copy(update={"step": step, "deciding_fact": deciding_fact(terms)})
    return with_risk(pricing, layout)


def width_terms(
    pricing: Pricing, layout: PricedLayout, host_fraction: float, hidden_s: float = 0.0
) -> dict[str, float]:
    """Half-widths of a step's interval, in natural logarithms, by what is not known.

    `hidden_s` are seconds of data-parallel exchanges that compute is taken to hide.
    """
    parts, step_s = layout.step.breakdown, layout.step.step_s
    exchanges_s = parts.tp_comm_s + parts.cp_comm_s + parts.ep_comm_s + parts.pp_comm_s + parts.exposed_dp_s + hidden_s
    hardware, model, runtime, training = pricing.cluster.hardware, pricing.model, pricing.runtime, pricing.training
    ranks, ep = layout.parallelism.num_gpus_used, layout.parallelism.ep
    exchange_width = DRIVEN_WIDTH if pricing.cluster.tiers[-1].is_host_driven else OVERLAP_WIDTH
    terms = {
        "kernels": hardware_width(hardware),
        "trainer": math.hypot(runtime.step_width, OWN_TRAINER_WIDTH * runtime.is_unmeasured_on(hardware)),
        "layers": math.hypot(
            0.0 if not model.state_kinds else SCAN_STEP_WIDTH if model.linear_attention is None else DELTA_STEP_WIDTH,
            SPARSE_STEP_WIDTH if model.indexer is not None else 0.0,
            TRACED_WIDTH if model.traced is not None and runtime.family != "torch-eager" else 0.0,
            VISION_WIDTH if model.vision is not None else 0.0,
            LATENT_WIDTH if model.mla is not None and runtime.latent_attention_tflops else 0.0,
        ),
        "dtype": NARROW_WIDTH.get(training.dtype, 0.0),
        "host": (SAID_HOST_WIDTH if hardware.host.kind else HOST_WIDTH) * host_fraction,
        "texts": TEXTS_WIDTH * host_fraction * bool(runtime.packs_documents),
        "exchanges": exchange_width * exchanges_s / step_s,
        "scale": SCALE_WIDTH * _doublings(ranks, SCALE_KNOWN_RANKS),
    }
    if model.moe is None:
        return terms
    return terms | {
        "experts": MOE_STEP_WIDTH if runtime.family in FITTED_TO_MIXTURES else MOE_UNFITTED_WIDTH,
        "routing": max(ROUTING_WIDTH * (float(pricing.imbalance(ep)) - 1), TUNED_WIDTH * (training.moe_spread > 0))
        * (ep > 1),
        "scale": MOE_SCALE_WIDTH * _doublings(ranks, MOE_KNOWN_RANKS),
    }


def _doublings(num_ranks: int, known: int) -> float:
    return math.log2(max(1.0, num_ranks / known))


DEVIATIONS = 1.645
"""Standard deviations in a half-width of `confidence`: 90% of published runs that say their switches are within one."""
TAIL = 0.07
"""Share of the mixture that lies beyond each end: less than a tenth, as shares of values are guesses (of mixtures
without their switches 76% are inside; at a tenth 73%)."""
_STEPS = 30
"""Halvings of the bracket in which a quantile is looked for: 1e-9 of it are left."""


Choice = tuple[float, float, float]
"""Another value of what is not said: its effect (log of its step over this one), the share of runs that have it, and by
how much the square of the half-width is larger with it."""


def mixture_interval(width: float, choices: Mapping[str, Sequence[Choice]]) -> Interval:
    """The ends of the interval around a step, as natural logarithms of their ratio to it.

    `width` is the half-width where all is said. `choices` has the other values of each switch that is not.
    """
    mixture: list[Choice] = [(0.0, 1.0, width**2)]
    for others in choices.values():
        own = (0.0, 1 - sum(fraction for _, fraction, _ in others), 0.0)
        mixture = [(log + by, p * q, w + more) for log, p, w in mixture for by, q, more in (own, *others)]
    spreads = [math.sqrt(2 * square) / DEVIATIONS for _, _, square in mixture]
    margin = 2 * max(spreads)

    def below(log: float) -> float:
        return sum(p * math.erfc((c - log) / spread) for (c, p, _), spread in zip(mixture, spreads, strict=True)) / 2

    def quantile(fraction: float) -> float:
        low, high = min(mixture)[0] - margin, max(mixture)[0] + margin
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle) < fraction else (low, middle)
        return high

    return min(-width, quantile(TAIL)), max(width, quantile(1 - TAIL))


WIDE = math.log(1.4)
"""Half-width from which an interval is called wide, and what would narrow it is named."""
_MEASURED = "plan probe"
FACTS = {
    "kernels": ("how fast its kernels are on this GPU", "plan profile"),
    "trainer": ("a measured step of this trainer", _MEASURED),
    "layers": ("a measured step of such layers", _MEASURED),
    "dtype": ("a measured step in its dtype", _MEASURED),
    "host": ("the CPU", "--host"),
    "texts": ("a measured step of packed texts", _MEASURED),
    "exchanges": ("a measured step over this network", _MEASURED),
    "scale": ("a measured step on as many GPUs", _MEASURED),
    "experts": ("a measured step of a mixture", _MEASURED),
    "routing": ("how uneven the experts are", "--moe-imbalance"),
    "document_lengths": ("how long the packed texts are", "document_lengths"),
}
"""Facts that are not known, by the names of `width_terms`, and the option or command that says each."""
OWN_STEP = "a measured step of this job"
"""The fact that leaves of an interval what a probe leaves, whatever widens it."""


def deciding_fact(
    terms: Mapping[str, float], choices: Mapping[str, Sequence[Choice]] = MappingProxyType({})
) -> DecidingFact | None:
    """The one fact that would narrow a wide interval most, or a run of the job itself where none would halve it.

    None where the interval is not wide.
    """

    def spread(left_out: str = "") -> float:
        width = math.hypot(*(term for name, term in terms.items() if name != left_out))
        low, high = mixture_interval(width, {name: others for name, others in choices.items() if name != left_out})
        return (high - low) / 2

    if (now := spread()) <= WIDE:
        return None
    known = {name: spread(name) for name in (*terms, *choices)}
    best = min(known, key=lambda name: known[name])
    if known[best] > now / 2:
        return DecidingFact(fact=OWN_STEP, option="plan next", half_width=now, known_half_width=STEP_WIDTH["probed"])
    fact, option = FACTS.get(best, (f"which {best} it has", f"--switch {best}=…"))
    return DecidingFact(fact=fact, option=option, half_width=now, known_half_width=known[best])


def hardware_width(hardware: HardwareSpec) -> float:
    """The part of the width that is due to the speed of kernels.

    A probe or a run that corrected or confirmed them decides it. One that found errors that it could not explain widens
    it.
    """
    evidence, by_probe = hardware.efficiency.evidence, hardware.efficiency.step_width
    if evidence == "probed":
        return STEP_WIDTH[evidence] if by_probe is None else by_probe
    return max(STEP_WIDTH[evidence], AMD_STEP_WIDTH * hardware.is_amd, by_probe or 0.0)


def _around(value: float, width: float) -> Interval:
    return value * math.exp(-width), value * math.exp(width)
