"""The worth of every switch: each is set to each of its other values, and layouts are searched again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from planner.answer import SCHEMA_VERSION, Layout
from planner.errors import Infeasible, SolverError
from planner.layout.candidate import Candidate
from planner.layout.price import parallelism_of, reprice
from planner.search.case import Case, Deadline
from planner.search.layouts import find_layouts
from planner.search.recipes import Recipes, pinned
from planner.search.search import planned
from planner.specs.base import Spec
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.stated import partners, switched
from planner.trainers.switches import SWITCHES, Value, read_recipe

LONGEST_SEARCH_S = 10.0
"""Most seconds that one of the searches may take."""


class OtherValue(Spec):
    """A switch at another value than the chosen one, with the layout planned again."""

    switch: str
    value: Value
    step_s: float | None = None
    """Seconds of the best step with the value; null if a rule refuses it, or nothing fits or was found in time."""
    more_fraction: float | None = None
    """step_s over the step of the chosen recipe, less one."""
    replanned: bool = False
    """True if the step is that of the best layout for the value, false if it is of the chosen layout."""
    parallelism: Layout | None = None
    beside: dict[str, Value] = Field(default_factory=dict)
    """Switches that are set with it, since rules ask for that."""
    rule: str = ""
    """The rule that refuses the value for this job, in words; empty if none does."""
    changes: str = ""
    """The thing that the value changes and for which it needs consent; empty if it needs none."""


class SwitchWorth(Spec):
    """A switch of the trainer: its chosen value, and all others."""

    switch: str
    says: str
    value: Value
    has_effect: bool
    """False if the switch changes nothing on the chosen layout."""
    others: tuple[OtherValue, ...]


class RecipeTable(Spec):
    """The answer of `plan explain --recipe`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    job: str
    step_s: float
    parallelism: Layout
    switches: tuple[SwitchWorth, ...]

    def to_json(self) -> dict[str, Any]:
        """The table as plain data."""
        return self.model_dump(mode="json")


def other_values(case: Case) -> Sequence[tuple[str, Value]]:
    """All values of all switches of the case's trainer; each but the chosen ones is tried."""
    return [(name, value) for name, values in switches_of(case.runtime).items() for value in values]


def recipe_table(case: Case, tick: Callable[[], None] = lambda: None) -> RecipeTable:
    """Every switch at each of its other values, with the layout planned again until the case's time limit.

    What there is no time to plan again is priced on the chosen layout. `tick` is called once a value of `other_values`.
    Raises Infeasible if nothing fits.
    """
    deadline = Deadline(case.limits.time_limit_s)
    best = planned(case)
    case = replace(case, training=best.training)  # whose dtype consent may have changed
    chosen = read_recipe(best.runtime_spec, switches_of(case.runtime)) | best.best.recipe
    now = reprice(best, best.best, headroom_bytes=case.headroom_bytes)
    others = defaultdict[str, list[OtherValue]](list)
    for name, value in other_values(case):
        if value != chosen[name]:
            others[name].append(_replanned(case, now, deadline, _legal(case, name, value)))
        tick()
    return RecipeTable(
        job=f"{case.model.name} on {case.cluster.num_gpus:,} × {case.cluster.hardware.name}, {case.runtime.name}",
        step_s=best.step.step_s,
        parallelism=best.parallelism,
        switches=tuple(
            SwitchWorth(
                switch=name,
                says=SWITCHES[name].says,
                value=chosen[name],
                has_effect=name in best.best.recipe,
                others=tuple(others[name]),
            )
            for name in switches_of(case.runtime)
        ),
    )


def _legal(case: Case, name: str, value: Value) -> OtherValue:
    """A value with the other switches that it needs to be set, or with the rule that refuses it for the job."""
    runtime, beside = pinned(case).runtime, dict[str, Value]()
    while True:
        recipe = {name: value, **beside}
        setting = Setting(case.model, case.cluster, case.training, switched(runtime, recipe))
        broken = next((rule for rule in broken_recipe_rules(setting) if not rule.is_about_layout), None)
        consents = (SWITCHES[switch].consent.get(chosen, "") for switch, chosen in recipe.items())
        if broken is None:
            changes = " and ".join(dict.fromkeys(filter(None, consents)))
            return OtherValue(switch=name, value=value, beside=beside, changes=changes)
        partner = next(((n, v) for n, v in partners(setting, broken, recipe) if n not in recipe), None)
        if partner is None:
            return OtherValue(switch=name, value=value, rule=str(broken))
        beside[partner[0]] = partner[1]


def _replanned(case: Case, now: Candidate, deadline: Deadline, asked: OtherValue) -> OtherValue:
    """The value with the step of the best layout for it beside the rest of the recipe; of this layout if late."""
    if asked.rule:
        return asked
    runtime = switched(now.pricing.runtime, {asked.switch: asked.value, **asked.beside})
    here = Recipes.of(case).priced(now, runtime)
    found, is_replanned = here if here is not None and here.fits else None, not deadline.passed
    if is_replanned:
        left = Deadline(min(LONGEST_SEARCH_S, deadline.left_s), patient=False)
        try:
            found = find_layouts(case.limited(top=1), [runtime], left, found).best
        except Infeasible:
            found = None
        except SolverError:
            is_replanned = False
    if found is None:
        return asked.model_copy(update={"replanned": is_replanned})
    step = {"step_s": found.step_s, "more_fraction": found.step_s / now.step_s - 1}
    return asked.model_copy(update={**step, "parallelism": parallelism_of(found), "replanned": is_replanned})
