"""Offers beside the best plan: the batch nearby that a number of GPUs divides well, and what more risk would buy."""

from __future__ import annotations

from dataclasses import replace

from planner.answer import LEAST_RISK_GAIN, BatchOffer, Plan, RiskOffer
from planner.errors import Infeasible, SolverError
from planner.layout.price import price_layout
from planner.layout.replan import reprice
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.layouts import find_equal_chunks, find_layouts
from planner.search.safest import exceeds_risk
from planner.shape import liked_batch

LEAST_BATCH_GAIN = 0.02
"""Least share of the tokens a second for which another batch is offered."""
RISKS = (0.3, 0.5)
"""Risks that are offered, the first one above the risk asked for."""


def batch_offer(found: Plan, case: Case, deadline: Deadline) -> BatchOffer | None:
    """Another batch nearby under which GPUs train more tokens a second; None if there is none or time is up.

    The layout is searched again for it, with the recipe of the best plan.
    """
    training = case.training
    other = liked_batch(training.global_batch_size, case.cluster.num_gpus)
    if other is None or other == training.global_batch_size or deadline.passed:
        return None
    again = case.with_batch(other)
    try:
        best = find_layouts(again, [found.runtime_spec], deadline).best
    except (Infeasible, SolverError):
        return None
    tokens_per_s = again.training.tokens_per_step / best.step_s
    if tokens_per_s <= (1 + LEAST_BATCH_GAIN) * found.step.tokens_per_s:
        return None
    return BatchOffer(global_batch_size=other, step_s=best.step_s, tokens_per_s=tokens_per_s)


def risk_offer(found: Plan, case: Case, deadline: Deadline) -> RiskOffer | None:
    """The layout that a larger risk would buy; None if time is up, or where a rule or a larger risk is not asked about.

    Only nodes that may beat the best layout by LEAST_RISK_GAIN are solved, under its recipe.
    """
    riskier = next((risk for risk in RISKS if risk > case.limits.oom_risk), None)
    is_ruled = case.limits.memory_headroom_gib is None and not exceeds_risk(found, case)
    if not is_ruled or riskier is None or found.best.actions or deadline.passed:
        return None
    known = reprice(found, found.best)
    try:
        again = replace(
            case.limited(oom_risk=riskier, gap_fraction=max(case.limits.gap_fraction, LEAST_RISK_GAIN)),
            training=found.training,
        )
        best = find_equal_chunks(again, [found.runtime_spec], deadline, known).best
    except (Infeasible, SolverError):
        return None
    risk = price_layout(best, exact=False).oom_probability
    return None if risk is None else RiskOffer(oom_risk=riskier, oom_probability=risk, step_s=best.step_s)
