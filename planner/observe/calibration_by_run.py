"""The calibration that an observed run gives: the numbers of a profile with which its priced step is the measured one.

Links come first, as the shares of their data-sheet rates that collectives reached; then kernels, by family where traces
show them, else by one factor on all of them by the step alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.confidence import hardware_width
from planner.layout.placement import groups_of
from planner.layout.risk import MEMORY_WIDTH
from planner.observe.observation import Link, Observation, Observed, ObservedMemory
from planner.observe.observed_run import STEP, PricedRun, RunEvidence, evidence_of, plausible_factors
from planner.observe.traces.collectives import bus_factor, collective_of
from planner.observe.traces.kernels_and_groups import NAMES, OTHER
from planner.observe.traces.recorded import ObservedFiles
from planner.observe.traces.results import HOST, RankReport, TraceStep
from planner.physics.communication import Kind, Places, collective_s, members_by_tier
from planner.physics.memory import communicators
from planner.physics.passes import lateness
from planner.profile.probed import (
    LEAST_LINK_SHARE,
    LEAST_SENSITIVE,
    MOST_LINK_SHARE,
    REPEATS,
    TAKEN,
    TRANSFER_WIDTH,
    Opinion,
    kernel_objection,
    opinion_of_context,
    opinion_of_fragmentation,
    opinion_of_host,
    opinion_of_link,
)
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.units import GIB, MIB
from planner.trainers.calibration import Calibration, Factor, Quantity, Share

COLLECTIVE_KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}  # fmt: skip
"""Collectives by their names in traces; what SendRecv kernels take holds waits, which nothing takes apart."""
LEAST_DECIDED = 0.5
"""Least change of a collective's seconds by a change of a link's rate, for them to tell that rate: else latency or
other links decide."""
LINK_STEP = 0.01


class TimedExchange(NamedTuple):
    """One kind of exchange with its seconds, in a group whose places are known."""

    group: str
    kind: Kind
    num_bytes: float
    seconds: float
    at_least: bool
    """True where the seconds hold waits, so that the link is at least as fast."""
    size: int
    places: Places


def link_shares(run: PricedRun, ranks: Sequence[RankReport], links: Sequence[Link]) -> dict[str, Share]:
    """For each tier that decides how long a collective takes, the share of its rate that the largest one reached.

    Tiers are taken innermost first: outer ones are told with the inner ones' measured shares.
    """
    timed = [*_of_traces(run, ranks), *_of_logs(run, links)]
    shares: dict[str, Share] = {}
    for level, tier in enumerate(run.cluster.tiers):
        cluster = Calibration(source="", efficiency_fraction=shares).of_cluster(run.cluster)
        told = defaultdict(list)
        for exchange in timed:
            if _outermost(exchange, cluster) == level and (share := _share(exchange, level, cluster)) is not None:
                told[exchange.num_bytes, exchange.kind, exchange.group].append((exchange, share))
        if told:
            shares[tier.name] = _judged(max(told.items(), key=lambda item: item[0][0])[1], tier.efficiency_fraction)
    return shares


def _judged(pairs: list[tuple[TimedExchange, float]], own: float) -> Share:
    """The share that the largest collective reached, as the median of its ranks."""
    exchange = pairs[0][0]
    share, values = median(value for _, value in pairs), [value for _, value in pairs]
    spread = (max(values) - min(values)) / 2 / share
    source = f"{exchange.kind.replace('_', '-')} of {exchange.num_bytes / MIB:.1f} MiB over {exchange.size} ranks"
    if exchange.at_least and share < own:
        reason = "its seconds hold waits for other ranks: traces of all of them would take these apart"
        return Share(value=min(1.0, share), source=source, verdict="refused", reason=reason)
    return Share(value=min(1.0, share), source=source, **opinion_of_link(share, own, spread))


def _of_traces(run: PricedRun, ranks: Sequence[RankReport]) -> Iterator[TimedExchange]:
    places = {group: (size, where) for group, size, where in _groups(run)}
    for rank in ranks:
        for timed in rank.collectives:
            known = places.get(timed.group)
            if (
                known is None
                or timed.collective not in COLLECTIVE_KINDS
                or not timed.num_bytes
                or timed.group_size != known[0]
            ):
                continue
            seconds = timed.median_s if timed.transfer_s is None else timed.transfer_s
            if seconds > 0:
                kind = COLLECTIVE_KINDS[timed.collective]
                yield TimedExchange(timed.group, kind, timed.num_bytes, seconds, timed.at_least, *known)


def _of_logs(run: PricedRun, links: Sequence[Link]) -> Iterator[TimedExchange]:
    """Collectives that a log times; it does not say the group, which is known where there is only one.
    A message may be one rank's part of the bytes, so that they follow from the rate that the log prints."""
    groups = list(_groups(run))
    if len(groups) != 1:
        return
    group, size, places = groups[0]
    for link in links:
        name = collective_of(link.op)
        if name in COLLECTIVE_KINDS and link.seconds > 0:
            num_bytes = link.bus_bytes_per_s * link.seconds / bus_factor(name, size)
            yield TimedExchange(group, COLLECTIVE_KINDS[name], num_bytes, link.seconds, True, size, places)


def _groups(run: PricedRun) -> Iterator[tuple[str, int, Places]]:
    """Name, ranks and places of the groups that run collectives."""
    for group, size, places in groups_of(run.candidate().shape):
        if size > 1 and group != "pp":
            yield group, size, places


def _outermost(exchange: TimedExchange, cluster: ClusterSpec) -> int:
    return [int(count) for count in members_by_tier(exchange.size, exchange.places, cluster.tiers)].index(exchange.size)


def _share(exchange: TimedExchange, level: int, cluster: ClusterSpec) -> float | None:
    """The share of a tier's rate with which a collective takes as long as it did, from half of LEAST_LINK_SHARE to
    twice MOST_LINK_SHARE; None where something else than the tier's rate decides."""
    low, high = math.log(LEAST_LINK_SHARE / 2), math.log(2 * MOST_LINK_SHARE)
    for _ in range(40):  # the seconds fall as the share grows
        middle = (low + high) / 2
        low, high = (middle, high) if _seconds(exchange, level, middle, cluster) > exchange.seconds else (low, middle)
    ends = (_seconds(exchange, level, middle + side, cluster) for side in (-LINK_STEP, LINK_STEP))
    slower_s, faster_s = ends
    return math.exp(middle) if math.log(slower_s / faster_s) / (2 * LINK_STEP) >= LEAST_DECIDED else None


def _seconds(exchange: TimedExchange, level: int, log_share: float, cluster: ClusterSpec) -> float:
    """Seconds of a collective where a tier reaches exp(log_share) of its rate."""
    tiers = list(cluster.tiers)
    factor = math.exp(log_share) / tiers[level].efficiency_fraction
    tiers[level] = tiers[level].model_copy(update={"gb_per_s": tiers[level].gb_per_s * factor})
    hardware = cluster.hardware.model_copy(update={"tiers": tuple(tiers), "gpus_per_node": cluster.node_size})
    changed = ClusterSpec(hardware=hardware, num_gpus=cluster.num_gpus)
    return float(collective_s(exchange.kind, exchange.num_bytes, exchange.size, exchange.places, changed))


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


def reserved(run: PricedRun, observation: Observation) -> dict[str, Any]:
    """The fields of a calibration for memory outside the allocator, and for what it holds beyond what is allocated."""
    fields = {"context_gib": _context(run, observation.memory), "fragmentation_fraction": _held(observation.memory)}
    return {name: number for name, number in fields.items() if number is not None}


def _held(memory: Sequence[ObservedMemory]) -> Share | None:
    ratios = [
        rank.max_reserved_bytes / rank.max_allocated_bytes - 1
        for rank in memory
        if rank.max_reserved_bytes and rank.max_allocated_bytes
    ]
    if not ratios:
        return None
    fraction = median(ratios)
    opinion = opinion_of_fragmentation(fraction)
    return Share(value=min(1.0, max(0.0, fraction)), source=_ranks(len(ratios)), **opinion)


def _context(run: PricedRun, memory: Sequence[ObservedMemory]) -> Quantity | None:
    """Memory in use on the device beyond the allocator's, less what communicators take."""
    outside = [
        rank.device_bytes - rank.max_reserved_bytes for rank in memory if rank.device_bytes and rank.max_reserved_bytes
    ]
    if not outside:
        return None
    hardware = run.cluster.hardware
    exchanged = float(communicators(run.candidate().shape)) * hardware.reserved.communicator_bytes
    context_gib = (median(outside) - exchanged) / GIB
    opinion = opinion_of_context(context_gib)
    return Quantity(value=max(0.0, context_gib), source=_ranks(len(outside)), **opinion)


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


MOST_SLOWED = 0.03
"""Largest share by which a step under the profiler may be longer than the log's for its gaps to be the host's own."""


def host(run: PricedRun, ranks: Sequence[RankReport], evidence: RunEvidence) -> Quantity | None:
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
            "memory_width": reserved_width(run, None if evidence.leaks else observation)
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


def _poor(error: float, evidence: RunEvidence) -> tuple[str, ...]:
    if abs(error) <= POOR:
        return ()
    off = "longer" if error > 0 else "shorter"
    return (
        f"a poor fit: the run's step of {evidence.step_s:.4g} s is {abs(math.expm1(error)):.0%} {off} than the price "
        "with what it measured; intervals are wider by that",
    )
