"""The answer to why a layout is the best or, if some axes are pinned, why those values are not chosen."""

from __future__ import annotations

from typing import Any

from planner.answer import Plan
from planner.answer.small import Room
from planner.errors import Infeasible, SolverError
from planner.layout.candidate import Candidate
from planner.layout.evaluate import evaluate, price_given, runtime_of
from planner.report.causes import largest_cause, now, says_best, says_misfit, says_slower
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.first import some_layout
from planner.search.recipes import pinned
from planner.search.search import plan, search
from planner.search.why.explanation import Beaten, Change, ChangedAssumption, Constraint, Explanation
from planner.search.why.misses import Miss, nearest_miss
from planner.search.why.refused import Refusal, hint_for, refusal
from planner.search.why.remedy import DOES_NOT_FIT, Trials, first_remedy, remedies
from planner.search.why.room import is_small, largest_models, nearest_changes, room_of, within_risk
from planner.search.why.what_if import Outcome, WhatIf, aside, other_assumptions, other_limits, outcome
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import model_of
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec


def explain(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    limits: SearchLimits | None = None,
    runtime: RuntimeSpec | str = "megatron",
) -> Explanation:
    """The answer of `plan explain`: why the best layout is the best or, if `limits` pin axes, why not those.

    With pins it plans with them and without them, and says which rule refuses them, why they do not fit, or where the
    seconds go. Without pins it says what decides against each alternative, and what would change the choice. Raises
    Infeasible if nothing fits even without pins.
    """
    case = pinned(Case(model_of(model), cluster, training, runtime_of(runtime), limits or SearchLimits()))
    return _why_not(case) if case.pins else _why_this(case)


def _planned(case: Case) -> Plan:
    return plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)


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
    best = _planned(case.free().limited(top=1))
    if refused is not None:
        return _why_refused(case, best, refused)
    try:
        pinned = search(case.limited(top=1))
    except Infeasible as error:
        return _why_no_room(case, best, error)
    return _why_slower(case, best, pinned)


def _why_refused(case: Case, best: Plan, refused: Refusal) -> Explanation:
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
    """Short searches that together take no longer than one search may."""
    return Trials(some_layout, Deadline(case.limits.time_limit_s))


def _lifts(case: Case, best: Plan, reason: str, trials: Trials) -> tuple[Change, ...]:
    """Every change that helps on the same GPUs, with the best layout that it allows."""
    changes = []
    for remedy in list(remedies(case, reason, trials)):
        try:
            chosen = aside(remedy.case)
        except (Infeasible, SolverError):  # there was time for the trial, and not for this
            continue
        instead = f" instead of {remedy.replaced}" if remedy.replaced else ""
        changes.append(
            Change(
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
        best = _planned(case)
    except Infeasible as error:
        miss = nearest_miss(case.filling) if is_small(case) else None
        if miss is None:
            raise
        return _why_too_large(case, miss, error)
    assumptions, limits = list(other_assumptions(case)), list(other_limits(case))
    then = [outcome(what_if, best) for what_if in (*assumptions, *limits)]
    beaten = [Beaten(layout=other, cause=largest_cause(best.best, other, case.cluster)) for other in best.alternatives]
    return _explanation(
        case,
        best,
        verdict="chosen",
        says=says_best(best),
        room=None if best.room is None else best.room.model_copy(update={"models": largest_models(case)}),
        job_changes=best.changes,
        beaten=tuple(beaten),
        assumptions=tuple(
            _assumption(case, best, other, result) for other, result in zip(assumptions, then, strict=False)
        ),
        constraints=tuple(
            _constraint(case, best, other, result)
            for other, result in zip(limits, then[len(assumptions) :], strict=True)
        ),
    )


def _why_too_large(case: Case, miss: Miss, error: Infeasible) -> Explanation:
    """The explanation of a small job of which nothing fits: the nearest layout, and what brings it nearer."""
    nearest = evaluate(case.model, case.cluster, case.training, miss.layout, runtime=case.runtime)
    return _explanation(
        case,
        nearest,
        verdict="does_not_fit",
        says=error.message,
        hint=error.hint,
        room=_room_of_nearest(miss.candidate, case),
        job_changes=nearest_changes(miss.candidate, case),
    )


def _room_of_nearest(nearest: Candidate, case: Case) -> Room:
    return room_of(within_risk(nearest, case)).model_copy(update={"models": largest_models(case)})


def _assumption(case: Case, best: Plan, other: WhatIf, then: Outcome) -> ChangedAssumption:
    return ChangedAssumption(
        name=other.name,
        says=other.says,
        changes_the_choice=then.moves(best.best, case.limits.gap_fraction),
        parallelism=None if then.chosen is None else then.chosen.parallelism,
        step_s=None if then.chosen is None else then.chosen.step.step_s,
        kept_step_s=then.kept_s,
        kept_fits=then.kept_fits,
    )


def _constraint(case: Case, best: Plan, other: WhatIf, then: Outcome) -> Constraint:
    gain = 0.0 if then.chosen is None else then.chosen.step.tokens_per_s / best.step.tokens_per_s - 1
    binds = gain > case.limits.gap_fraction
    return Constraint(name=other.name, now=now(other.name, best), moved=other.says, gain_fraction=gain, binds=binds)
