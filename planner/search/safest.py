"""The safest layouts, where none has a risk of running out of memory as small as was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Plan
from planner.search.case import Case
from planner.search.why.misses import nearest_miss
from planner.specs.units import gib


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
        f"no layout fits with a probability of {100 * (1 - asked):g}%: this one, the safest found, "
        f"fits with {1 - risk:.0%}, for stage {stage.stage} needs {needed:.1f} of {capacity:.1f} GiB"
    )
    return plan.model_copy(update={"best": best.model_copy(update={"warnings": (says, *best.warnings)})})
