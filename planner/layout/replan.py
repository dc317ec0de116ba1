"""Makes a candidate of a saved plan again, so that the plan can be replayed, traced or changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.answer import Layout, Plan, PricedLayout, StagePlan
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.layout.recipe import under
from planner.layout.split import Split
from planner.physics.pricing import Pricing
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule, placement
from planner.schedule.torch_csv import made_order
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.training import Recompute
from planner.trainers.spec import RuntimeSpec


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
    return Shape.of(
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        pp=layout.pp,
        vpp=layout.vpp,
        dp=layout.dp,
        micro_batch_size=layout.micro_batch_size,
        num_microbatches=layout.num_microbatches,
        seq_length=seq_length,
        sequence_parallel=int(layout.sequence_parallel),
        zero_stage=layout.zero_stage,
        shard_size=layout.shard_size,
        dp_outermost=int(layout.dp_outermost),
    )


def layout_again(plan: Plan, candidate: Candidate, exact: bool = True) -> PricedLayout:
    """The plan's best layout, priced as `candidate`, with the warnings that it had."""
    layout = price_layout(candidate, exact=exact)
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
    """Number of recomputed layers of each kind in each chunk of a stage, of which only their sum is known.

    All chunks recompute the same number of layers, their first ones, as far as a chunk has so many.
    """
    count, sizes = stage.recompute.get("full", 0), [last - first for first, last in stage.chunks]
    per_chunk = next(n for n in range(max(sizes) + 1) if sum(min(n, size) for size in sizes) >= count)
    recomputed = [model.layers[first : min(first + per_chunk, last)] for first, last in stage.chunks]
    return [tuple(layers.count(kind) for kind in model.kinds) for layers in recomputed]
