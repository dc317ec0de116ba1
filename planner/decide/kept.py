"""A layout that was chosen for one job, kept in another: with other tokens, sequences, batches or GPUs."""

from __future__ import annotations

from planner.answer import Plan, PricedLayout
from planner.errors import SpecError
from planner.layout.assemble import assemble
from planner.layout.assumptions import told_assumptions
from planner.layout.candidate import Candidate
from planner.layout.evaluate import export_warnings
from planner.layout.price import price_layout
from planner.layout.recipe import setting_of
from planner.layout.replan import reprice, with_microbatches
from planner.layout.risk import headroom_bytes
from planner.schedule.orders import violation
from planner.specs.training import SearchLimits, TrainingSpec
from planner.specs.units import gib
from planner.trainers.rules.recipe import broken_recipe_rules, rules_for
from planner.trainers.spec import RuntimeSpec


def kept(
    plan: Plan, layout: PricedLayout, runtime: RuntimeSpec, training: TrainingSpec, limits: SearchLimits
) -> Candidate | str:
    """The layout in the job of `plan`, in a step of `training`; the reason where it cannot run there or fit."""
    chosen, batch = layout.parallelism, training.global_batch_size
    if chosen.num_gpus_used > plan.cluster.num_gpus:
        return f"it takes {chosen.num_gpus_used:,} GPUs"
    per_microbatch = chosen.dp * chosen.micro_batch_size
    if batch % per_microbatch:
        return f"dp {chosen.dp} × micro-batch {chosen.micro_batch_size} does not divide a batch of {batch:,}"
    job = plan.model_copy(update={"training": training, "runtime_spec": runtime})
    num_microbatches = batch // per_microbatch
    try:
        if not layout.actions and (error := violation(chosen.schedule, chosen.pp, chosen.vpp, num_microbatches)):
            return error.message
        moved = with_microbatches(layout.model_copy(update={"runtime_spec": runtime}), num_microbatches)
    except SpecError:
        return "its order was made to measure for another number of micro-batches"
    return refused(reprice(job, moved), limits)


def refused(candidate: Candidate, limits: SearchLimits) -> Candidate | str:
    """The candidate, or the reason why the trainer refuses it or its fullest rank has too little memory."""
    pricing, shape = candidate.pricing, candidate.shape
    for rule in rules_for(pricing.runtime):
        if not rule.holds(pricing.model, pricing.training, shape):
            return rule.message(pricing.model, pricing.training, shape)
    for broken in broken_recipe_rules(setting_of(candidate)):
        return f"{pricing.runtime.name}: {broken.says}"
    short_bytes = max(candidate.excess_bytes) + headroom_bytes(pricing, limits)
    return f"it lacks {gib(short_bytes):,.1f} GiB" if short_bytes > 0 else candidate


def plan_of(candidate: Candidate) -> Plan:
    """The plan whose best layout is the candidate, in whose job nothing was searched."""
    pricing = candidate.pricing
    layout = price_layout(candidate, pricing.totals)
    layout = layout.model_copy(update={"warnings": export_warnings(pricing)})
    return assemble(pricing, pricing.totals, [layout], told_assumptions(candidate))
