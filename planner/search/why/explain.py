"""Why a layout is the best or, if some axes are pinned, why those values are not chosen.

It is the same search with one input changed: without the pins, under another assumption, or with one limit moved. The
integer program behind a plan is printed with its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.answer import Plan, PricedLayout
from planner.errors import Infeasible, SolverError
from planner.layout import variation
from planner.layout.candidate import Candidate, price_together
from planner.layout.confidence import headroom_bytes
from planner.layout.evaluate import evaluate, job_of, price_given
from planner.layout.price import price_layout, reprice
from planner.layout.variation import Variation
from planner.physics.pricing import Pricing
from planner.record import record
from planner.report.causes import largest_cause, now, says_best, says_misfit, says_slower
from planner.search.case import Case, Deadline
from planner.search.ilp.node import node_of
from planner.search.ilp.program import describe
from planner.search.layouts import some_layout
from planner.search.rebalance import recompute_of
from planner.search.recipes import pinned
from planner.search.search import planned, search, search_dtypes
from planner.search.why.explanation import Beaten, ChangedAssumption, Constraint, Explanation, Lift
from planner.search.why.misses import DOES_NOT_FIT, BrokenRule, Miss, hint_for, nearest_miss, refusal
from planner.search.why.remedy import Trials, first_remedy, remedies
from planner.search.why.room import changes_of, is_small, largest_models, room_of, within_risk
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import SearchLimits, TrainingSpec
from planner.specs.units import gib
from planner.trainers.spec import RuntimeSpec


def explain(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    limits: SearchLimits | None = None,
    runtime: RuntimeSpec | str | None = None,
) -> Explanation:
    """The answer of `plan explain`: why the best layout is the best or, if `limits` pin axes, why not those.

    With pins it plans with them and without them, and says which rule refuses them, why they do not fit, or where the
    seconds go. Without pins it says what decides against each alternative, and what would change the choice. Raises
    Infeasible if nothing fits even without pins.
    """
    model, training, runtime = job_of(model, cluster, training, runtime)
    return explained(Case(model, cluster, training, runtime, limits or SearchLimits()))


def explained(case: Case) -> Explanation:
    """The answer of `explain` about a case."""
    case = pinned(case)
    return _why_not(case) if case.pins else _why_this(case)


def _explanation(case: Case, best: Plan, **answer: Any) -> Explanation:
    cluster = case.cluster
    return Explanation(
        job=f"{case.model.name} on {cluster.num_gpus:,} × {cluster.hardware.name}, {case.runtime.name}",
        asked=case.pins,
        capacity_bytes=cluster.hardware.memory_bytes,
        corrections=cluster.hardware.corrections,
        best=best.best,
        **answer,
    )


def _why_not(case: Case) -> Explanation:
    """Search with the pins and without them, and explain the difference between the two answers."""
    refused = refusal(case)
    best = planned(case.free().limited(top=1))
    if refused is not None:
        return _why_refused(case, best, refused)
    try:
        pinned = search_dtypes(case.limited(top=1))
    except Infeasible as error:
        return _why_no_room(case, best, error)
    return _why_slower(case, best, pinned)


def _why_refused(case: Case, best: Plan, refused: BrokenRule) -> Explanation:
    return _explanation(
        case,
        best,
        verdict="refused",
        says=f"Refused, {refused.reason.replace('_', ' ')}: {refused.says}.",
        reason=refused.reason,
        rejections=refused.rejections.counts,
        rejection_examples=refused.rejections.examples,
        lifts=_lifts(case, best, refused.reason, _trials(case)),
        hint=hint_for(refused.reason, case),
    )


def _why_no_room(case: Case, best: Plan, error: Infeasible) -> Explanation:
    miss, trials = nearest_miss(case.filling), _trials(case)
    nearest, says = None, error.message
    if miss is not None:
        nearest = price_given(case.model, case.cluster, case.training, miss.layout, case.runtime)
        says = says_misfit(nearest, case.cluster, case.limits.memory_headroom_gib or 0.0)
    lifts = _lifts(case, best, DOES_NOT_FIT, trials)
    remedy = None if lifts else first_remedy(case, DOES_NOT_FIT, trials)
    return _explanation(
        case,
        best,
        verdict="does_not_fit",
        says=says,
        reason=DOES_NOT_FIT,
        rejections=error.rejections,
        pinned=nearest,
        lifts=lifts,
        hint=error.hint if remedy is None else remedy.says,
    )


def _trials(case: Case) -> Trials:
    """Trials that together take no longer than one search may."""
    return Trials(Deadline(case.limits.time_limit_s))


def _lifts(case: Case, best: Plan, reason: str, trials: Trials) -> tuple[Lift, ...]:
    """Every change that helps on the same GPUs, with the best layout that it allows."""
    changes = []
    for remedy in list(remedies(case, reason, trials)):
        try:
            chosen = aside(case.under(remedy))
        except (Infeasible, SolverError):  # there was time for the trial, and not for this
            continue
        instead = f" instead of {remedy.replaces}" if remedy.replaces else ""
        changes.append(
            Lift(
                change=f"{' '.join(remedy.options)}{instead}",
                parallelism=chosen.parallelism,
                step_s=chosen.step.step_s,
                more_fraction=chosen.step.step_s / best.step.step_s - 1,
            )
        )
    return tuple(changes)


def _why_slower(case: Case, best: Plan, pinned: Plan) -> Explanation:
    same = pinned.parallelism == best.parallelism and pinned.step.step_s == best.step.step_s
    more, gap = pinned.step.step_s / best.step.step_s - 1, case.limits.gap_fraction
    verdict = "chosen" if same else "slower" if more > gap else "faster" if more < -gap else "as_fast"
    cause = None if same else largest_cause(best.best, pinned.best, case.cluster)
    says = says_slower(best, pinned, cause, gap)
    return _explanation(case, best, verdict=verdict, says=says, pinned=pinned.best, cause=cause)


def _why_this(case: Case) -> Explanation:
    """The explanation without pins: what decides against each alternative, and what would change the choice."""
    try:
        best = planned(case)
    except Infeasible as error:
        miss = nearest_miss(case.filling) if is_small(case) else None
        if miss is None:
            raise
        return _why_too_large(case, miss, error)
    known = _candidates_of(best)
    beaten = [Beaten(layout=other, cause=largest_cause(best.best, other, case.cluster)) for other in best.alternatives]
    return _explanation(
        case,
        best,
        verdict="chosen",
        says=says_best(best),
        room=None if best.room is None else best.room.model_copy(update={"models": largest_models(case)}),
        job_changes=best.changes,
        beaten=tuple(beaten),
        assumptions=tuple(_assumption(case, best, other, known) for other in other_assumptions(case)),
        constraints=tuple(_constraint(case, best, other, known) for other in other_limits(case)),
    )


def _why_too_large(case: Case, miss: Miss, error: Infeasible) -> Explanation:
    """The explanation of a small job of which nothing fits: the nearest layout, and what brings it nearer."""
    nearest = evaluate(case.model, case.cluster, case.training, miss.layout, runtime=case.runtime)
    lacking = within_risk(miss.candidate, case)
    return _explanation(
        case,
        nearest,
        verdict="does_not_fit",
        says=error.message,
        hint=error.hint,
        room=room_of(lacking).model_copy(update={"models": largest_models(case)}),
        job_changes=changes_of(lacking),
    )


def _assumption(case: Case, best: Plan, other: Variation, known: Sequence[Candidate]) -> ChangedAssumption:
    then = outcome(case, other, best, known)
    return ChangedAssumption(
        name=other.name,
        says=other.says,
        changes_the_choice=then.moves(best.best, case.limits.gap_fraction),
        parallelism=None if then.chosen is None else then.chosen.parallelism,
        step_s=None if then.chosen is None else then.chosen.step.step_s,
        kept_step_s=then.kept_s,
        kept_fits=then.kept_fits,
    )


def _constraint(case: Case, best: Plan, other: Variation, known: Sequence[Candidate]) -> Constraint:
    then = outcome(case, other, best, known)
    gain = 0.0 if then.chosen is None else then.chosen.step.tokens_per_s / best.step.tokens_per_s - 1
    binds = gain > case.limits.gap_fraction
    return Constraint(name=other.name, now=now(other.name, best), moved=other.says, gain_fraction=gain, binds=binds)


TIME_LIMIT_S = 10.0
"""Most seconds that a search may take if it is not one of the two main searches."""
MEMORY, ROOM = 0.05, 0.1
"""Fractions by which memory is changed: for an estimate that is too low, and for a larger GPU."""


def aside(case: Case) -> Plan:
    """The plan of a case beside the main one, without alternatives and with a short time limit."""
    return search(case.limited(top=1, time_limit_s=min(TIME_LIMIT_S, case.limits.time_limit_s)))


@record
class Outcome:
    """The layout that is chosen under a change, beside the step that the present choice would take under it."""

    chosen: PricedLayout | None
    """The best layout under the change; None if nothing fits any more."""
    kept_s: float
    """Seconds of a step that the present choice takes under the change."""
    kept_fits: bool

    def moves(self, kept: PricedLayout, gap_fraction: float) -> bool:
        """True if another layout is the better choice under the change, by more than the gap of the searches."""
        if self.chosen is None or self.chosen.parallelism == kept.parallelism:
            return self.chosen is None
        return not self.kept_fits or self.chosen.step.step_s < self.kept_s * (1 - gap_fraction)


def outcome(case: Case, change: Variation, now: Plan, layouts: Sequence[Candidate] = ()) -> Outcome:
    """Price the layouts of `now`, a plan of the case, under a change.

    It is searched again if none of them fits, or if the change gives room. `layouts` are its candidates, where they are
    known.
    """
    then = case.under(change)
    # the present choice keeps its recipe beside the fields that the change is of
    fields = {name: value for name, value in then.runtime if value != getattr(case.runtime, name)}
    kept, *others = _repriced(then, fields, layouts or _candidates_of(now))
    fastest = min((one for one in (kept, *others) if one.fits), key=lambda one: one.step_s, default=None)
    chosen: PricedLayout | None
    try:
        if fastest is None or change.gives_room:
            chosen = some_layout(then, Deadline(TIME_LIMIT_S), fastest, [kept.pricing.runtime]).best
        else:
            chosen = price_layout(fastest, fastest.pricing.totals, exact=False)
    except (Infeasible, SolverError):
        chosen = None
    return Outcome(chosen, kept.run().makespan_s + sum(kept.outside), kept.fits)


def _candidates_of(plan: Plan) -> list[Candidate]:
    """The layouts of a plan as candidates, the best first."""
    return [reprice(plan, layout) for layout in (plan.best, *plan.alternatives)]


def _repriced(case: Case, fields: Mapping[str, Any], layouts: Sequence[Candidate]) -> list[Candidate]:
    """The layouts, each with its recipe, under a change."""
    headroom_bytes = case.headroom_bytes
    starts, pricings = list[Candidate](), list[Pricing]()
    for one in layouts:
        steps = one.num_microbatches * case.training.global_batch_size // one.pricing.training.global_batch_size
        if one.made_order is None and steps != one.num_microbatches:
            one = replace(one, table=replace(one.table, shape=replace(one.shape, num_microbatches=steps)))
        runtime = one.pricing.runtime.model_copy(update=dict(fields))
        pricing = replace(one.pricing, cluster=case.cluster, training=case.training, runtime=runtime)
        starts.append(one)
        pricings.append(replace(pricing, headroom_bytes=headroom_bytes))
    price_together(starts, pricings)
    return [one.priced_as(pricing) for one, pricing in zip(starts, pricings, strict=True)]


def other_assumptions(case: Case) -> Iterator[Variation]:
    """Every assumption that this job makes, and an estimate of memory that is short, each changed by itself."""
    pricing = Pricing(model=case.model, training=case.training, cluster=case.cluster, runtime=case.runtime)
    yield from variation.other_assumptions(pricing)
    short = gib(case.headroom_bytes) + MEMORY * case.cluster.hardware.memory_gib
    says = f"{MEMORY:.0%} {'more ' if case.headroom_bytes else ''}of the memory must stay free"
    yield Variation(
        says, ("--memory-headroom", f"{short:g}"), limits={"memory_headroom_gib": short}, name="memory_headroom"
    )


def other_limits(case: Case) -> Iterator[Variation]:
    """The limits that the job has to obey, each moved by itself: memory, batch, NVLink domain."""
    cluster, hardware = case.cluster, case.cluster.hardware
    larger = cluster.changed(hardware=hardware.model_copy(update={"memory_gib": hardware.memory_gib * (1 + ROOM)}))
    yield Variation(f"{ROOM:.0%} more memory", (), cluster=larger, gives_room=True, name="memory")
    twice = 2 * case.training.global_batch_size
    words = ("--global-batch-size", str(twice))
    yield Variation("twice the batch", words, {"global_batch_size": twice}, gives_room=True, name="batch")
    inner = cluster.tiers[0].num_gpus
    if len(cluster.tiers) > 1 and inner is not None and inner < cluster.num_gpus:
        outer = cluster.tiers[1].num_gpus
        if outer is None or 2 * inner < outer:
            tiers = (cluster.tiers[0].model_copy(update={"num_gpus": 2 * inner}), *cluster.tiers[1:])
            wider = hardware.model_copy(update={"tiers": tiers, "gpus_per_node": cluster.node_size})
            changed = cluster.changed(hardware=wider, gpus_per_node=None, network_gb_per_s=None, network_tiers=())
            says = f"{hardware.a_domain} of {2 * inner}"
            yield Variation(says, (), cluster=changed, gives_room=True, name="domain")


def program_text(plan: Plan, limits: SearchLimits | None = None) -> str:
    """The integer program that splits the layers for the shape, schedule and recompute of the plan's best layout.

    Its ranks leave the headroom of `limits` free, if the layout does so.
    """
    candidate = reprice(plan, plan.best)
    if limits is not None:
        tighter = reprice(plan, plan.best, headroom_bytes=headroom_bytes(candidate.pricing, limits))
        candidate = tighter if tighter.fits else candidate
    choice = recompute_of(candidate.split, plan)
    return describe(node_of(candidate.pricing, candidate.table, choice, candidate.schedule))
