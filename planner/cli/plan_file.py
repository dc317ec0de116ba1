"""Plans that were saved with -o, read back."""

from __future__ import annotations

from planner.answer import Plan
from planner.errors import SpecError


def read_plan(path: str) -> Plan:
    """The plan in a file, `-` for stdin; SpecError where the file holds no plan of this version."""
    return Plan.load(path)


def with_alternative(plan: Plan, number: int | None) -> Plan:
    """The plan with its `number`-th alternative, counted from 1, as its best layout; None for the plan as it is."""
    if number is None:
        return plan
    if not 1 <= number <= len(plan.alternatives):
        raise SpecError(
            f"--alternative {number}: the plan has {len(plan.alternatives)}", "plan … --top N keeps more of them"
        )
    chosen = plan.alternatives[number - 1]
    best = chosen.model_copy(update={"runtime_spec": None})
    return plan.model_copy(update={"best": best, "runtime_spec": chosen.runtime_spec or plan.runtime_spec})
