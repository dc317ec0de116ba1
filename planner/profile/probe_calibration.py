"""The calibration that a probe gives: a few factors that explain its measurements of its own model in eager torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from statistics import median

import numpy as np

from planner.errors import SpecError
from planner.physics.cost import PartCost, sum_parts
from planner.physics.pricing import Pricing
from planner.probe.eager import eager_with, training_of
from planner.probe.result import ProbeResult
from planner.probe.run import ProbeRun
from planner.probe.verdict.evidence import expected_kernels, in_words, require_speed, seen_kernels, unpriced
from planner.profile.fitting import fit, number_at
from planner.profile.kernel_problems import BenchNumbers, FitProblem
from planner.profile.probed.doubt import Doubt, doubt
from planner.profile.probed.links import link_shares
from planner.profile.probed.memory import host, reserved
from planner.profile.probed.plausible import kernel_objection, least_factor
from planner.shape import FloatArray, Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.training import Recompute
from planner.trainers.calibration import Calibration, Factor

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
    memory = reserved(result, cluster.hardware, run_shape(result.run))
    return links.model_copy(
        update={
            "gemm_factor": numbers.pop("gemm_factor"),
            "stream_factor": numbers.pop("stream_factor"),
            "attention_factor": {path.partition(".")[0]: factor for path, factor in numbers.items()},
            "step_width": doubted.step_width,
            "context_gib": memory.context_gib,
            "fragmentation_fraction": memory.fragmentation_fraction,
            "memory_width": memory.width,
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


def kernels_that_ran(result: ProbeResult, cluster: ClusterSpec) -> tuple[str, ...]:
    """The kernels of attention that the ranks ran, or, where they do not say, the ones that their price is of."""
    expected = expected_kernels(result.run, result.ranks, cluster.hardware)
    return seen_kernels(result.ranks) or tuple(sorted(expected - {"mask"}))


def passes(result: ProbeResult, cluster: ClusterSpec) -> FitProblem:
    """Forward and backward of every virtual stage that ran, as a problem in the kernels' factors.

    Predictions are for the probe's own run: its shapes and layers in eager torch, with exchanges where it had peers.
    Passes of one price are one kind. The last rows hold the factors together.
    """
    run, alone, result_kernels = result.run, result.mode == "stages", seen_kernels(result.ranks)
    measured = _measured(result)
    stages = sorted(measured)
    start = {path: number_at(cluster.hardware.efficiency, path) for path in _paths(result, cluster)}

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        costs_of_chunks = chunk_costs(run, _with(cluster, hardware), result_kernels, alone)
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


def _paths(result: ProbeResult, cluster: ClusterSpec) -> list[str]:
    """The paths in the profile of the factors that a probe's passes are fitted with."""
    attention = [f"{kernel}.seconds_factor" for kernel in kernels_that_ran(result, cluster)]
    return ["gemm_factor", *attention, "stream_factor"]


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


def chunk_costs(
    run: ProbeRun, cluster: ClusterSpec, kernels: Collection[str] = (), alone: bool = False
) -> list[PartCost]:
    """The cost model's price of each virtual stage of a probe's run, in eager torch on `cluster`, with the `kernels` of
    attention that ran, if they are known, on all ranks together or each stage `alone`.

    Late nodes are those among which it ran: of a job on more, it has not waited for them."""
    shape, ran_on = run_shape(run), cluster.changed(num_gpus=cluster.node_size if alone else run.world_size)
    sequences = run.dp * run.micro_batch_size * run.num_microbatches
    pricing = Pricing(
        model=run.model,
        training=training_of(int(shape.seq_length), sequences),
        cluster=ran_on,
        runtime=eager_with(kernels, alone),
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
