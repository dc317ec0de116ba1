"""Rules of recipes, the values of switches that do not go with a model, a GPU or each other; and those of a runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache, cached_property
from typing import Any

from planner.errors import SpecError
from planner.record import record
from planner.shape import Shape, all_of
from planner.specs.base import Fields, Said, Texts
from planner.specs.cluster import ClusterSpec
from planner.specs.expressions import names_in, truth
from planner.specs.model import ModelSpec
from planner.specs.problems import check_names
from planner.specs.training import Recompute, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime, switches_of
from planner.trainers.rules.rule_rows import SIZES, Rule, first_broken, rule_names, rule_table, rules_of, value_at
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value


@record(slots=False)
class Setting:
    """The things that rules of recipes look at: a job, a runtime with its switches, and a layout if there is one."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: RuntimeSpec
    shape: Shape | None = None
    recompute: Recompute | None = None
    """The mode of its layers; without: the one that the trainer has unasked."""
    modules: Texts = ()
    """Modules that are recomputed by themselves."""

    def value(self, name: str) -> Value:
        """The value of a switch."""
        return SWITCHES[name].value_of(self.runtime)

    @cached_property
    def names(self) -> Fields:
        """Names that expressions of rules.yaml know beside a shape's sizes."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        unasked = "selective" if self.runtime.recomputes_unasked else "none"
        own["recompute"] = self.recompute or unasked
        read = {"moe": self.model.moe, "hardware": self.cluster.hardware, "value": self.value}
        return {**own, **read, "switches": switches_of(self.runtime)}

    def value_of(self, text: str) -> Any:
        """The value of an expression of rules.yaml; True for one about sizes where there is no shape."""
        return (self.shape is None and bool(names_in(text) & SIZES)) or value_at(text, self.names, self.shape)


@record
class RecipeRule:
    """One constraint on the value of a switch: a row of `recipes` in rules.yaml."""

    switch: str
    """The switch that gives way: the search leaves it at another value."""
    says: str
    """The constraint in words, as the answer shows it."""
    condition: str
    """An expression that is true where the recipe is legal; an array of truths if the setting's shape is of arrays."""
    is_about_model: bool = False
    """True for a rule that the model alone decides; no answer needs to say that it holds."""

    def __str__(self) -> str:
        return f"{self.switch} {self.says}"

    @property
    def is_about_layout(self) -> bool:
        """True for a rule that needs a shape or knows what is recomputed."""
        return bool(names_in(self.condition) & (SIZES | {"recompute", "modules"}))

    def holds(self, setting: Setting) -> Any:
        """True where the recipe is legal."""
        return truth(setting.value_of(self.condition))


@cache
def recipe_rules() -> tuple[RecipeRule, ...]:
    """All rules of recipes."""
    rows: list[Said] = rule_table()["recipes"]
    return tuple(
        RecipeRule(
            row["switch"],
            row["says"],
            row.get("holds") or f"not ({row['refuses']})",
            row.get("is_about_model", False),
        )
        for row in rows
    )


def has_effect(switch: str, setting: Setting) -> bool:
    """True if the switch changes anything in the setting's layout."""
    acts = rule_table()["effects"].get(switch)
    return acts is None or setting.shape is None or bool(setting.value_of(acts))


def broken_recipe_rules(setting: Setting) -> Iterator[RecipeRule]:
    """The rules that a recipe breaks; those about a layout only if the setting has one (one shape, no arrays)."""
    return (rule for rule in recipe_rules() if not all_of(rule.holds(setting)))


def takes_shapes(setting: Setting) -> Any:
    """True for each of the setting's shapes that the recipe's rules on layouts allow."""
    legal: Any = True
    for rule in recipe_rules():
        if rule.is_about_layout:
            legal = legal & rule.holds(setting)
    return legal


def rules_for(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """The hard constraints that layouts of `runtime` obey.

    Raises SpecError where it names rules or a trainer that are unknown, or neither.
    """
    if not (runtime.rules or runtime.trainer or runtime.name in RUNTIMES):
        raise SpecError(
            f"runtime {runtime.name}: names neither its trainer nor its rules",
            f"give trainer, one of {', '.join(RUNTIMES)}, or rules, of {', '.join(rule_names('layout'))}",
        )
    names = runtime.rules or _trainer_of(runtime).rules
    check_names(f"runtime {runtime.name}", "rules", names, rule_names("layout"))
    return rules_of("layer_kinds", "runtime", *(f"layout {name}" for name in names), runtime=runtime)


def takes(setting: Setting) -> bool:
    """True where no rule of recipes, or of its runtime's layouts, refuses a setting with a shape."""
    job = setting.model, setting.training, setting.shape or Shape()
    return not any(broken_recipe_rules(setting)) and first_broken(rules_for(setting.runtime), *job) is None


def export_rules_for(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """The rules that the export of `runtime` sets to models and dtypes; software of the past is not exported to."""
    if runtime.year is not None:
        return ()
    names = runtime.export_rules or _trainer_of(runtime).export_rules
    check_names(f"runtime {runtime.name}", "export_rules", names, rule_names("export"))
    return rules_of(*(f"export {name}" for name in names), runtime=runtime)


def _trainer_of(runtime: RuntimeSpec) -> RuntimeSpec:
    """The shipped trainer that `runtime` is a kind of; itself where it names none."""
    if runtime.trainer:
        check_names(f"runtime {runtime.name}", "trainer", (runtime.trainer,), RUNTIMES)
    return load_runtime(runtime.family) if runtime.family in RUNTIMES else runtime
