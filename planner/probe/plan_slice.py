"""The part of a plan that runs: options, the grid of ranks, the schedule, each virtual stage's layers and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from planner.answer import PricedLayout, StagePlan
from planner.errors import ProbeError
from planner.probe.run import STEADY_S, ChunkSpec, Device
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule, violation
from planner.schedule.replay import Durations
from planner.specs.base import Texts

DEFAULT_TOLERANCE = 0.1
"""Fraction of a prediction by which a measurement may differ."""

FEWEST_STEPS = 3
BUDGET_S = 5.0


class ProbeOptions(NamedTuple):
    """Options of one probe."""

    device: Device = "cpu"
    stages: Literal["all"] | int | None = None
    """None runs all stages together. Else one device runs one stage at a time: all distinct stages, or the one
    named."""
    hidden_size: int = 64
    """Hidden size of the small model on the CPU."""
    num_processes: int = 8
    """The most processes to start on the CPU."""
    most_layers: int = 2
    """The most layers of a virtual stage on the CPU."""
    num_steps: int | None = None
    """Number of steps to measure. None measures a GPU for `budget_s`, a CPU for FEWEST_STEPS."""
    budget_s: float = BUDGET_S
    """Seconds that the measured steps of a GPU take, unless there are fewer than FEWEST_STEPS."""
    tolerance_fraction: float = DEFAULT_TOLERANCE
    timeout_s: float = 120.0
    """Seconds without progress after which a rank counts as hanging."""
    order: Schedule | None = None
    """An order to run instead of the plan's, such as one read from a CSV file."""

    @property
    def repeats(self) -> dict[str, float]:
        """The fields of a run on GPUs that say how long it repeats its steps."""
        if self.num_steps is not None or self.device == "cpu":
            return {"num_steps": self.num_steps or FEWEST_STEPS}
        return {"num_steps": FEWEST_STEPS, "steady_s": STEADY_S, "most_s": self.budget_s}


class RankGrid(NamedTuple):
    """Sizes of the ranks that are started."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


def fit_processes(layout: PricedLayout, num_processes: int, most_tp: int = 2) -> RankGrid:
    """The largest slice of the plan's ranks in `num_processes`: data parallelism is given up first, then tensor and
    context parallelism down to 1 (on the CPU only their presence matters), then pipeline stages."""
    parallelism = layout.parallelism
    tp = min(parallelism.tp, most_tp)
    cp = min(parallelism.cp, 2)
    dp = min(parallelism.dp, 2)
    dp = max(1, min(dp, num_processes // (parallelism.pp * cp * tp)))
    tp = tp if parallelism.pp * dp * cp * tp <= num_processes else 1
    cp = cp if parallelism.pp * dp * cp * tp <= num_processes else 1
    pp = min(parallelism.pp, num_processes)
    return RankGrid(pp, dp, cp, tp, _largest_divisor(dp * cp * tp, parallelism.ep))


def fit_gpus(layout: PricedLayout, num_gpus: int) -> RankGrid:
    """The largest slice of the plan's ranks on `num_gpus`. Tensor- and context-parallel groups stay whole: dp is
    reduced first, then the number of stages.

    If the plan has several instances of a sharded optimizer, one of them runs: the runner shards over all its replicas.

    Raises ProbeError where not even one group fits, or one stage of a pipeline alone.
    """
    parallelism = layout.parallelism
    group = parallelism.tp * parallelism.cp
    if num_gpus < group * min(2, parallelism.pp):
        needed = "one group" if num_gpus < group else f"two of {parallelism.pp} stages"
        raise ProbeError(
            f"{num_gpus} GPUs are less than {needed} of tp {parallelism.tp} × cp {parallelism.cp}",
            "run the stages one by one on a single GPU: --stage all",
        )
    pp = min(parallelism.pp, num_gpus // group)
    dp = _largest_divisor(sharing_dp(layout), num_gpus // (group * pp))
    return RankGrid(pp, dp, parallelism.cp, parallelism.tp, _largest_divisor(dp * group, parallelism.ep))


def sharing_dp(layout: PricedLayout) -> int:
    """Number of replicas that share one sharded optimizer; all replicas if nothing is sharded."""
    parallelism = layout.parallelism
    return max(1, parallelism.shard_size // parallelism.cp) if parallelism.zero_stage else parallelism.dp


def _largest_divisor(number: int, at_most: int) -> int:
    return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)


def sampled_stages(asked_pp: int, pp: int) -> list[int]:
    """The plan's stages that the `pp` running stages represent: first, last, and evenly between."""
    return [round(i * (asked_pp - 1) / (pp - 1)) for i in range(pp)] if pp > 1 else [0]


MAX_MICROBATCHES_PER_RANK = 3
RECOMPUTABLE = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
"""Modules that the probe's model can recompute selectively."""


def slice_schedule(layout: PricedLayout, pp: int, most_microbatches: int | None = None) -> Schedule:
    """The plan's schedule on `pp` ranks, with at most `most_microbatches` (a few per rank unless given)."""
    parallelism = layout.parallelism
    name = parallelism.schedule if pp > 1 else "none"
    vpp = parallelism.vpp if pp > 1 else 1
    most_microbatches = min(parallelism.num_microbatches, most_microbatches or max(2, MAX_MICROBATCHES_PER_RANK * pp))
    for count in (*range(most_microbatches, 0, -1), *range(most_microbatches, 8 * pp * vpp + 1)):
        if violation(name, pp, vpp, count) is None:
            return build_schedule(name, pp, vpp, count)
    error = violation(name, pp, vpp, most_microbatches)
    raise ProbeError(f"the plan's schedule cannot be run on {pp} stages: {error}", "give it more ranks")


def fully_shards(layout: PricedLayout, order: Schedule) -> bool:
    """True if the run shards weights and gradients as the plan does; torch's fully_shard cannot split backwards."""
    return layout.parallelism.zero_stage == 3 and not order.splits_backward


def recompute_modules(layout: PricedLayout) -> Texts:
    """Selectively recomputed modules that the probe's model can recompute."""
    return tuple(name for name in layout.parallelism.recompute_modules if name in RECOMPUTABLE)


def real_chunks(layout: PricedLayout, order: Schedule, stages: Sequence[int]) -> tuple[ChunkSpec, ...]:
    """Virtual stages with the plan's own layers; `stages` are the plan's stages that the pipeline ranks stand for."""
    last_stage = order.num_model_stages - 1
    has_mtp = any("mtp" in stage.holds for stage in layout.stages)
    chunks = []
    for virtual, (rank, index) in enumerate(chunk_numbers(order.stage_to_rank[: last_stage + 1])):
        plan_stage = layout.stages[stages[rank]]
        first, last = _span(plan_stage, index, order.vpp)
        # the stage's share of layers that are recomputed whole
        share = plan_stage.recompute.get("full", 0) / max(1, sum(plan_stage.recompute.values()))
        is_last = virtual == last_stage
        chunks.append(
            ChunkSpec(
                first_layer=first, last_layer=last, embedding=virtual == 0, head=is_last, mtp=is_last and has_mtp,
                num_recomputed=round((last - first) * share),
            )
        )  # fmt: skip
    return tuple(chunks)


def chunk_numbers(placement: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The rank of each virtual stage, and which of that rank's chunks it is."""
    return ((rank, placement[:stage].count(rank)) for stage, rank in enumerate(placement))


def _span(stage: StagePlan, index: int, vpp: int) -> tuple[int, int]:
    """Layers of a chunk: the plan's own, or an even part of the stage's layers where an order has more or fewer
    chunks."""
    if vpp == len(stage.chunks):
        return stage.chunks[index]
    first = stage.chunks[0][0]
    layers = stage.num_layers
    return first + layers * index // vpp, first + layers * (index + 1) // vpp


def scaled_chunks(chunks: Sequence[ChunkSpec], most_layers: int) -> tuple[ChunkSpec, ...]:
    """The chunks shrunk in proportion to at most `most_layers` layers each. A chunk that has layers keeps at least
    one."""
    factor = min(1.0, most_layers / max(chunk.num_layers for chunk in chunks))
    scaled = []
    first = 0
    for chunk in chunks:
        layers = max(bool(chunk.num_layers), round(chunk.num_layers * factor))
        recomputed = round(layers * chunk.num_recomputed / max(1, chunk.num_layers))
        update = {"first_layer": first, "last_layer": first + layers, "num_recomputed": recomputed}
        scaled.append(chunk.model_copy(update=update))
        first += layers
    return tuple(scaled)


def planned_seconds(layout: PricedLayout, order: Schedule, stages: Sequence[int]) -> Durations:
    """Planned seconds of every virtual stage, exchanges included. A stage's seconds are divided among its chunks by
    layers."""
    seconds = []
    for rank, index in chunk_numbers(order.stage_to_rank[: order.num_model_stages]):
        stage = layout.stages[stages[rank]]
        layers = [last - first for first, last in stage.chunks]
        has_other_chunks = order.vpp != len(layers)
        share = 1 / order.vpp if has_other_chunks or not sum(layers) else layers[index] / sum(layers)
        input_grad_s = stage.backward_s - stage.weight_grad_s + stage.backward_comm_s
        forward_s = stage.forward_s + stage.forward_comm_s
        seconds.append((share * forward_s, share * input_grad_s, share * stage.weight_grad_s))
    return replay_durations(seconds)


def replay_durations(seconds: Sequence[tuple[float, float, float]]) -> Durations:
    """Forward, input gradient and weight gradient of every virtual stage as the replay takes them."""
    forward_s, input_grad_s, weight_grad_s = zip(*seconds, strict=True)
    return Durations(forward_s, input_grad_s, weight_grad_s)
