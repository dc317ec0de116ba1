"""From a shape and a split to a priced layout: stages, replayed time, memory in time order, where the seconds go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.physics.cost import CostTable, PartCost, Pricing
from planner.physics.layers import ModelTotals, model_totals
from planner.physics.memory import reserved_bytes
from planner.physics.operators import BF16
from planner.physics.shape import FloatArray
from planner.plan import Evidence, Layout, PricedLayout, StageMemory, StagePlan, StepBreakdown, StepTime
from planner.schedule.actions import KINDS, ActionList, Schedule
from planner.schedule.orders import build_schedule, placement
from planner.schedule.replay import Durations, makespan_s, replay
from planner.schedule.timeline import Timeline
from planner.search.ends import Ends, ends_of
from planner.search.split import Split, held_parts, stage_costs
from planner.specs.training import Recompute

STEADY_ROUNDS = (3, 4)
"""Rounds of pp micro-batches after which a pipeline repeats itself: the search replays these and extrapolates; what is
reported is replayed in full."""
SETTLED = 1e-3
"""How much slower than its busiest rank a pipeline may be that repeats itself."""


def durations_of(table: CostTable, costs: list[PartCost], pricing: Pricing) -> Durations:
    """Seconds of every virtual stage as the replay takes them, the trainer's host time per micro-batch included."""
    host_s = pricing.runtime.microbatch_overhead_s / 2
    runtime = pricing.runtime
    overlaps = runtime.interleaved_p2p_overlap if int(table.shape.vpp) > 1 else runtime.p2p_overlap
    return Durations(
        forward_s=[float(cost.forward_total_s) + host_s for cost in costs],
        input_grad_s=[float(cost.input_grad_total_s) + host_s for cost in costs],
        weight_grad_s=[float(cost.weight_grad_s) for cost in costs],
        p2p_s=float(table.p2p_s),
        blocking_p2p=not overlaps,
        activation_bytes=[float(cost.live_bytes) for cost in costs],
    )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the replay says of one step's pipeline; arrays are per rank."""

    num_microbatches: int
    makespan_s: float
    busy_s: FloatArray
    transfer_s: FloatArray
    """Time a rank waits for transfers under way."""
    in_flight_microbatches: FloatArray

    @property
    def bubble_fraction(self) -> float:
        """Idle share over all ranks."""
        return 1 - float(self.busy_s.mean()) / self.makespan_s if self.makespan_s else 0.0


def run_pipeline(
    table: CostTable, durations: Durations, schedule: str, exact: bool = True, order: Schedule | None = None
) -> Pipeline:
    """Replay one step; unless `exact`, a few rounds of it, the rest like the last of them."""
    if order is not None:
        return _pipeline(replay(order, durations))
    shape = table.shape
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    makespan = None if exact else _extrapolated_s(table, durations, schedule)
    if makespan is None:
        return _pipeline(replay(build_schedule(schedule, pp, vpp, wanted), durations))
    rounds = _pipeline(replay(build_schedule(schedule, pp, vpp, STEADY_ROUNDS[1] * pp), durations))
    times = wanted / rounds.num_microbatches
    busy = rounds.busy_s * times
    # the fill's transfers are no more for a longer step: what a rank does not compute is the most it can wait
    transfer = np.minimum(rounds.transfer_s * times, np.maximum(makespan - busy, 0.0))
    return replace(rounds, num_microbatches=wanted, makespan_s=makespan, busy_s=busy, transfer_s=transfer)


def _extrapolated_s(table: CostTable, durations: Durations, schedule: str) -> float | None:
    """The makespan from two short replays, where beyond them every further micro-batch adds the same; else None."""
    shape = table.shape
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    short, long = (rounds * pp for rounds in STEADY_ROUNDS)
    if pp == 1 or wanted <= long or wanted % pp:
        return None
    few, more = (makespan_s(build_schedule(schedule, pp, vpp, m), durations) for m in (short, long))
    slope = (more - few) / (long - short)
    return more + slope * (wanted - long) if _is_settled(slope, durations, _placement(table, schedule)) else None


def _is_settled(slope_s: float, durations: Durations, placement: Sequence[int]) -> bool:
    """Whether a further micro-batch takes as long as the rank that is busiest with it: till then the pace may change.

    A rank that waits for its transfers is busy with them too: of the two turns a micro-batch (forward to backward and
    back), the first and the last rank exchange something in one.
    """
    busy = [0.0] * (max(placement) + 1)
    parts = zip(placement, durations.forward_s, durations.input_grad_s, durations.weight_grad_s, strict=True)
    for rank, *seconds in parts:
        busy[rank] += sum(seconds)
    if durations.blocking_p2p and len(placement) == len(busy):
        turns = [1 if rank in (0, len(busy) - 1) else 2 for rank in range(len(busy))]
        busy = [t + n * float(durations.p2p_s) for t, n in zip(busy, turns, strict=True)]  # type: ignore[arg-type]
    return max(busy) * (1 - 1e-9) <= slope_s <= max(busy) * (1 + SETTLED)


def _pipeline(timeline: Timeline) -> Pipeline:
    return Pipeline(
        num_microbatches=timeline.schedule.num_microbatches,
        makespan_s=timeline.makespan_s,
        busy_s=timeline.busy_s,
        transfer_s=timeline.idle_s["transfer"],
        in_flight_microbatches=timeline.peak_in_flight_microbatches,
    )


def step_s(
    pricing: Pricing, table: CostTable, split: Split, schedule: str, rank_factors: Sequence[float] = ()
) -> float:
    """Seconds of one step: what the search compares, without the report around it."""
    ranks_of = _placement(table, schedule)
    costs = stage_costs(table, pricing.model, split, ranks_of, rank_factors)
    durations = durations_of(table, costs, pricing)
    pipeline = _extrapolated_s(table, durations, schedule)
    if pipeline is None:
        pipeline = makespan_s(build_order(table, schedule), durations)
    return pipeline + sum(ends_of(pricing, table, cost_by_rank(costs, ranks_of)))


def cost_by_rank(costs: Sequence[PartCost], placement: Sequence[int]) -> list[PartCost]:
    """Costs of all chunks of each rank together."""
    totals: dict[int, PartCost] = {}
    for cost, rank in zip(costs, placement, strict=True):
        totals[rank] = totals[rank] + cost if rank in totals else cost
    return [totals[rank] for rank in range(len(totals))]


def _placement(table: CostTable, schedule: str) -> tuple[int, ...]:
    return placement(schedule, int(table.shape.pp), int(table.shape.vpp))


@lru_cache(maxsize=64)
def _held_changes(order: Schedule) -> tuple[tuple[npt.NDArray[np.int32], FloatArray], ...]:
    """Per rank, along its actions: the virtual stage, and +1 where an activation is kept, −1 where it is freed."""
    change = np.array([{"F": 1.0, "I": 0.0}.get(kind, -1.0) for kind in KINDS])
    return tuple((actions.stage, change[actions.kind]) for actions in map(ActionList.of, order.ranks))


def peak_activation_bytes(order: Schedule, live_bytes: list[float]) -> list[float]:
    """The most that micro-batches in flight hold on each rank, by the order of its actions (times do not matter)."""
    live = np.asarray(live_bytes)
    return [float(np.cumsum(sign * live[stage]).max()) for stage, sign in _held_changes(order)]


def _few_rounds(table: CostTable, schedule: str) -> Schedule:
    """The schedule over as many micro-batches as it takes to hold all that it will ever hold."""
    shape = table.shape
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    few = STEADY_ROUNDS[0] * pp
    return build_schedule(schedule, pp, vpp, few if few < wanted and wanted % pp == 0 else wanted)


def build_order(table: CostTable, schedule: str) -> Schedule:
    """The whole step's action lists."""
    shape = table.shape
    return build_schedule(schedule, int(shape.pp), int(shape.vpp), int(shape.num_microbatches))


def room_bytes(pricing: Pricing, table: CostTable, costs: list[PartCost], ranks_of: Sequence[int]) -> list[float]:
    """What each rank has left for activations beside its static bytes and what an operator or the loss needs."""
    fixed = fixed_workspace_bytes(pricing, table)
    moments = [max(float(rank.transient_bytes), float(rank.logits_bytes)) for rank in cost_by_rank(costs, ranks_of)]
    static = [float(rank.static_bytes) for rank in cost_by_rank(costs, ranks_of)]
    return [float(table.usable_bytes) - fixed - a - b for a, b in zip(static, moments, strict=True)]


def split_fits(pricing: Pricing, table: CostTable, split: Split, schedule: str) -> bool:
    """Whether every stage fits when the schedule's own order says what it holds in flight."""
    ranks_of = _placement(table, schedule)
    costs = stage_costs(table, pricing.model, split, ranks_of)
    order = _few_rounds(table, schedule)
    peaks = peak_activation_bytes(order, [float(cost.live_bytes) for cost in costs])
    capacity = pricing.cluster.hardware.memory_bytes - pricing.headroom_bytes
    return all(
        stage_memory(pricing, table, total, peak).total_bytes <= capacity
        for total, peak in zip(cost_by_rank(costs, ranks_of), peaks, strict=True)
    )


def price_layout(
    pricing: Pricing,
    table: CostTable,
    split: Split,
    schedule: str,
    num_gpus: int,
    totals: ModelTotals | None = None,
    exact: bool = True,
    order: Schedule | None = None,
    rank_factors: Sequence[float] = (),
) -> PricedLayout:
    """Everything a plan says about one layout; `order` replaces the named schedule's action lists."""
    ranks_of = _placement(table, schedule)
    costs = stage_costs(table, pricing.model, split, ranks_of, rank_factors)
    ranks, shape = cost_by_rank(costs, ranks_of), table.shape
    pipeline = run_pipeline(table, durations_of(table, costs, pricing), schedule, exact, order)
    peaks = peak_activation_bytes(order or _few_rounds(table, schedule), [float(cost.live_bytes) for cost in costs])
    ends = ends_of(pricing, table, ranks)
    stages = tuple(
        _stage(pricing, table, split, costs, ranks_of, float(pipeline.in_flight_microbatches[rank]), peaks[rank], rank)
        for rank in range(int(shape.pp))
    )
    capacity = pricing.cluster.hardware.memory_bytes - pricing.headroom_bytes
    totals = totals or model_totals(pricing.model, pricing.runtime, pricing.training.seq_length)
    return PricedLayout(
        evidence=evidence_of(pricing),
        fits=all(stage.memory.total_bytes <= capacity for stage in stages),
        parallelism=_layout(pricing, table, split, schedule if order is None else order.name, num_gpus),
        actions=() if order is None else tuple(" ".join(map(str, actions)) for actions in order.ranks),
        rank_factors=tuple(rank_factors),
        stages=stages,
        step=_step(pricing, pipeline, ranks, ends, totals, num_gpus, float(shape.num_ranks)),
    )


def evidence_of(pricing: Pricing) -> Evidence:
    """`probed` where a probe corrected the profile, `calibrated` where the GPU or its silicon family was measured."""
    found: dict[str, Evidence] = {"spec_sheet": "spec_sheet", "probed": "probed"}
    return found.get(pricing.cluster.hardware.efficiency.evidence, "calibrated")


def _layout(pricing: Pricing, table: CostTable, split: Split, schedule: str, num_gpus: int) -> Layout:
    shape = table.shape
    recompute: Recompute = "full" if any(map(any, split.recomputed)) else split.base
    used = int(shape.num_ranks)
    return Layout(
        tp=int(shape.tp),
        cp=int(shape.cp),
        ep=int(shape.ep),
        etp=int(shape.etp),
        pp=int(shape.pp),
        vpp=int(shape.vpp),
        dp=int(shape.dp),
        micro_batch_size=int(shape.micro_batch_size),
        num_microbatches=int(shape.num_microbatches),
        schedule=schedule,
        zero_stage=int(shape.zero_stage),
        shard_size=int(shape.shard_size),
        sequence_parallel=bool(shape.sequence_parallel),
        recompute=recompute,
        recompute_modules=pricing.selective_modules if recompute == "selective" else (),
        num_gpus_used=used,
        num_gpus_spare=num_gpus - used,
    )


def _stage(
    pricing: Pricing,
    table: CostTable,
    split: Split,
    costs: list[PartCost],
    ranks_of: Sequence[int],
    in_flight: float,
    activations: float,
    rank: int,
) -> StagePlan:
    virtual = [j for j, holder in enumerate(ranks_of) if holder == rank]
    total = sum((costs[j] for j in virtual[1:]), costs[virtual[0]])
    folded = ranks_of[0] == ranks_of[-1]
    layer_modes, modes = split.modes(pricing.model), dict[str, int]()
    for j in virtual:
        for (_, mode), count in layer_modes[j].items():
            modes[mode] = modes.get(mode, 0) + count
    return StagePlan(
        stage=rank,
        chunks=tuple(split.chunks[j] for j in virtual),
        num_layers=sum(modes.values()),
        holds=tuple(name for j in virtual for name, _ in held_parts(table, split, j, folded)),
        recompute=modes,
        in_flight_microbatches=in_flight,
        forward_s=float(total.forward_s),
        backward_s=float(total.input_grad_s + total.weight_grad_s),
        weight_grad_s=float(total.weight_grad_s),
        forward_comm_s=float(total.forward_total_s - total.forward_s),
        backward_comm_s=float(total.input_grad_total_s - total.input_grad_s),
        optimizer_s=float(total.optimizer_s),
        num_parameters=round(float(total.parameters)),
        memory=stage_memory(pricing, table, total, activations),
    )


def stage_memory(pricing: Pricing, table: CostTable, total: PartCost, activations: float) -> StageMemory:
    """Bytes at the stage's worst moment: the loss with all activations held, or a layer's backward after it.

    `activations` is the most that micro-batches in flight hold. While the loss runs its logits come on top; afterwards
    they are gone and a layer's backward needs its transient bytes.
    """
    weights, gradients, optimizer = (
        round(float(b)) for b in (total.weights_bytes, total.gradients_bytes, total.optimizer_bytes)
    )
    workspace = float(total.transient_bytes) + fixed_workspace_bytes(pricing, table)
    logits = float(total.logits_bytes)
    in_loss = logits > float(total.transient_bytes)
    logits, workspace = (logits, workspace - float(total.transient_bytes)) if in_loss else (0.0, workspace)
    items = [weights, gradients, optimizer, round(activations), round(logits), round(workspace)]
    allocated = sum(items)
    reserved = round(float(reserved_bytes(allocated, table.shape, pricing.cluster.hardware)))
    return StageMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=items[3],
        logits_bytes=items[4],
        workspace_bytes=items[5],
        reserved_bytes=reserved,
        peak_allocated_bytes=allocated,
        total_bytes=allocated + reserved,
    )


def fixed_workspace_bytes(pricing: Pricing, table: CostTable) -> float:
    """Buffers of every rank: the gradient from the next stage; the two layers that unpipelined ZeRO-3 gathers."""
    shape = table.shape
    if int(shape.pp) > 1:
        return BF16 * float(shape.shard_tokens) * pricing.model.hidden_size
    if int(shape.zero_stage) < 3:
        return 0.0
    return 2 * BF16 * max(float(part.parameters) for part in (*table.layers.values(), table.head))


def _step(
    pricing: Pricing,
    pipeline: Pipeline,
    ranks: list[PartCost],
    ends: Ends,
    totals: ModelTotals,
    num_gpus: int,
    num_ranks: float,
) -> StepTime:
    exposed, optimizer, tail = ends
    total_s = pipeline.makespan_s + exposed + optimizer + tail
    tokens = pricing.training.tokens_per_step
    flops_per_s = totals.model_flops_per_token * tokens / total_s / num_ranks
    peak = pricing.cluster.hardware.peak_flops("bf16")
    return StepTime(
        step_s=total_s,
        tokens_per_s=tokens / total_s,
        tokens_per_s_per_gpu=tokens / total_s / num_gpus,
        model_tflops_per_gpu=flops_per_s / 1e12,
        mfu=flops_per_s / peak if peak else 0.0,
        bubble_fraction=max(0.0, pipeline.bubble_fraction),
        breakdown=_breakdown(pricing, pipeline, ranks, exposed, optimizer, tail),
    )


def _breakdown(
    pricing: Pricing, pipeline: Pipeline, ranks: list[PartCost], exposed: float, optimizer: float, tail: float
) -> StepBreakdown:
    """The busiest rank's seconds: M micro-batches of compute and exchanges, transfers it waits for, the rest idle."""
    busiest = int(np.argmax(pipeline.busy_s))
    cost, times = ranks[busiest], pipeline.num_microbatches
    compute = times * float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)
    tp, cp, ep = (
        times * float(getattr(cost, f"{g}_forward_s") + getattr(cost, f"{g}_backward_s")) for g in ("tp", "cp", "ep")
    )
    pp = float(pipeline.transfer_s[busiest])
    host = float(pipeline.busy_s[busiest]) - compute - tp - cp - ep
    return StepBreakdown(
        compute_s=compute,
        tp_comm_s=tp,
        cp_comm_s=cp,
        ep_comm_s=ep,
        pp_comm_s=pp,
        exposed_dp_s=exposed,
        bubble_s=pipeline.makespan_s - float(pipeline.busy_s[busiest]) - pp,
        optimizer_s=optimizer,
        overhead_s=max(0.0, host) + tail,
    )
