"""From a shape and a split to a priced layout: stages, replayed time, memory, where the seconds go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.answer import Evidence, Layout, PricedLayout, StagePlan, StepBreakdown, StepTime
from planner.layout.confidence import with_intervals
from planner.layout.outside_pipeline import Ends, ends_of
from planner.layout.room import few_rounds, peak_activation_bytes, stage_memory
from planner.layout.seconds import Pipeline, cost_by_rank, durations_of, placement_of, run_pipeline
from planner.layout.split import Split, held_parts, stage_costs
from planner.physics.cost import CostTable, PartCost
from planner.physics.layers import ModelTotals, model_totals
from planner.physics.pricing import Pricing
from planner.schedule.actions import Schedule
from planner.specs.training import Recompute


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
    ranks_of = placement_of(table, schedule)
    costs = stage_costs(table, pricing.model, split, ranks_of, rank_factors)
    ranks, shape = cost_by_rank(costs, ranks_of), table.shape
    pipeline = run_pipeline(table, durations_of(table, costs, pricing), schedule, exact, order)
    peaks = peak_activation_bytes(order or few_rounds(table, schedule), [float(cost.live_bytes) for cost in costs])
    ends = ends_of(pricing, table, ranks, order.name if order else schedule)
    stages = tuple(
        _stage(pricing, table, split, costs, ranks_of, float(pipeline.in_flight_microbatches[rank]), peaks[rank], rank)
        for rank in range(int(shape.pp))
    )
    capacity = pricing.cluster.hardware.memory_bytes - pricing.headroom_bytes
    totals = totals or model_totals(pricing.model, pricing.runtime, pricing.training.seq_length)
    layout = PricedLayout(
        evidence=evidence_of(pricing),
        fits=all(stage.memory.total_bytes <= capacity for stage in stages),
        parallelism=_layout(pricing, table, split, schedule if order is None else order.name, num_gpus),
        actions=() if order is None else tuple(" ".join(map(str, actions)) for actions in order.ranks),
        rank_factors=tuple(rank_factors),
        stages=stages,
        step=_step(pricing, pipeline, ranks, ends, totals, num_gpus, float(shape.num_ranks)),
    )
    return with_intervals(pricing, layout, shape)


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
        num_recomputed=tuple(split.recomputed[j] for j in virtual) if split.recomputed else (),
        in_flight_microbatches=in_flight,
        forward_s=float(total.forward_s),
        backward_s=float(total.input_grad_s + total.weight_grad_s),
        weight_grad_s=float(total.weight_grad_s),
        forward_comm_s=float(total.forward_total_s - total.forward_s),
        backward_comm_s=float(total.input_grad_total_s - total.input_grad_s),
        optimizer_s=float(total.optimizer_s),
        num_parameters=round(float(total.parameters)) + _final_norm_elsewhere(pricing, split, virtual),
        memory=stage_memory(pricing, table, total, activations),
    )


def _final_norm_elsewhere(pricing: Pricing, split: Split, virtual: list[int]) -> int:
    """What a rank holds more than its stages say where Megatron puts the final norm before multi-token prediction.

    The norm goes with the last decoder layer then, and else with the head (transformer_block.py).
    """
    model, trainer = pricing.model, pricing.runtime.family
    if not model.num_nextn_predict_layers or trainer != "megatron":
        return 0
    decoder_ends = max(j for j, count in enumerate(split.counts) if count)
    moves = (decoder_ends in virtual) - (len(split.counts) - 1 in virtual)
    return moves * model.hidden_size * (2 if model.has_norm_bias else 1)


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
