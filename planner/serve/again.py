"""The layout on the screen under changed controls, priced at once: the first thing that a reader sees of a change."""

from __future__ import annotations

from planner.answer import Plan
from planner.errors import PlannerError
from planner.layout.evaluate import assemble, priced_as_given
from planner.search.case import Case
from planner.search.recipes import pinned, pinned_by
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched


def same_layout(shown: Plan, case: Case) -> Plan | None:
    """The plan's best layout priced for another case, whether it fits or not.

    None where it cannot be run there, is not within the case's pins, or has an order that was made to measure.
    """
    layout = shown.best
    if layout.actions or shown.model.spec.num_hidden_layers != case.model.num_hidden_layers:
        return None
    if any(getattr(layout.parallelism, axis) not in values for axis, values in case.pins.items() if axis != "dp"):
        return None
    try:
        runtime = _runtime(shown, pinned(case))
        candidate, priced = priced_as_given(case.model, case.cluster, case.training, layout.stated, runtime)
    except PlannerError:
        return None
    plan = assemble(candidate.pricing, candidate.pricing.totals, [priced], ())
    return plan if "dp" not in case.pins or plan.parallelism.dp in case.pins["dp"] else None


def _runtime(shown: Plan, case: Case) -> RuntimeSpec:
    """The case's trainer with the switches on the screen, but for those that the case pins or the trainer refuses."""
    own = case.runtime
    if case.limits.switches == "default":
        return own
    kept, has = pinned_by(case), switches_of(own)
    recipe = {name: v for name, v in shown.best.recipe.items() if name not in kept and v in has.get(name, ())}
    runtime = switched(own, recipe)
    legal = not any(broken_recipe_rules(Setting(case.model, case.cluster, case.training, runtime)))
    return runtime if legal else own
