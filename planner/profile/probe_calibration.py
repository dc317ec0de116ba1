"""The calibration that a probe gives: a few factors that explain its measurements of its own model in eager torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from planner.physics.communication import Kind, joined_fraction, members_by_tier, waits_s
from planner.physics.cost import PartCost, sum_parts
from planner.physics.memory import communicators
from planner.physics.pricing import Pricing
from planner.probe.plan_side.eager import EAGER, training_of
from planner.probe.result import ProbeResult, RankResult, TimedExchange, stride_of
from planner.probe.run import ProbeRun
from planner.probe.verdict.slowness import require_speed
from planner.profile.fitting import Residuals, fit, log_errors, number_at
from planner.profile.kernel_problems import BenchNumbers, FitProblem
from planner.shape import FloatArray, Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.training import Recompute
from planner.specs.units import GB, GIB
from planner.trainers.calibration import Calibration, Factor, Quantity, Share

RANGE = 20.0
"""Factors between 1/RANGE and RANGE."""
TOGETHER = 0.2
"""Weight of the difference between factors; a measured pass has weight 1. Factors that the passes cannot tell apart
move together. Of weights from 0.05 to 3, those from 0.2 on predict H200 stages of models that were not probed best."""
MOST_LATENCY_FRACTION = 0.5
"""Largest share of an exchange's seconds that may be latency; else it says nothing about bandwidth."""


def from_probe(result: ProbeResult, cluster: ClusterSpec, where: str = "the probe") -> Calibration:
    """The factors between a probe's measurements and the profile of `cluster`: links first, then kernels, memory and
    the host.

    Raises SpecError if the probe is no evidence of the speed of this hardware.
    """
    require_speed(result, cluster.hardware, where)
    source = f"plan probe on {result.device}, torch {result.torch_version}, {result.slice.run}"
    links = Calibration(source=source, efficiency_fraction=_link_shares(result, cluster))
    problem = passes(result, links.of_cluster(cluster))
    fitted = fit(problem, cluster.hardware)
    residuals = Residuals.of(log_errors(problem, cluster.hardware, fitted)[: -len(problem.free)])
    source_of_factors = (
        f"{residuals.num_rows} passes of {len(result.ranks)} ranks, {residuals.median:.1f}% off (median) with it"
    )
    factors = {
        path: Factor(value=fitted[path] / start, source=source_of_factors) for path, (start, *_) in problem.free.items()
    }
    measured: dict[str, Any] = {
        "gemm_factor": factors["gemm_factor"],
        "stream_factor": factors["stream_factor"],
        "attention_factor": {
            kernel: factors[f"{kernel}.seconds_factor"] for kernel in kernels_that_ran(result, cluster)
        },
    }
    measured |= {**_reserved(result, cluster), "microbatch_overhead_s": _host(result.ranks)}
    return links.model_copy(update=measured)


def kernels_that_ran(result: ProbeResult, cluster: ClusterSpec) -> tuple[str, ...]:
    """The kernels of attention that the ranks ran, or, where they do not say, the one that their price is of."""
    said = {kernel for rank in result.ranks for kernel in rank.attention_kernels}
    return tuple(sorted(said)) or ("flash" if cluster.hardware.efficiency.cudnn is None else "cudnn",)


def passes(result: ProbeResult, cluster: ClusterSpec) -> FitProblem:
    """Forward and backward of every virtual stage that ran, as a problem in the kernels' factors.

    Predictions are for the probe's own run: its shapes and layers in eager torch, with exchanges where it had peers.
    """
    run, alone = result.run, result.mode == "stages"
    measured = _measured(result)
    stages = sorted(measured)

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        costs_of_chunks = chunk_costs(run, _with(cluster, hardware))
        costs = [costs_of_chunks[stage] for stage in stages]
        forward = [cost.forward_s if alone else cost.forward_total_s for cost in costs]
        backward = [cost.input_grad_s + cost.weight_grad_s if alone else cost.backward_total_s for cost in costs]
        factors = np.array([number_at(hardware.efficiency, path) / value for path, value in start.items()])
        return np.concatenate((np.array(forward), np.array(backward), factors / np.exp(np.log(factors).mean())))

    attention = [f"{kernel}.seconds_factor" for kernel in kernels_that_ran(result, cluster)]
    paths = ["gemm_factor", *attention, "stream_factor"]
    start = {path: number_at(cluster.hardware.efficiency, path) for path in paths}
    seconds = [*(measured[stage][0] for stage in stages), *(measured[stage][1] for stage in stages)]
    return FitProblem(
        name="probe",
        free={name: (value, value / RANGE, value * RANGE) for name, value in start.items()},
        predict=predict,
        measured_s=np.array([*seconds, *[1.0] * len(start)]),
        groups=np.array([str(stage) for stage in stages * 2] + list(start)),
        weights=np.array([1.0] * len(seconds) + [TOGETHER] * len(start)),
    )


def _measured(result: ProbeResult) -> dict[int, tuple[float, float]]:
    """Forward and backward seconds of each virtual stage that ran, as medians over its ranks."""
    seconds_by_stage: dict[int, list[tuple[float, float]]] = {}
    for rank in result.ranks:
        for chunk in rank.chunks:
            if chunk.own_forward_s > 0 and chunk.own_backward_s > 0:
                stage = chunk.stage % len(result.run.chunks)
                seconds_by_stage.setdefault(stage, []).append((chunk.own_forward_s, chunk.own_backward_s))
    return {
        stage: (median(f for f, _ in pairs), median(b for _, b in pairs)) for stage, pairs in seconds_by_stage.items()
    }


def run_shape(run: ProbeRun) -> Shape:
    """The shape that a probe runs, as the cost model has it."""
    return Shape(
        tp=run.tp,
        cp=run.cp,
        ep=run.ep,
        etp=1 if run.model.moe is not None else run.tp,
        pp=run.pp,
        vpp=max(1, len(run.chunks) // run.pp),
        dp=run.dp,
        micro_batch_size=run.micro_batch_size,
        num_microbatches=run.num_microbatches,
        seq_length=run.seq_length * run.cp,
        sequence_parallel=int(run.sequence_parallel),
        zero_stage=int(run.zero),
        shard_size=run.dp * run.cp,
    )


def chunk_costs(run: ProbeRun, cluster: ClusterSpec) -> list[PartCost]:
    """The cost model's price of each virtual stage of a probe's run, in eager torch on `cluster`."""
    shape = run_shape(run)
    sequences = run.dp * run.micro_batch_size * run.num_microbatches
    pricing = Pricing(
        model=run.model,
        training=training_of(int(shape.seq_length), sequences),
        cluster=cluster,
        runtime=EAGER,
        selective_modules=run.recompute_modules,
    )
    base: Recompute = "selective" if run.recompute_modules else "none"
    table = pricing.table(shape)
    costs = []
    for chunk in run.chunks:
        layers = run.model.layers[chunk.first_layer : chunk.last_layer]
        layer_modes = [("full" if number < chunk.num_recomputed else base, kind) for number, kind in enumerate(layers)]
        parts = [table.layers[kind, mode].times(count) for (mode, kind), count in Counter(layer_modes).items()]
        ends = ((table.embedding, chunk.embedding), (table.head, chunk.head), (table.mtp, chunk.mtp))
        costs.append(sum_parts([*parts, *(part for part, is_here in ends if is_here and part is not None)]))
    return costs


def _with(cluster: ClusterSpec, hardware: HardwareSpec) -> ClusterSpec:
    return cluster.changed(hardware=hardware.model_copy(update={"tiers": cluster.hardware.tiers}))


def _link_shares(result: ProbeResult, cluster: ClusterSpec) -> dict[str, Share]:
    """For each tier that alone carried an exchange, the share of its rate that the largest such exchange reached."""
    run, shares_by_tier = result.run, dict[str, list[tuple[TimedExchange, float]]]()
    for exchange in (exchange for rank in result.ranks for exchange in rank.exchanges):
        stride = stride_of(exchange, run)
        level = None if stride is None else _tier_alone(exchange.size, stride, cluster)
        if level is None:
            continue
        share = _share(exchange, level, cluster)
        if share is not None:
            shares_by_tier.setdefault(cluster.tiers[level].name, []).append((exchange, share))
    shares = {}
    for name, pairs in shares_by_tier.items():
        largest = max(pairs, key=lambda pair: pair[0].num_bytes)[0]
        shares_of_largest = [
            share for exchange, share in pairs if (exchange.name, exchange.size) == (largest.name, largest.size)
        ]
        source = f"{largest.name} of {largest.num_bytes / 2**20:.1f} MiB over {largest.size} ranks"
        shares[name] = Share(value=min(1.0, median(shares_of_largest)), source=source)
    return shares


def _tier_alone(size: int, stride: int, cluster: ClusterSpec) -> int | None:
    """The tier that joins all ranks of a group, if no lower tier joins any two of them."""
    members = [int(count) for count in members_by_tier(size, stride, cluster.tiers)]
    level = members.index(size)
    return level if size > 1 and (level == 0 or members[level - 1] == 1) else None


def _share(exchange: TimedExchange, level: int, cluster: ClusterSpec) -> float | None:
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


def _reserved(result: ProbeResult, cluster: ClusterSpec) -> dict[str, Share | Quantity]:
    """Memory in use on the device outside the allocator's blocks, and the allocator's blocks beyond what was
    allocated."""
    memories = [rank.memory for rank in result.ranks if rank.memory is not None]
    if not memories:
        return {}
    shape = run_shape(result.run)
    num_communicators = 0.0 if result.mode == "stages" else float(communicators(shape))
    communicator_bytes = num_communicators * cluster.hardware.reserved.communicator_bytes
    context_bytes = (
        median(memory.device_used_bytes - memory.peak_reserved_bytes for memory in memories) - communicator_bytes
    )
    fragmentation_fraction = median(memory.peak_reserved_bytes / memory.peak_allocated_bytes - 1 for memory in memories)
    source = f"{len(memories)} ranks"
    return {
        "context_gib": Quantity(value=max(0.0, context_bytes / GIB), source=source),
        "fragmentation_fraction": Share(value=min(1.0, max(0.0, fragmentation_fraction)), source=source),
    }


def _host(ranks: Sequence[RankResult]) -> Quantity:
    """The host's seconds per micro-batch: time between actions in which a rank neither computed nor waited."""
    seconds_by_rank = []
    for rank in ranks:
        gaps = [after.ready_s - before.end_s for before, after in zip(rank.actions, rank.actions[1:], strict=False)]
        forwards = sum("F" in timed.action for timed in rank.actions)
        seconds_by_rank.append(sum(max(0.0, gap) for gap in gaps) / max(1, forwards))
    return Quantity(value=median(seconds_by_rank), source=f"between the actions of {len(ranks)} ranks")
