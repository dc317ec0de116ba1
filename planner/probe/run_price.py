"""The price of a run in eager torch, seconds of its virtual stages and bytes of its ranks; and a plan that fits.

A run is priced before anything starts. One that needs more memory than a GPU has is made to fit: more layers are
recomputed, optimizer states are sharded, and, where that is not enough, stages hold fewer layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from planner.answer import Plan, StagePlan
from planner.errors import ProbeError
from planner.layout.activations import activation_peaks_bytes
from planner.layout.candidate import by_rank
from planner.layout.seconds import durations_of
from planner.physics.cost import CostTable, PartCost, sum_parts
from planner.physics.memory import communicators
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import StageBytes, stage_memory
from planner.probe.eager import MASTERS_ARE_WEIGHTS, eager_with, training_of
from planner.probe.run import ChunkSpec, Place, ProbeRun, group_keys
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Recompute
from planner.specs.units import gib

ROOM_FRACTION = 0.02
"""Share of a GPU's memory that a probe leaves free: its bytes are priced to 1%, and blocks do not fill all of it."""


def run_shape(run: ProbeRun, dp: int, zero_stage: int) -> Shape:
    """The shape that a probe runs, as the cost model has it."""
    return Shape(
        tp=run.tp,
        cp=run.cp,
        ep=run.ep,
        etp=1 if run.model.moe is not None else run.tp,
        pp=run.pp,
        vpp=max(1, len(run.chunks) // run.pp),
        dp=dp,
        micro_batch_size=run.micro_batch_size,
        num_microbatches=run.num_microbatches,
        seq_length=run.seq_length * run.cp,
        sequence_parallel=int(run.sequence_parallel),
        zero_stage=zero_stage,
        shard_size=dp * run.cp,
    )


def _priced(run: ProbeRun, cluster: ClusterSpec, shape: Shape, kernels: Collection[str], alone: bool) -> Pricing:
    """The prices of a run in eager torch. Late nodes are those among which it ran: it has not waited for others."""
    sharded = MASTERS_ARE_WEIGHTS if int(shape.zero_stage) == 3 else {}
    return Pricing(
        model=run.model,
        training=training_of(int(shape.seq_length), run.dp * run.micro_batch_size * run.num_microbatches),
        cluster=cluster.changed(num_gpus=cluster.node_size if alone else run.world_size),
        runtime=eager_with(kernels, alone).model_copy(update=sharded),
        selective_modules=run.recompute_modules,
    )


def _cost(run: ProbeRun, chunk: ChunkSpec, table: CostTable, head: PartCost) -> PartCost:
    base: Recompute = "selective" if run.recompute_modules else "none"
    layers = run.model.layers[chunk.first_layer : chunk.last_layer]
    modes = Counter(("full" if number < chunk.num_recomputed else base, kind) for number, kind in enumerate(layers))
    parts = [table.layers[kind, mode].times(count) for (mode, kind), count in modes.items()]
    ends = ((table.embedding, chunk.embedding), (head, chunk.head), (table.mtp, chunk.mtp))
    return sum_parts([*parts, *(part for part, is_here in ends if is_here and part is not None)])


def chunk_costs(
    run: ProbeRun, cluster: ClusterSpec, kernels: Collection[str] = (), alone: bool = False
) -> list[PartCost]:
    """The cost model's price of each virtual stage of a probe's run, in eager torch on `cluster`, with the `kernels` of
    attention that ran, if they are known, on all ranks together or each stage `alone`."""
    shape = run_shape(run, run.dp, int(run.zero))
    table = _priced(run, cluster, shape, kernels, alone).table(shape)
    return [_cost(run, chunk, table, table.head) for chunk in run.chunks]


def num_communicators(run: ProbeRun, rank: int) -> int:
    """Number of communicators that a rank makes: of all ranks, and of each group and wire that it is part of."""
    return 1 + sum(rank in ranks for _, ranks in group_keys(run))


def run_bytes(run: ProbeRun, cluster: ClusterSpec, alone: bool = False) -> list[StageBytes]:
    """The peak memory of a rank of each pipeline stage of a run, with as many communicators as it makes; none
    `alone`."""
    zero_stage = 3 if run.fully_sharded else int(run.zero)
    shape = run_shape(run, run.dp * run.dp_stands_for, zero_stage)
    pricing = _priced(run, cluster, shape, (), alone)
    table, places = pricing.table(shape), run.stage_to_rank
    with_embedding = {rank for stage, rank in enumerate(places) if run.chunk_of(stage).embedding}
    heads = {rank: table.head_beside_embedding if rank in with_embedding else table.head for rank in places}
    costs = [_cost(run, run.chunk_of(stage), table, heads[rank]) for stage, rank in enumerate(places)]
    held = durations_of(pricing, table, costs, places).activation_bytes
    assert held is not None
    memory = []
    for stage, (cost, peak) in enumerate(
        zip(by_rank(costs, places), activation_peaks_bytes(run.order, held), strict=True)
    ):
        made = 0 if alone else num_communicators(run, run.rank(Place(stage, 0, 0, 0)))
        counted = stage_memory(pricing, table, cost, peak)
        more = (made - float(communicators(shape))) * cluster.hardware.reserved.communicator_bytes
        memory.append(counted.with_reserve(round(more)))
    return memory


class Fitted(NamedTuple):
    """A plan that fits where it is probed, and how it differs from the one that was asked for."""

    plan: Plan
    changes: tuple[str, ...] = ()
    """Sizes that are other than planned, in words; none where the plan fits as it is."""


def made_to_fit(plan: Plan, run_of: Callable[[Plan], ProbeRun], capacity_bytes: float, alone: bool = False) -> Fitted:
    """The plan, or as little changed as fits into `capacity_bytes` of each GPU; `run_of` gives the run of a plan.

    Raises ProbeError where one recomputed layer a stage does not fit.
    """

    def needed(changed: Plan) -> list[float]:
        return [stage.total_bytes for stage in run_bytes(run_of(changed), plan.cluster, alone)]

    def fits(changed: Plan) -> bool:
        return max(needed(changed)) <= (1 - ROOM_FRACTION) * capacity_bytes

    if fits(plan):
        return Fitted(plan)
    before, changes = max(needed(plan)), list[str]()
    if plan.parallelism.zero_stage == 0 and plan.parallelism.dp > 1:
        sizes = plan.parallelism.model_copy(update={"zero_stage": 1})
        plan = plan.model_copy(update={"best": plan.best.model_copy(update={"parallelism": sizes})})
        changes.append("optimizer states sharded (ZeRO-1), planned whole")
    largest = max(last - first for stage in plan.stages for first, last in stage.chunks)
    fewest = _first(range(largest + 1), lambda count: fits(recomputing(plan, count)))
    if fewest is None:
        most = _first(range(largest - 1, 0, -1), lambda count: fits(recomputing(with_layers(plan, count), count)))
        if most is None:
            least = max(needed(recomputing(with_layers(plan, 1), 1)))
            raise ProbeError(
                f"eager torch, which the probe runs, needs {gib(before):.1f} GiB of {gib(capacity_bytes):.1f} here, "
                f"{gib(least):.1f} with one recomputed layer a stage",
                "plan with --runtime torch-eager, or prove the order and the gradients with --device cpu",
            )
        plan, fewest = with_layers(plan, most), most
        changes.append(f"layers of a chunk {largest} → {most}")
    if fewest:
        changes.append(f"layers recomputed whole, of a chunk: {fewest} at least")
    changes[0] = f"{changes[0]} (as planned {gib(before):.1f} GiB of {gib(capacity_bytes):.1f} in eager torch)"
    return Fitted(recomputing(plan, fewest), tuple(changes))


def _first(counts: range, holds: Callable[[int], bool]) -> int | None:
    """The first of `counts` for which something holds that holds for all after it, too; None where it never does."""
    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(counts[middle]) else (middle + 1, high)
    return counts[low] if low < len(counts) else None


def recomputing(plan: Plan, count: int) -> Plan:
    """The plan with at least `count` layers of each chunk recomputed whole."""

    def stage(planned: StagePlan) -> StagePlan:
        layers, full = planned.num_layers, planned.recompute.get("full", 0)
        more = sum(min(count, last - first) for first, last in planned.chunks)
        if more <= full:
            return planned
        base = "selective" if "selective" in planned.recompute else "none"
        modes = {mode: number for mode, number in (("full", more), (base, layers - more)) if number}
        return planned.model_copy(update={"recompute": modes, "num_recomputed": ()})

    return _with_stages(plan, [stage(planned) for planned in plan.stages]) if count else plan


def with_layers(plan: Plan, most: int) -> Plan:
    """The plan with the first `most` layers of each chunk, and a model that has no others."""
    chunks = sorted((first, last, stage.stage) for stage in plan.stages for first, last in stage.chunks)
    kept, moved, end = list[int](), dict[tuple[int, int], tuple[int, int]](), 0
    for first, last, _ in chunks:
        layers = range(first, min(last, first + most))
        moved[first, last] = end, end + len(layers)
        kept, end = [*kept, *layers], end + len(layers)
    stages = []
    for stage in plan.stages:
        own = tuple(moved[first, last] for first, last in stage.chunks)
        layers_left = sum(last - first for first, last in own)
        modes = {"full": layers_left} if "full" in stage.recompute else dict.fromkeys(stage.recompute, layers_left)
        update = {"chunks": own, "num_layers": layers_left, "recompute": modes, "num_recomputed": ()}
        stages.append(stage.model_copy(update=update))
    model = plan.model.model_copy(update={"spec": _of_layers(plan.model.spec, kept)})
    return _with_stages(plan.model_copy(update={"model": model}), stages)


def _of_layers(model: ModelSpec, kept: list[int]) -> ModelSpec:
    """The model with some of its layers."""
    kinds = [model.layers[number] for number in kept]
    update: dict[str, object] = {"num_hidden_layers": len(kept)}
    if len(model.kinds) > 1:
        update |= {"layer_types": [kind.attention for kind in kinds], "mlp_layer_types": [kind.mlp for kind in kinds]}
        update["sliding_window_pattern"] = None
        if model.moe is not None:
            update["moe"] = {**model.moe.model_dump(), "first_k_dense_replace": 0, "moe_layer_freq": 1}
    return ModelSpec.model_validate({**model.model_dump(), **update})


def _with_stages(plan: Plan, stages: list[StagePlan]) -> Plan:
    return plan.model_copy(update={"best": plan.best.model_copy(update={"stages": tuple(stages)})})
