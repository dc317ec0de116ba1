"""`plan explain`: why this layout, or why not the one that the pins ask for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from planner.cli import options as o
from planner.cli.job_options import SearchOptions, job_options
from planner.errors import Infeasible

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.report.explain import Change, ChangedAssumption, Constraint, Explanation
    from planner.search.why.refused import Refusal
    from planner.search.why.what_if import Case, Outcome, WhatIf


@job_options
def explain_command(
    asked: SearchOptions,
    json: o.Json = False,
) -> None:
    """Say why the best layout is the best or, with some of its axes pinned, why those are not chosen.

    Takes the main job's options. With pins it plans with them and without, and says what refuses them, what does not
    fit, or where the seconds go; without, what decides against each alternative and what would change the choice.

    \b
    Example:
      plan explain --model 405b --gpus 2048 --tp 16
      plan explain --model 405b --gpus 2048
    """
    from planner.cli.inputs import read_job, read_limits
    from planner.cli.output import dumps, show, waiting
    from planner.report.explain import render_explanation
    from planner.search.why.what_if import Case

    job = read_job(asked)
    case = Case(job.model, job.cluster, job.training, job.runtime_spec, read_limits(asked))
    with waiting("searching"):
        explanation = _why_not(case) if case.pins else _why_this(case)
    if json:
        sys.stdout.write(dumps(explanation.to_json()))
    else:
        show(render_explanation(explanation))


def _told(case: Case, best: Plan, **answer: Any) -> Explanation:
    from planner.report.explain import Explanation

    cluster = case.cluster
    return Explanation(
        job=f"{case.model.name} on {cluster.num_gpus:,} × {cluster.hardware.name}, {case.runtime.name}",
        asked=case.pins,
        capacity_bytes=cluster.hardware.memory_bytes,
        best=best.best,
        **answer,
    )


def _why_not(case: Case) -> Explanation:
    """Search with the pins and without, and say what stands between the two."""
    from planner.search.why.refused import refusal

    refused = refusal(case)
    best = case.free().limited(top=1).plan()
    if refused is not None:
        return _why_refused(case, best, refused)
    try:
        pinned = case.limited(top=1).plan()
    except Infeasible as error:
        return _why_no_room(case, best, error)
    return _why_slower(case, best, pinned)


def _why_refused(case: Case, best: Plan, refused: Refusal) -> Explanation:
    from planner.search.why.explain import hint_for

    return _told(
        case,
        best,
        verdict="refused",
        says=f"Refused, {refused.reason.replace('_', ' ')}: {refused.says}.",
        reason=refused.reason,
        rejections=refused.rejections.counts,
        rejection_examples=refused.rejections.examples,
        lifts=_lifts(case, best, refused.reason),
        hint=hint_for(refused.reason),
    )


def _why_no_room(case: Case, best: Plan, error: Infeasible) -> Explanation:
    from planner.report.causes import says_misfit
    from planner.search.why.refused import nearest_miss

    nearest = nearest_miss(case)
    return _told(
        case,
        best,
        verdict="does_not_fit",
        says=error.message if nearest is None else says_misfit(nearest, case.cluster, case.limits.memory_headroom_gib),
        reason="does_not_fit",
        rejections=error.rejections,
        pinned=nearest,
        lifts=_lifts(case, best, "does_not_fit"),
        hint=error.hint,
    )


def _lifts(case: Case, best: Plan, reason: str) -> tuple[Change, ...]:
    from planner.report.explain import Change
    from planner.search.why.refused import lifts

    return tuple(
        Change(
            change=lift.change,
            parallelism=lift.found.parallelism,
            step_s=lift.found.step.step_s,
            more_fraction=lift.found.step.step_s / best.step.step_s - 1,
        )
        for lift in lifts(case, reason)
    )


def _why_slower(case: Case, best: Plan, pinned: Plan) -> Explanation:
    from planner.report.causes import largest_cause, says_slower

    same = pinned.parallelism == best.parallelism and pinned.step.step_s == best.step.step_s
    more, gap = pinned.step.step_s / best.step.step_s - 1, case.limits.gap_fraction
    verdict = "chosen" if same else "slower" if more > gap else "faster" if more < -gap else "as_fast"
    cause = None if same else largest_cause(best.best, pinned.best, case.cluster)
    says = says_slower(best, pinned, cause, gap)
    return _told(case, best, verdict=verdict, says=says, pinned=pinned.best, cause=cause)


def _why_this(case: Case) -> Explanation:
    """Explain what decides against each alternative, and what would change the choice."""
    from planner.report.causes import largest_cause, says_best
    from planner.report.explain import Beaten
    from planner.search.why.what_if import other_assumptions, other_limits, outcomes

    best = case.plan()
    assumptions, limits = list(other_assumptions(case)), list(other_limits(case))
    then = outcomes([*assumptions, *limits], best)
    beaten = [Beaten(layout=other, cause=largest_cause(best.best, other, case.cluster)) for other in best.alternatives]
    return _told(
        case,
        best,
        verdict="chosen",
        says=says_best(best),
        beaten=tuple(beaten),
        assumptions=tuple(_assumption(case, best, *judged) for judged in zip(assumptions, then, strict=False)),
        constraints=tuple(
            _constraint(case, best, *judged) for judged in zip(limits, then[len(assumptions) :], strict=True)
        ),
    )


def _assumption(case: Case, best: Plan, other: WhatIf, then: Outcome) -> ChangedAssumption:
    from planner.report.explain import ChangedAssumption

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
    from planner.report.causes import now
    from planner.report.explain import Constraint

    gain = 0.0 if then.chosen is None else then.chosen.step.tokens_per_s / best.step.tokens_per_s - 1
    binds = gain > case.limits.gap_fraction
    return Constraint(name=other.name, now=now(other.name, best), moved=other.says, gain_fraction=gain, binds=binds)
