"""The priced layout that a plan shows, made from a candidate: stages, seconds, memory, parts of the step, tiers.

The way back is here too: a saved plan becomes a candidate again, to be replayed, traced or changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.answer import (
    Evidence,
    Layout,
    NarrowScaling,
    Placement,
    Plan,
    PricedLayout,
    StageMemory,
    StagePlan,
    StepBreakdown,
    StepTime,
)
from planner.errors import SpecError
from planner.layout.candidate import Candidate, Modes, Split
from planner.layout.confidence import with_intervals
from planner.layout.seconds import Pipeline
from planner.layout.variation import recipe_of, under
from planner.months.losses import with_sustained
from planner.physics.communication import Places, data_parallel_places, members_by_tier
from planner.physics.cost import PartCost
from planner.physics.layers import ModelTotals
from planner.physics.memory import frozen_weights_bytes
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import StageBytes, host_bytes
from planner.schedule.actions import Schedule
from planner.schedule.graph import made_order
from planner.schedule.orders import build_schedule, placement
from planner.shape import Number, Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.model_parts import Scaling
from planner.specs.training import Recompute
from planner.trainers.spec import RuntimeSpec


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
    layout = with_intervals(pricing, layout, pricing.host_fraction(candidate.shape), candidate.hidden_s)
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


_SIZES = (
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "num_microbatches", "zero_stage", "shard_size",
)  # fmt: skip
"""Sizes that a layout and a shape have alike."""


def parallelism_of(candidate: Candidate) -> Layout:
    """The sizes of a candidate as a plan shows them."""
    shape, split = candidate.shape, candidate.split
    recompute = split.recompute
    used = int(shape.num_ranks)
    return Layout(
        **{axis: int(getattr(shape, axis)) for axis in _SIZES},
        schedule=candidate.order_name,
        sequence_parallel=bool(shape.sequence_parallel),
        rank_order=shape.rank_order,
        recompute=recompute,
        recompute_num_layers=split.recompute_num_layers,
        recompute_modules=candidate.pricing.selective_modules if recompute == "selective" else (),
        num_gpus_used=used,
        num_gpus_spare=candidate.pricing.cluster.num_gpus - used,
        host_bytes=round(float(host_bytes(candidate.pricing, shape))),
    )


def _stage(candidate: Candidate, rank: int, pipeline: Pipeline, layer_modes: Sequence[Modes]) -> StagePlan:
    split, ranks, cost = candidate.split, candidate.placement, candidate.rank_costs[rank]
    chunks = [stage for stage, holder in enumerate(ranks) if holder == rank]
    bounds, modes = split.chunks, dict[str, int]()
    for stage in chunks:
        for (_, mode), count in layer_modes[stage].items():
            modes[mode] = modes.get(mode, 0) + count
    return StagePlan(
        stage=rank,
        chunks=tuple(bounds[stage] for stage in chunks),
        num_layers=sum(modes.values()),
        holds=tuple(name for stage in chunks for name, _ in candidate.parts_beside_layers(stage)),
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


ITEMS = tuple(name for name in StageMemory.model_fields if name not in ("total_bytes_interval", "frozen_weights_bytes"))
"""Bytes of a stage's memory that are counted."""


def _memory(stage: StageBytes, frozen_bytes: Number) -> StageMemory:
    counted = {name: getattr(stage, name) for name in ITEMS}
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


def placements(shape: Shape, cluster: ClusterSpec) -> tuple[Placement, ...]:
    """The groups of more than one rank, the innermost first, each with the outermost tier that its exchanges cross."""
    return tuple(_placements(shape, cluster))


def groups_of(shape: Shape) -> list[tuple[str, int, Places]]:
    """Name, ranks and places of each group; that of data parallelism has the ranks of context parallelism too."""
    data_parallel, _ = data_parallel_places(shape)
    return [
        ("tp", int(shape.tp), 1),
        ("cp", int(shape.cp), shape.tp),
        ("ep", int(shape.ep), shape.etp),
        ("dp", int(shape.dp * shape.cp), data_parallel),
        ("pp", int(shape.pp), int(shape.stage_stride)),
    ]


def _placements(shape: Shape, cluster: ClusterSpec) -> Iterator[Placement]:
    """`placements`; the width of a group is the number of ranks from its first to its last."""
    whole, domain = int(shape.num_ranks), cluster.nvlink_domain_size
    widths = {
        "tp": int(shape.tp),
        "cp": int(shape.tp * shape.cp),
        "ep": int(shape.ep * shape.etp),
        "dp": whole if shape.dp_outermost else int(whole / shape.pp),
        "pp": int(shape.pp) * int(shape.stage_stride),
    }
    for group, size, places in groups_of(shape):
        told, width = int(shape.dp) if group == "dp" else size, widths[group]
        if told == 1:
            continue
        level = [int(count) for count in members_by_tier(size, places, cluster.tiers)].index(size)
        shares = level == 0 and width <= domain < cluster.num_gpus and domain % width > 0
        yield Placement(
            group=group,  # type: ignore[arg-type]
            size=told,
            tier=cluster.tiers[level].name,
            is_inside_nvlink=level == 0,
            tier_gpus=cluster.tiers[level].num_gpus,
            oversubscription=cluster.tiers[level].oversubscription,
            fills_gpus=domain // width * width if shares else None,
        )


def reprice(
    plan: Plan, layout: PricedLayout, modules: tuple[str, ...] | None = None, headroom_bytes: float = 0.0
) -> Candidate:
    """Price `layout` again from the plan's own specs; the same numbers come out, but where other `modules` than its own
    are recomputed selectively. With a headroom it fits only if it leaves so much free."""
    chosen = layout.parallelism
    pricing = Pricing(
        model=plan.model.spec,
        training=plan.training,
        cluster=plan.cluster,
        runtime=layout.runtime_spec or plan.runtime_spec,
        selective_modules=chosen.recompute_modules or ("core_attn",) if modules is None else modules,
        headroom_bytes=headroom_bytes,
    )
    shape = shape_of(chosen, plan.training.seq_length)
    # of a named schedule the actions are not needed here, and a large batch has billions of them
    made = order_of(layout) if layout.actions else None
    ranks = placement(chosen.schedule, chosen.pp, chosen.vpp) if made is None else made.stage_to_rank
    return Candidate(
        pricing=pricing,
        table=pricing.table(shape),
        split=_split(plan, layout, ranks),
        schedule=chosen.schedule if made is None else named_schedule(layout, made),
        made_order=made,
        rank_factors=tuple(layout.rank_factors),
    )


def shape_of(layout: Layout, seq_length: int) -> Shape:
    """The sizes of a layout, as rules and prices take them. Raises SpecError for a size that is none."""
    sizes = {name: int(getattr(layout, name)) for name in (*_SIZES, "sequence_parallel", "dp_outermost")}
    return Shape.of(**sizes, seq_length=seq_length)


def layout_again(plan: Plan, candidate: Candidate) -> PricedLayout:
    """The plan's best layout, priced as `candidate`, with the warnings that it had."""
    layout = price_layout(candidate)
    return layout.model_copy(update={"warnings": plan.best.warnings, "id": plan.best.id})


def under_trainer(plan: Plan, runtime: RuntimeSpec, modules: tuple[str, ...]) -> Plan:
    """The plan as another trainer runs it: its best layout under `runtime`, where `selective` recomputes `modules`.

    Ranks are numbered in that trainer's own order if it does not have the plan's.
    """
    best = plan.best
    if best.parallelism.rank_order not in runtime.rank_orders:
        sizes = best.parallelism.model_copy(update={"rank_order": runtime.rank_orders[0]})
        best = best.model_copy(update={"parallelism": sizes})
    candidate = reprice(plan, best)
    pricing = replace(candidate.pricing, selective_modules=modules)
    again = under(candidate.priced_as(pricing), runtime)
    update = {
        "best": layout_again(plan, again),
        "runtime": runtime.name,
        "runtime_spec": again.pricing.runtime,
        "alternatives": (),
        "planned_as": plan.as_planned,
    }
    return plan.model_copy(update=update)


def named_schedule(layout: PricedLayout, order: Schedule) -> str:
    """Name of the layout's schedule; for an order made to measure, of one that places its stages in the same way."""
    if not layout.actions:
        return layout.parallelism.schedule
    ranks = order.stage_to_rank
    return "zb-v" if len(ranks) > 1 and ranks[0] == ranks[-1] else "1f1b"


def with_microbatches(layout: PricedLayout, num_microbatches: int | None) -> PricedLayout:
    """The layout for a step of `num_microbatches`; None keeps its own number.

    Raises SpecError where there are none, or its schedule was made for one length only.
    """
    if num_microbatches is not None and num_microbatches < 1:
        raise SpecError(f"--micro-batches: {num_microbatches} is below 1", "leave it out for the plan's")
    if num_microbatches is None or num_microbatches == layout.parallelism.num_microbatches:
        return layout
    if layout.actions:
        raise SpecError("--micro-batches: this order was made to measure for its own step", "leave it out")
    chosen = layout.parallelism.model_copy(update={"num_microbatches": num_microbatches})
    return layout.model_copy(update={"parallelism": chosen})


def num_actions(layout: PricedLayout) -> int:
    """The number of actions of a layout's step, counted without making them."""
    chosen = layout.parallelism
    if layout.actions:
        return sum(len(line.split()) for line in layout.actions)
    few = min(chosen.num_microbatches, 4 * chosen.pp)
    order = build_schedule(chosen.schedule, chosen.pp, chosen.vpp, few)
    return sum(map(len, order.ranks)) * chosen.num_microbatches // few


def order_of(layout: PricedLayout) -> Schedule:
    """Action lists of a layout: its own where they were made to measure, else those of the named schedule."""
    chosen = layout.parallelism
    if not layout.actions:
        return build_schedule(chosen.schedule, chosen.pp, chosen.vpp, chosen.num_microbatches)
    return made_order(layout.actions, chosen.schedule)


def _split(plan: Plan, layout: PricedLayout, ranks: Sequence[int]) -> Split:
    """The split of a layout; where the layout only counts a stage's recomputed layers, its chunks share them."""
    model = plan.model.spec
    seen = [0] * layout.parallelism.pp
    counts, recomputed, mtp_stage = [], [], None
    for virtual, rank in enumerate(ranks):
        stage = layout.stages[rank]
        first, last = stage.chunks[seen[rank]]
        counts.append(last - first)
        recomputed.append((stage.num_recomputed or _shared_out(stage, model))[seen[rank]])
        seen[rank] += 1
        if "mtp" in stage.holds:
            mtp_stage = virtual
    modes = {mode for stage in layout.stages for mode in stage.recompute}
    base: Recompute = "selective" if "selective" in modes else "none"
    return Split(tuple(counts), base, tuple(recomputed) if any(map(any, recomputed)) else (), mtp_stage)


def _shared_out(stage: StagePlan, model: ModelSpec) -> list[tuple[int, ...]]:
    """Number of recomputed layers of each kind in each chunk of a stage, of which only their sum is known."""
    chunks = zip(stage.chunks, stage.recomputed_in_chunks, strict=True)
    recomputed = [model.layers[first : first + count] for (first, _), count in chunks]
    return [tuple(layers.count(kind) for kind in model.kinds) for layers in recomputed]
