"""Layouts beside the risk that a case accepts: the safest where none is safe enough, and what more risk would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.answer import Plan, RiskOffer
from planner.errors import Infeasible, SolverError
from planner.layout.price import price_layout
from planner.layout.replan import reprice
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.layouts import find_equal_chunks
from planner.search.why.misses import nearest_miss
from planner.specs.units import gib

LEAST_GAIN_FRACTION = 0.01
"""Least share of the step that a larger risk has to save before it is offered; less is not worth the search."""
RISKS = (0.3, 0.5)
"""Risks that are offered, the first one above the risk asked for."""


def safer_first(case: Case) -> Iterator[Case]:
    """Cases to search where no layout has a risk as small as was asked: the safest layouts first, then all that fit.

    The layout that needs least memory, among the shapes that promise it, says how much can be left free.
    """
    if case.limits.memory_headroom_gib is not None:
        return
    miss = nearest_miss(case)
    if miss is not None and miss.shortfall_bytes < case.headroom_bytes:
        free_gib = gib(case.headroom_bytes - miss.shortfall_bytes)
        yield case.limited(memory_headroom_gib=free_gib * (1 - 1e-9))
    yield case.filling


def exceeds_risk(plan: Plan, case: Case) -> bool:
    """True if the plan's best layout is likelier to run out of memory than the case accepts."""
    risk = plan.best.oom_probability
    return case.limits.memory_headroom_gib is None and risk is not None and risk > case.limits.oom_risk * (1 + 1e-9)


def with_warning(plan: Plan, case: Case) -> Plan:
    """The plan with a warning in front of the others that no layout was safe enough."""
    best, stage = plan.best, plan.best.worst_stage
    asked, risk = case.limits.oom_risk, best.oom_probability or 0.0
    needed, capacity = gib(stage.memory.total_bytes), plan.cluster.hardware.memory_gib
    says = (
        f"no layout fits with a probability of {1 - asked:.0%}: this one, the safest found, fits with {1 - risk:.0%}, "
        f"for stage {stage.stage} needs {needed:.1f} of {capacity:.1f} GiB"
    )
    return plan.model_copy(update={"best": best.model_copy(update={"warnings": (says, *best.warnings)})})


def risk_offer(found: Plan, case: Case, deadline: Deadline) -> RiskOffer | None:
    """What a larger risk would buy; None if it would buy nothing, or if there was no time to look.

    Only nodes that may beat the best layout are solved, under its recipe.
    """
    riskier = next((risk for risk in RISKS if risk > case.limits.oom_risk), None)
    is_made = bool(found.best.actions)
    if case.limits.memory_headroom_gib is not None or riskier is None or is_made or deadline.passed:
        return None
    known = reprice(found, found.best)
    try:
        again = replace(
            case.limited(oom_risk=riskier, gap_fraction=max(case.limits.gap_fraction, LEAST_GAIN_FRACTION)),
            training=found.training,
        )
        best = find_equal_chunks(again, [found.runtime_spec], deadline, known).best
    except (Infeasible, SolverError):
        return None
    risk = price_layout(best, exact=False).oom_probability
    if risk is None or best.step_s > found.step.step_s * (1 - LEAST_GAIN_FRACTION):
        return None
    return RiskOffer(oom_risk=riskier, oom_probability=risk, step_s=best.step_s)
