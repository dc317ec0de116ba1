"""The price of the program that a probe runs: a plan's layout, or a run's stages, in eager torch and bf16.

Measurements are compared with this price, whatever trainer and dtype the plan is for. A run is priced before anything
starts. One that needs more memory than a GPU has is made to fit: more layers are recomputed, optimizer states are
sharded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from planner.answer import Plan, StagePlan
from planner.errors import ProbeError
from planner.layout.candidate import Candidate, activation_peaks_bytes, by_rank
from planner.layout.price import layout_again, reprice
from planner.layout.seconds import durations_of
from planner.physics.cost import CostTable, PartCost, sum_parts
from planner.physics.memory import communicators
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import StageBytes, stage_memory
from planner.probe.plan_runs import PlannedRun, ranks_run, require_runnable
from planner.probe.plan_slice import ProbeOptions, recompute_modules
from planner.probe.result import ProbeStart, StartedStage
from planner.probe.run import ChunkSpec, ProbeRun, num_communicators
from planner.schedule.orders import SCHEDULES
from planner.shape import Shape
from planner.specs.base import Fields
from planner.specs.cluster import ClusterSpec
from planner.specs.training import Recompute, TrainingSpec
from planner.specs.units import gib
from planner.trainers.documents import torch_took
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

EAGER = load_runtime("torch-eager").model_copy(update={"clips_gradients": True})
"""The trainer that a probe's ranks are: eager torch that clips gradients."""
MASTERS_ARE_WEIGHTS: Fields = {"weight_bytes": 4, "optimizer_bytes": 8}
"""Under ZeRO-3 the ranks' sharded weights are the fp32 masters (fully_shard)."""
FAST_GB_PER_S = 1e9
"""The rate of links that take no time."""


def in_eager_torch(plan: Plan, kernels: Collection[str] = (), alone: bool = False) -> Plan:
    """The plan with its best layout priced as a probe runs it, with experts evenly loaded. The layout itself stays.

    `kernels` are those of attention that ran; without any, the price is of those that torch is expected to take. Stages
    that run `alone` copy in their own memory what ranks exchange, and wait for no late node."""
    runtime = eager_runtime(plan.parallelism.zero_stage, kernels, alone)
    return _priced_again(
        plan,
        cluster=plan.cluster.changed(num_gpus=plan.cluster.node_size) if alone else plan.cluster,
        runtime=EAGER.name,
        runtime_spec=runtime.model_copy(update={"microbatch_overhead_s": plan.runtime_spec.microbatch_overhead_s}),
        training=training_of(plan.training.seq_length, plan.training.global_batch_size),
    )


def _priced_again(plan: Plan, **changes: object) -> Plan:
    """The same layout, priced with other fields of its plan."""
    changed = plan.model_copy(update=changes)
    return changed.model_copy(update={"best": layout_again(changed, repriced(changed))})


def without_waits(eager: Plan) -> Plan:
    """A plan in eager torch whose hosts are never late for their GPUs, nor ranks for the others in an exchange.

    Hosts differ more than GPUs do, and the waits for late ranks are those of long jobs on many nodes.
    """
    hardware = eager.cluster.hardware
    efficiency = hardware.efficiency.model_copy(update={"host_us": 0.0})
    # late nodes are as many as the job has, and one is never late
    update = {"hardware": hardware.model_copy(update={"efficiency": efficiency}), "num_gpus": eager.cluster.node_size}
    return _with(eager, update, {"collective_sync_us": 0.0})


def without_exchanges(eager: Plan) -> Plan:
    """A plan in eager torch whose exchanges inside layers take no time, beside which hosts could catch up."""
    quick = {"gb_per_s": FAST_GB_PER_S, "link_gb_per_s": None, "latency_us": 0.0, "start_us": 0.0}
    hardware = eager.cluster.hardware
    tiers = tuple(tier.model_copy(update=quick) for tier in hardware.tiers)
    links = {"network_gb_per_s": None, "network_tiers": ()}
    cluster = {"hardware": hardware.model_copy(update={"tiers": tiers}), **links}
    return _with(eager, cluster, {"collective_sync_us": 0.0, "exchange_kernels": 0.0})


def _with(eager: Plan, cluster: Fields, runtime: Fields) -> Plan:
    """The same layout, priced with other fields of its cluster and of its runtime."""
    runtime_spec = eager.runtime_spec.model_copy(update=runtime)
    return _priced_again(eager, cluster=eager.cluster.changed(**cluster), runtime_spec=runtime_spec)


def static_bytes(eager: Plan, stage: int) -> float:
    """Bytes of a stage before its first forward. Under ZeRO-3 there are neither gathered weights nor gradients yet."""
    memory = eager.stages[stage].memory
    runtime = eager.runtime_spec
    if eager.parallelism.zero_stage == 3:
        return memory.optimizer_bytes * (1 + runtime.weight_bytes / runtime.optimizer_bytes)
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes


def knows_peak(eager: Plan) -> bool:
    """True where the planner prices the peak of the ranks' own program.

    Beyond ZeRO-1 gathered weights and gradients come and go. Where backwards are split, the ranks free what only the
    input's gradient needs before the weight's is computed; the planner frees both then.
    """
    layout = eager.parallelism
    schedule = SCHEDULES.get(layout.schedule)
    return layout.zero_stage <= 1 and schedule is not None and not schedule.splits_backward


def repriced(plan: Plan) -> Candidate:
    """Prices of a plan in eager torch, stage by stage. Selective recomputation covers the modules that the probe can
    recompute."""
    return reprice(plan, plan.best, recompute_modules(plan.best))


def eager_runtime(zero_stage: int, kernels: Collection[str], alone: bool) -> RuntimeSpec:
    """Eager torch as installed here, whose ranks ran these kernels of attention, among others or `alone`."""
    update = {
        "attention_kernel": torch_took(kernels),
        "fused_norm": True,
        "copies_exchanged": alone,
        **(MASTERS_ARE_WEIGHTS if zero_stage == 3 else {}),
    }
    return EAGER.model_copy(update=update)


def training_of(seq_length: int, num_sequences: int) -> TrainingSpec:
    """A probe's step: in bf16, with equal shares of tokens for all experts, no rank slower than another."""
    return TrainingSpec(seq_length=seq_length, global_batch_size=num_sequences)


ROOM_FRACTION = 0.02
"""Share of a GPU's memory that a probe leaves free: its bytes are priced to 1%, and blocks do not fill all of it."""


def run_shape(run: ProbeRun, dp: int, zero_stage: int) -> Shape:
    """The shape that a probe runs, as the cost model has it."""
    own = {name: getattr(run, name) for name in ("tp", "cp", "ep", "pp", "micro_batch_size", "num_microbatches")}
    return Shape(
        **own, etp=1 if run.model.moe is not None else run.tp, vpp=max(1, len(run.chunks) // run.pp), dp=dp,
        seq_length=run.seq_length * run.cp, sequence_parallel=int(run.sequence_parallel), zero_stage=zero_stage,
        shard_size=dp * run.cp,
    )  # fmt: skip


def _priced(
    run: ProbeRun, cluster: ClusterSpec, shape: Shape, kernels: Collection[str], alone: bool
) -> tuple[Pricing, CostTable]:
    """The prices of a run in eager torch. Late nodes are those among which it ran: it has not waited for others."""
    pricing = Pricing(
        model=run.model,
        training=training_of(int(shape.seq_length), run.dp * run.micro_batch_size * run.num_microbatches),
        cluster=cluster.changed(num_gpus=cluster.node_size if alone else run.world_size),
        runtime=eager_runtime(int(shape.zero_stage), kernels, alone),
        selective_modules=run.recompute_modules,
    )
    return pricing, pricing.table(shape)


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
    _, table = _priced(run, cluster, run_shape(run, run.dp, int(run.zero)), kernels, alone)
    return [_cost(run, chunk, table, table.head) for chunk in run.chunks]


def run_bytes(run: ProbeRun, cluster: ClusterSpec, alone: bool = False) -> list[StageBytes]:
    """The peak memory of a rank of each pipeline stage of a run, with as many communicators as it makes; none
    `alone`."""
    zero_stage = 3 if run.fully_sharded else int(run.zero)
    shape = run_shape(run, run.dp * run.dp_stands_for, zero_stage)
    pricing, table = _priced(run, cluster, shape, (), alone)
    places = run.stage_to_rank
    with_embedding = {rank for stage, rank in enumerate(places) if run.chunk_of(stage).embedding}
    heads = (table.head_beside_embedding if rank in with_embedding else table.head for rank in places)
    costs = [_cost(run, run.chunk_of(stage), table, head) for stage, head in enumerate(heads)]
    held = durations_of(pricing, table, costs, places).activation_bytes
    assert held is not None
    made = [0] * run.pp if alone else num_communicators(run)
    each_bytes = cluster.hardware.reserved.communicator_bytes
    ranks = zip(by_rank(costs, places), activation_peaks_bytes(run.order, held), made, strict=True)
    priced = float(communicators(shape))
    return [
        stage_memory(pricing, table, cost, peak).with_reserve(round((number - priced) * each_bytes))
        for cost, peak, number in ranks
    ]


def made_to_fit(
    plan: Plan, run_of: Callable[[Plan], PlannedRun], capacity_bytes: float, alone: bool = False
) -> PlannedRun:
    """The run of a plan, or of one as little changed as fits into `capacity_bytes` of each GPU.

    Raises ProbeError where it does not fit with all layers recomputed.
    """

    most_bytes = (1 - ROOM_FRACTION) * capacity_bytes

    def needed(changed: Plan) -> float:
        return max(stage.total_bytes for stage in run_bytes(run_of(changed).run, plan.cluster, alone))

    def fits(changed: Plan) -> bool:
        return needed(changed) <= most_bytes

    plan, changes = _with_known_zero(plan)
    if (before := needed(plan)) <= most_bytes:
        return run_of(plan)._replace(changes=tuple(changes))
    if plan.parallelism.zero_stage == 0 and plan.parallelism.dp > 1:
        plan = _in_zero_1(plan)
        changes.append("ZeRO-0 → 1: optimizer states are sharded")
    largest = max(last - first for stage in plan.stages for first, last in stage.chunks)
    fewest = _first(range(largest + 1), lambda count: fits(recomputing(plan, count)))
    if fewest is None:
        least = needed(recomputing(plan, largest))
        raise ProbeError(
            f"eager torch, which the probe runs, needs {gib(before):.1f} GiB of {gib(capacity_bytes):.1f} here, "
            f"{gib(least):.1f} with all layers recomputed",
            "plan with --runtime torch-eager, or prove the order and the gradients with --device cpu",
        )
    if fewest:
        changes.append(f"{fewest} layers of each chunk are recomputed whole, or more as planned")
    changes[-1] += f" (without, {gib(before):.1f} GiB of {gib(capacity_bytes):.1f} in eager torch)"
    return run_of(recomputing(plan, fewest))._replace(changes=tuple(changes))


def _with_known_zero(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan, under ZeRO-1 where it shards what the ranks cannot: gradients alone, or weights beside split
    backwards."""
    zero = plan.parallelism.zero_stage
    splits = SCHEDULES[named_schedule(plan)].splits_backward
    if zero <= 1 or (zero == 3 and not splits):
        return plan, []
    return _in_zero_1(plan), [f"ZeRO-{zero} → 1: the probe shards optimizer states, or all where no backward is split"]


def named_schedule(plan: Plan) -> str:
    """The schedule of a plan; of an order made to measure, one that splits backwards as it does."""
    return "zb-v" if plan.best.actions else plan.parallelism.schedule


def _in_zero_1(plan: Plan) -> Plan:
    return _with_best(plan, parallelism=plan.parallelism.model_copy(update={"zero_stage": 1}))


def _with_best(plan: Plan, **changes: object) -> Plan:
    return plan.model_copy(update={"best": plan.best.model_copy(update=changes)})


def _first(counts: range, holds: Callable[[int], bool]) -> int | None:
    """The first of `counts` for which something holds that holds for all after it, too; None where it never does."""
    place = bisect_left(counts, True, key=holds)
    return counts[place] if place < len(counts) else None


def recomputing(plan: Plan, count: int) -> Plan:
    """The plan with at least `count` layers of each chunk recomputed whole."""

    def stage(planned: StagePlan) -> StagePlan:
        layers = planned.num_layers
        full = planned.recompute.get("full", 0)
        more = sum(min(count, last - first) for first, last in planned.chunks)
        if more <= full:
            return planned
        base = "selective" if "selective" in planned.recompute else "none"
        modes = {mode: number for mode, number in (("full", more), (base, layers - more)) if number}
        return planned.model_copy(update={"recompute": modes, "num_recomputed": ()})

    return _with_best(plan, stages=tuple(map(stage, plan.stages))) if count else plan


STARTERS = {
    "torchrun": "torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "--no-python {probe}",
    "slurm": "srun --nodes {nodes} --ntasks-per-node {each} --gpus-per-node {each} --kill-on-bad-exit=1 {probe}",
    "kubernetes": "torchrun --nnodes {nodes} --node-rank $JOB_COMPLETION_INDEX --nproc-per-node {each} "
    "--master-addr $JOB_NAME-0.$JOB_NAME --master-port 29500 --no-python {probe}",
}
"""The command on each node, on the first one (slurm), or of each pod of an Indexed Job with a headless service, whose
containers ask for `nvidia.com/gpu` (or `amd.com/gpu`) and have an emptyDir of medium Memory at /dev/shm."""
ENVIRONMENT = {
    "RANK, WORLD_SIZE, LOCAL_RANK": "set by torchrun; the probe reads those of srun and mpirun",
    "MASTER_ADDR, MASTER_PORT": "set by torchrun; under srun the first node, 29500 + SLURM_JOB_ID mod 1000",
    "NCCL_SOCKET_IFNAME": "yours, where the first interface does not lead to the other nodes",
    "CUDA_LAUNCH_BLOCKING": "not set",
}


def what_starts(plan: Plan, options: ProbeOptions, probe: str) -> ProbeStart:
    """The start of a probe of all ranks of a plan, by the command `probe` on each of them.

    Raises ProbeError where the probe cannot run it.
    """
    require_runnable(plan, options)
    num_ranks = plan.parallelism.num_gpus_used
    node = plan.cluster.node_size
    capacity_bytes = plan.cluster.hardware.memory_bytes
    fitted = made_to_fit(plan, partial(ranks_run, options=options, num_gpus=num_ranks), capacity_bytes)
    run = fitted.run
    each = min(node, run.world_size)
    nodes = -(-run.world_size // node)
    queues = {"GPU_MAX_HW_QUEUES": "16"} if plan.cluster.hardware.is_amd else {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    stages = [
        StartedStage(
            stage=stage,
            num_ranks=run.world_size // run.pp,
            layers=fitted.plan.stages[stage].chunks,
            moment_bytes=held.logits_bytes + held.workspace_bytes,
            **{name: getattr(held, name) for name in StartedStage.model_fields if hasattr(held, name)},
        )
        for stage, held in enumerate(run_bytes(run, plan.cluster))
    ]
    return ProbeStart(
        plan=f"{plan.parallelism} · {plan.parallelism.schedule}",
        num_ranks=run.world_size,
        num_nodes=nodes,
        made_to_fit=fitted.changes,
        capacity_bytes=round(capacity_bytes),
        stages=tuple(stages),
        commands={name: text.format(nodes=nodes, each=each, probe=probe) for name, text in STARTERS.items()},
        environment={**{name: f"{value}, set by the probe" for name, value in queues.items()}, **ENVIRONMENT},
    )
