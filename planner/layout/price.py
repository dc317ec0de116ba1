"""Makes the priced layout that a plan shows from a candidate: stages, seconds, memory, the step's parts."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import (
    Evidence,
    Layout,
    NarrowScaling,
    PricedLayout,
    StageMemory,
    StagePlan,
    StepBreakdown,
    StepTime,
)
from planner.layout.candidate import Candidate
from planner.layout.confidence import with_intervals
from planner.layout.placement import placements
from planner.layout.recipe import recipe_of
from planner.layout.seconds import Pipeline
from planner.layout.split import Modes, Split, held_parts
from planner.months.losses import with_sustained
from planner.physics.cost import PartCost
from planner.physics.layers import ModelTotals
from planner.physics.memory import frozen_weights_bytes
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import StageBytes
from planner.shape import Number
from planner.specs.model_parts import Scaling
from planner.specs.training import Recompute


def price_layout(candidate: Candidate, totals: ModelTotals | None = None, exact: bool = True) -> PricedLayout:
    """All that a plan shows of one layout; unless `exact`, a long step is extrapolated from a few rounds."""
    pricing = candidate.pricing
    pipeline = candidate.run(exact)
    totals = totals or pricing.totals
    made = candidate.made_order
    modes = candidate.split.modes(pricing.model)
    layout = PricedLayout(
        evidence=evidence_of(pricing),
        fits=candidate.fits,
        parallelism=parallelism_of(candidate),
        actions=() if made is None else tuple(" ".join(map(str, actions)) for actions in made.ranks),
        rank_factors=candidate.rank_factors,
        stages=tuple(_stage(candidate, rank, pipeline, modes) for rank in range(int(candidate.shape.pp))),
        step=_step(candidate, pipeline, totals),
        recipe=recipe_of(candidate),
        narrow_scaling=scaling_of(pricing),
        rank_order=candidate.shape.rank_order,
        placement=placements(candidate.shape, pricing.cluster),
    )
    layout = with_intervals(pricing, layout, candidate.shape)
    return with_sustained(layout, pricing.training.straggler_fraction)


def scaling_of(pricing: Pricing) -> NarrowScaling | None:
    """The scales of products in 8 or 4 bits: formats with blocks have their own, fp8 one a tensor or a row."""
    training, published = pricing.training, pricing.model.training
    scalings: dict[str, Scaling] = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    scalings["fp8"] = "tensorwise" if pricing.runtime.narrow_factor == 1 else "rowwise"
    if training.dtype not in scalings:
        return None
    return NarrowScaling(scaling=scalings[training.dtype], published=None if published is None else published.scaling)


def evidence_of(pricing: Pricing) -> Evidence:
    """`probed` where a probe or a run corrected or confirmed the profile, `calibrated` where the GPU or its silicon
    family was measured."""
    found: dict[str, Evidence] = {"spec_sheet": "spec_sheet", "probed": "probed"}
    return found.get(pricing.cluster.hardware.efficiency.evidence, "calibrated")


def parallelism_of(candidate: Candidate) -> Layout:
    """The sizes of a candidate as a plan shows them."""
    shape, split = candidate.shape, candidate.split
    recompute: Recompute = "full" if any(map(any, split.recomputed)) else split.base
    used = int(shape.num_ranks)
    axes = (
        "tp",
        "cp",
        "ep",
        "etp",
        "pp",
        "vpp",
        "dp",
        "micro_batch_size",
        "num_microbatches",
        "zero_stage",
        "shard_size",
    )
    return Layout(
        **{axis: int(getattr(shape, axis)) for axis in axes},
        schedule=candidate.order_name,
        sequence_parallel=bool(shape.sequence_parallel),
        rank_order=shape.rank_order,
        recompute=recompute,
        recompute_modules=candidate.pricing.selective_modules if recompute == "selective" else (),
        num_gpus_used=used,
        num_gpus_spare=candidate.pricing.cluster.num_gpus - used,
    )


def _stage(candidate: Candidate, rank: int, pipeline: Pipeline, layer_modes: Sequence[Modes]) -> StagePlan:
    split, ranks, cost = candidate.split, candidate.placement, candidate.rank_costs[rank]
    chunks = [stage for stage, holder in enumerate(ranks) if holder == rank]
    is_folded = ranks[0] == ranks[-1]
    bounds, modes = split.chunks, dict[str, int]()
    for stage in chunks:
        for (_, mode), count in layer_modes[stage].items():
            modes[mode] = modes.get(mode, 0) + count
    return StagePlan(
        stage=rank,
        chunks=tuple(bounds[stage] for stage in chunks),
        num_layers=sum(modes.values()),
        holds=tuple(name for stage in chunks for name, _ in held_parts(candidate.table, split, stage, is_folded)),
        recompute=modes,
        num_recomputed=tuple(split.recomputed[stage] for stage in chunks) if split.recomputed else (),
        in_flight_microbatches=float(pipeline.in_flight_microbatches[rank]),
        forward_s=float(cost.forward_s),
        backward_s=float(cost.input_grad_s + cost.weight_grad_s),
        weight_grad_s=float(cost.weight_grad_s),
        forward_comm_s=float(cost.forward_total_s - cost.forward_s),
        backward_comm_s=float(cost.input_grad_total_s - cost.input_grad_s),
        optimizer_s=float(cost.optimizer_s),
        num_parameters=round(float(cost.parameters)) + _final_norm_elsewhere(candidate.pricing, split, chunks),
        memory=_memory(candidate.memory[rank], _frozen_bytes(candidate, cost)),
    )


def _frozen_bytes(candidate: Candidate, cost: PartCost) -> Number:
    pricing = candidate.pricing
    return frozen_weights_bytes(cost, candidate.shape, pricing.runtime, pricing.training.dtype)


def _memory(stage: StageBytes, frozen_bytes: Number) -> StageMemory:
    names = set(StageMemory.model_fields) - {"total_bytes_interval", "frozen_weights_bytes"}
    counted = {name: getattr(stage, name) for name in names}
    return StageMemory(**counted, frozen_weights_bytes=round(float(frozen_bytes)))


def _final_norm_elsewhere(pricing: Pricing, split: Split, virtual: list[int]) -> int:
    """Correction of ranks' parameters where Megatron puts the final norm before multi-token prediction.

    The norm is then on the stage of the last decoder layer, and else with the head (transformer_block.py).
    """
    model = pricing.model
    if not model.num_nextn_predict_layers or pricing.runtime.family != "megatron":
        return 0
    decoder_ends = max(j for j, count in enumerate(split.counts) if count)
    moves = (decoder_ends in virtual) - (len(split.counts) - 1 in virtual)
    return moves * model.hidden_size * (2 if model.has_norm_bias else 1)


def _step(candidate: Candidate, pipeline: Pipeline, totals: ModelTotals) -> StepTime:
    pricing = candidate.pricing
    exposed_s, optimizer_s, tail_s = candidate.outside
    total_s = pipeline.makespan_s + exposed_s + optimizer_s + tail_s
    tokens = pricing.training.tokens_per_step
    # GPUs that are paid for and idle bring the rate down
    flops_per_s = totals.model_flops_per_token * tokens / total_s / pricing.cluster.num_gpus
    peak = pricing.cluster.hardware.peak_flops("bf16")
    return StepTime(
        step_s=total_s,
        tokens_per_s=tokens / total_s,
        tokens_per_s_per_gpu=tokens / total_s / pricing.cluster.num_gpus,
        model_tflops_per_gpu=flops_per_s / 1e12,
        mfu=flops_per_s / peak if peak else 0.0,
        bubble_fraction=max(0.0, pipeline.bubble_fraction),
        breakdown=_breakdown(candidate, pipeline),
    )


def _breakdown(candidate: Candidate, pipeline: Pipeline) -> StepBreakdown:
    """Seconds of the busiest rank: M micro-batches of compute and exchanges, waits for transfers, other idle time."""
    busiest = pipeline.busiest
    cost, times, outside = candidate.rank_costs[busiest], pipeline.num_microbatches, candidate.outside
    compute = times * float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)
    tp, cp, ep = (times * float(sum(cost.exchanges_s[group])) for group in ("tp", "cp", "ep"))
    pp = float(pipeline.transfer_s[busiest])
    host = float(pipeline.busy_s[busiest]) - compute - tp - cp - ep
    return StepBreakdown(
        compute_s=compute,
        tp_comm_s=tp,
        cp_comm_s=cp,
        ep_comm_s=ep,
        pp_comm_s=pp,
        exposed_dp_s=outside.exposed_dp_s,
        bubble_s=pipeline.makespan_s - float(pipeline.busy_s[busiest]) - pp,
        optimizer_s=outside.optimizer_s,
        overhead_s=max(0.0, host) + outside.tail_s,
    )
