"""The calibration that a probe gives: a few factors that explain its measurements of its own model in eager torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from planner.errors import SpecError
from planner.physics.communication import Kind, joined_fraction, members_by_tier, waits_s
from planner.probe.evidence import expected_kernels, in_words, require_speed, seen_kernels, unpriced
from planner.probe.result import ProbedExchange, ProbeResult, RankResult, stride_of
from planner.probe.run import num_communicators
from planner.probe.run_price import chunk_costs
from planner.profile.fitting import BenchNumbers, FitProblem, fit, number_at
from planner.profile.probed import (
    MOST_LINK_SHARE,
    NORMAL_80,
    Doubt,
    context_of,
    doubt,
    fragmentation_of,
    host_of,
    kernel_objection,
    least_factor,
    opinion_of_link,
)
from planner.shape import FloatArray
from planner.specs.base import Fields, Texts, grouped
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.units import GB, MIB
from planner.trainers.calibration import Calibration, Factor, Quantity, Share

MOST_LATENCY_FRACTION = 0.5
"""Largest share of an exchange's seconds that may be latency; else it says nothing about bandwidth."""


def link_shares(result: ProbeResult, cluster: ClusterSpec) -> dict[str, Share]:
    """For each tier that alone carried an exchange, the share of its rate that the largest such exchange reached."""
    run = result.run
    shares_by_tier = dict[int, list[tuple[ProbedExchange, float]]]()
    for exchange in (exchange for rank in result.ranks for exchange in rank.exchanges):
        stride = stride_of(exchange, run)
        level = None if stride is None else _tier_alone(exchange.size, stride, cluster)
        if level is None:
            continue
        share = _share_of_rate(exchange, level, cluster)
        if share is not None:
            shares_by_tier.setdefault(level, []).append((exchange, share))
    return {cluster.tiers[level].name: _of_largest(pairs, level, cluster) for level, pairs in shares_by_tier.items()}


def _of_largest(pairs: list[tuple[ProbedExchange, float]], level: int, cluster: ClusterSpec) -> Share:
    """The share that the largest exchange reached, as the median of its ranks."""
    largest = max(pairs, key=lambda pair: pair[0].num_bytes)[0]
    same = [pair for pair in pairs if (pair[0].name, pair[0].size) == (largest.name, largest.size)]
    share = median(share for _, share in same)
    spread = median(exchange.spread_fraction or 0.0 for exchange, _ in same)
    source = f"{largest.name} of {largest.num_bytes / MIB:.1f} MiB over {largest.size} ranks"
    if spread:
        source += f", its seconds known to {spread:.1%}"
    if 1 < share <= MOST_LINK_SHARE:
        source += f", {share:.1%} taken as all"
    opinion = opinion_of_link(share, cluster.tiers[level].efficiency_fraction, spread)
    return Share(value=min(1.0, share), source=source, **opinion)


def _tier_alone(size: int, stride: int, cluster: ClusterSpec) -> int | None:
    """The tier that joins all ranks of a group, if no lower tier joins any two of them."""
    members = [int(count) for count in members_by_tier(size, stride, cluster.tiers)]
    level = members.index(size)
    return level if size > 1 and (level == 0 or members[level - 1] == 1) else None


def _share_of_rate(exchange: ProbedExchange, level: int, cluster: ClusterSpec) -> float | None:
    """Share of the tier's rate that an exchange reached, without latency; None where most of its seconds are
    latency."""
    tier = cluster.tiers[level]
    kind: Kind = "all_reduce" if exchange.name.endswith("all-reduce") else "all_gather"
    latency_s = float(waits_s(kind, exchange.size, 1, exchange.size, tier, level == 0))
    if latency_s > MOST_LATENCY_FRACTION * exchange.seconds:
        return None
    moved = exchange.bus_gb_per_s * GB * exchange.seconds
    rate = tier.gb_per_s * GB / tier.oversubscription * float(joined_fraction(tier, exchange.size))
    return moved / (exchange.seconds - latency_s) / rate


COUNTED = ("static memory", "peak allocated")
"""Bytes that the planner counts, and that a probe compares."""


def reserved(result: ProbeResult, hardware: HardwareSpec) -> Fields:
    """The fields of a calibration for memory that no tensor holds: in use on the device outside the allocator's blocks,
    less that of the communicators that a rank made; and the allocator's blocks beyond what was allocated."""
    memories = [rank.memory for rank in result.ranks if rank.memory is not None]
    if not memories:
        return {}
    alone = result.mode == "stages"
    each_bytes = hardware.reserved.communicator_bytes
    of_stage = [0] * result.run.pp if alone else num_communicators(result.run)
    made = [of_stage[rank.stage] for rank in result.ranks if rank.memory is not None]
    outside = [
        memory.device_used_bytes - memory.peak_reserved_bytes - count * each_bytes
        for memory, count in zip(memories, made, strict=True)
    ]
    source = f"{len(memories)} ranks"
    context = context_of(outside, source)
    held = fragmentation_of(((one.peak_reserved_bytes, one.peak_allocated_bytes) for one in memories), source)
    width = _width(result) if context.is_applied and held.is_applied else None
    return {"context_gib": context, "fragmentation_fraction": held, "memory_width": width}


def _width(result: ProbeResult) -> float | None:
    """Half-width of a rank's memory by the errors of the bytes that were counted; None where the probe judged none."""
    errors = [
        math.log(compared.measured / compared.predicted)
        for compared in result.comparisons
        if compared.name in COUNTED and compared.agrees is not None and min(compared.measured, compared.predicted) > 0
    ]
    return NORMAL_80 * math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else None


def host(ranks: Sequence[RankResult]) -> Quantity:
    """The host's seconds per micro-batch: time between actions in which a rank neither computed nor waited."""
    seconds_by_rank = []
    for rank in ranks:
        gaps = [after.ready_s - before.end_s for before, after in zip(rank.actions, rank.actions[1:], strict=False)]
        forwards = sum("F" in timed.action for timed in rank.actions)
        seconds_by_rank.append(sum(max(0.0, gap) for gap in gaps) / max(1, forwards))
    return host_of(median(seconds_by_rank), f"between the actions of {len(ranks)} ranks")


RANGE = 20.0
"""The largest factor that is tried. Few of these are plausible."""
TOGETHER = 0.4
"""Weight of the difference between factors; a measured pass has weight 1. Factors that the passes cannot tell apart
move together. Of weights from 0.05 to 3, those from 0.2 on predict H200 stages of models that were not probed best; at
0.2, a backward 10% slower than the forward would pass for memory-bound kernels 80% slower than products."""
NEAR = 0.03
"""Weight of the distance of all factors from 1: passes that the host holds up say nothing about kernels, and any factor
would do. It takes a thousandth of a factor's logarithm where two passes ask for it."""


def from_probe(result: ProbeResult, cluster: ClusterSpec, where: str = "the probe") -> Calibration:
    """The factors between a probe's measurements and the profile of `cluster`: links first, then kernels, memory and
    the host. A number that is not to be believed says why, and the profile's own stays.

    Raises SpecError if the probe is no evidence of the speed of this hardware.
    """
    require_speed(result, cluster.hardware, where)
    unknown = unpriced(result.ranks, cluster.hardware)
    if unknown:
        raise SpecError(
            f"{where}: {in_words(unknown)} ran, of which {cluster.hardware.name} has no numbers",
            "probe a dense model whose attention runs in FlashAttention-2 or cuDNN's kernel, such as llama-3.1-8b",
        )
    source = f"plan probe on {result.device}, torch {result.torch_version}, {result.slice.run}"
    source = "; ".join([source, *(condition.text for condition in result.conditions)])
    links = Calibration(source=source, efficiency_fraction=link_shares(result, cluster))
    problem = passes(result, links.of_cluster(cluster))
    fitted = fit(problem, cluster.hardware)
    factors = {path: fitted[path] / start for path, (start, *_) in problem.free.items()}
    kinds = problem.groups[: -len(factors) - 1].tolist()
    ways = [kind.partition(" ")[0] for kind in kinds]
    doubted = doubt(problem, cluster.hardware, fitted, (kinds, ways), _noise(result))
    if doubted.tells_of_kernels:
        _require_plausible(factors, result, cluster.hardware, where)
    numbers = _factors(factors, doubted, len(result.ranks))
    return links.model_copy(
        update={
            "gemm_factor": numbers.pop("gemm_factor"),
            "stream_factor": numbers.pop("stream_factor"),
            "attention_factor": {path.partition(".")[0]: factor for path, factor in numbers.items()},
            "step_width": doubted.step_width,
            **reserved(result, cluster.hardware),
            "microbatch_overhead_s": host(result.ranks),
        }
    )


def _require_plausible(factors: Mapping[str, float], result: ProbeResult, hardware: HardwareSpec, where: str) -> None:
    """Raise SpecError if a factor on kernels cannot be one of this hardware."""
    objections = {name_of(path): kernel_objection(path, factor, hardware) for path, factor in factors.items()}
    said = ", ".join(f"{name} {objection}" for name, objection in objections.items() if objection)
    if said:
        raise SpecError(
            f"{where}: {result.device} is no {hardware.name} by its seconds: {said}",
            f"check --hardware, and the clocks, power limit and other processes of {result.device}; then probe again",
        )


def name_of(path: str) -> str:
    """The name of a factor in reports, by its path in the profile."""
    names = {"gemm_factor": "products", "stream_factor": "memory-bound kernels"}
    return names.get(path) or f"attention ({path.partition('.')[0]})"


def _factors(factors: Mapping[str, float], doubted: Doubt, num_ranks: int) -> dict[str, Factor]:
    """The factors with their source, and the reason why they are refused, if they are."""
    said = f"of {doubted.num_passes} passes of {num_ranks} ranks, those left out are {doubted.left_out:.1%} off"
    said = f"{said} with it, {doubted.before:.1%} without"
    numbers = {}
    for path, value in factors.items():
        low, high = doubted.ranges[path]
        source = f"seconds × {low:.3f} to {high:.3f} without some passes; {said}"
        numbers[path] = Factor(value=value, source=source, **doubted.opinion)
    return numbers


def _noise(result: ProbeResult) -> float:
    """Standard error of the passes' seconds, as a share of them; 0 where the probe does not say."""
    spreads = [chunk.spread_fraction for rank in result.ranks for chunk in rank.chunks if chunk.spread_fraction]
    return math.sqrt(sum(spread**2 for spread in spreads) / len(spreads)) if spreads else 0.0


def kernels_that_ran(result: ProbeResult, cluster: ClusterSpec) -> Texts:
    """The kernels of attention that the ranks ran, or, where they do not say, the ones that their price is of."""
    expected = expected_kernels(result.run, result.ranks, cluster.hardware)
    return seen_kernels(result.ranks) or tuple(sorted(expected - {"mask"}))


def passes(result: ProbeResult, cluster: ClusterSpec) -> FitProblem:
    """Forward and backward of every virtual stage that ran, as a problem in the kernels' factors.

    Predictions are for the probe's own run: its shapes and layers in eager torch, with exchanges where it had peers.
    Passes of one price are one kind. The last rows hold the factors together.
    """
    run = result.run
    alone = result.mode == "stages"
    result_kernels = seen_kernels(result.ranks)
    measured = _measured(result)
    stages = sorted(measured)
    attention = [f"{kernel}.seconds_factor" for kernel in kernels_that_ran(result, cluster)]
    paths = ("gemm_factor", *attention, "stream_factor")
    start = {path: number_at(cluster.hardware.efficiency, path) for path in paths}

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        fitted = hardware.model_copy(update={"tiers": cluster.hardware.tiers})
        costs_of_chunks = chunk_costs(run, cluster.changed(hardware=fitted), result_kernels, alone)
        costs = [costs_of_chunks[stage] for stage in stages]
        forward = [cost.forward_s if alone else cost.forward_total_s for cost in costs]
        backward = [cost.input_grad_s + cost.weight_grad_s if alone else cost.backward_total_s for cost in costs]
        factors = np.array([number_at(hardware.efficiency, path) / value for path, value in start.items()])
        common = np.exp(np.log(factors).mean())
        return np.array([*forward, *backward, *(factors / common), common])

    planned_s = predict(cluster.hardware, {})
    ways = [*["forward"] * len(stages), *["backward"] * len(stages)]
    kinds = [f"{way} {planned_s[row]:.6g}" for row, way in enumerate(ways)]
    seconds = [*(measured[stage][0] for stage in stages), *(measured[stage][1] for stage in stages)]
    return FitProblem(
        name="probe",
        free={
            path: (value, value * least_factor(path, cluster.hardware), value * RANGE) for path, value in start.items()
        },
        predict=predict,
        measured_s=np.array([*seconds, *[1.0] * (len(start) + 1)]),
        groups=np.array([*kinds, *start, "all"]),
        weights=np.array([1.0] * len(seconds) + [TOGETHER] * len(start) + [NEAR]),
        num_guesses=1,
    )


def _measured(result: ProbeResult) -> dict[int, tuple[float, float]]:
    """Forward and backward seconds of each virtual stage that ran, as medians over its ranks."""
    chunks = [chunk for rank in result.ranks for chunk in rank.chunks if min(chunk.passes_s) > 0]
    by_stage = grouped((chunk.stage % len(result.run.chunks), chunk.passes_s) for chunk in chunks)
    return {stage: (median(f for f, _ in pairs), median(b for _, b in pairs)) for stage, pairs in by_stage.items()}
