"""Switches as trainers spell them, and a plan's recipe: the value of each switch that has an effect on its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.refusal import Reason
from planner.export.trainer_files import settings
from planner.layout.price import shape_of
from planner.record import record
from planner.specs.base import Fields, Said
from planner.trainers.rules.facts import release
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value, written


@record
class Encoding:
    """A setting that depends on the switch's value: the way back, and the way there."""

    read: Callable[[Any], Value]
    write: Callable[[Any], Any] = lambda value: value


ITSELF = Encoding(lambda setting: " ".join(_words(setting)))
"""The value is the setting."""
SHARE = Encoding(lambda setting: _share(setting))
"""The value is a number."""
IS_SET = Encoding(lambda setting: True)
"""Any setting means true."""
MODULES = Encoding(lambda setting: "+".join(_words(setting)), lambda value: tuple(value.split("+")))
"""The value is names joined by `+`, the setting a list of them."""


@record
class Spelling:
    """A value of a switch in a trainer's settings."""

    switch: str
    value: Any
    """The value, or None for any that the parts of the settings say."""
    settings: Said = field(default_factory=dict)
    """Settings and their values; none for the value that the trainer has unasked."""
    since: str = ""
    """The first version that spells it so; empty for the oldest that is known."""
    before: str = ""
    """The first version that no longer does; empty where none is known."""
    is_read_only: bool = False
    """True for a shorter or older way to say the value, which is understood and never written."""

    def is_of(self, version: str) -> bool:
        """True if a version's configuration is written so; an empty version is the newest."""
        if self.is_read_only:
            return False
        if not version:
            return not self.before
        return release(self.since) <= release(version) and (not self.before or release(version) < release(self.before))

    def written(self, value: Value) -> Fields:
        """The settings that say `value`."""
        return {name: s.write(value) if isinstance(s, Encoding) else s for name, s in self.settings.items()}

    def read(self, found: Said) -> Value | None:
        """The value that the settings found say by this row; None where they say it otherwise."""
        value: Value | None = self.value
        for name, expected in self.settings.items():
            if name not in found:
                return None
            if isinstance(expected, Encoding):
                value = expected.read(found[name])
            elif _words(expected) != _words(found[name]):
                return None
        return value


_ENCODINGS = {"<itself>": ITSELF, "<number>": SHARE, "<names>": MODULES, "<any>": IS_SET}
_CELLS = ("is", "since", "before", "read_only")


def spellings(table: Mapping[str, Iterable[Said]]) -> tuple[Spelling, ...]:
    """The rows of a trainer's table of switches (options.yaml)."""
    return tuple(
        Spelling(
            switch,
            row.get("is"),
            {name: _ENCODINGS.get(str(value), value) for name, value in row.items() if name not in _CELLS},
            row.get("since", ""),
            row.get("before", ""),
            row.get("read_only", False),
        )
        for switch, rows in table.items()
        for row in rows
    )


def spelling_of(rows: Iterable[Spelling], switch: str, value: Value, version: str) -> Fields | None:
    """The settings that say a switch's value in a version; None where it has no word for it."""
    own = [row for row in rows if row.switch == switch and row.is_of(version)]
    exact = [row for row in own if row.value == value and type(row.value) is type(value)]
    # a row of another switch's kind of value, such as true beside joined names, does not say this one
    open_rows = [row for row in own if row.value is None and not isinstance(value, bool)]
    row = next(iter([*exact, *open_rows]), None)
    return None if row is None else row.written(value)


def read_switches(rows: Iterable[Spelling], found: Said) -> dict[str, Value]:
    """The value of each switch that the settings found say: by the row that most of them match."""
    best: dict[str, tuple[int, Value]] = {}
    for row in rows:
        value = row.read(found)
        if value is not None and len(row.settings) > best.get(row.switch, (-1, value))[0]:
            best[row.switch] = (len(row.settings), value)
    return {switch: value for switch, (_, value) in best.items()}


def unexplained(rows: Iterable[Spelling], found: Said) -> set[str]:
    """Settings that rows spell, with values that no row does."""
    rows = tuple(rows)
    spelled = {name for row in rows for name in row.settings if name in found}
    return spelled - {name for row in rows if row.read(found) is not None for name in row.settings}


def _share(setting: Any) -> float:
    try:
        return float(_words(setting)[0])
    except (IndexError, ValueError):
        raise SpecError(
            f"a share of the optimizer: {str(setting)[:60]!r} is no number", "write one from 0 to 1"
        ) from None


def _words(setting: Any) -> list[str]:
    """A setting as words, whichever way a configuration has it: a list, a text, a number, a bare option."""
    if setting is True or setting == []:
        return []
    if isinstance(setting, (list, tuple)):
        return [str(item) for item in setting]
    if isinstance(setting, float):
        return [format(setting, "g")]
    return str(setting).split()


_LEFT_OUT = ("overlap_param_gather",)
"""Switches that are left out with a note where the rest of a recipe does not allow them."""


def setting_of(plan: Plan) -> Setting:
    """The plan as rules of recipes look at it."""
    layout = plan.parallelism
    return Setting(
        model=plan.model.spec,
        cluster=plan.cluster,
        training=plan.training,
        runtime=runtime_of(plan),
        shape=shape_of(layout, plan.training.seq_length),
        recompute=layout.recompute,
        modules=layout.recompute_modules if layout.recompute == "selective" else (),
    )


def runtime_of(plan: Plan) -> RuntimeSpec:
    """The runtime that priced the plan, with what its dtype means for bytes."""
    return plan.runtime_spec.in_dtype(plan.training.dtype, plan.cluster.hardware.architecture)


def recipe_of(plan: Plan, rows: Iterable[Spelling]) -> dict[str, Value]:
    """The values of the switches that `rows` spell and that have an effect on the plan's layout."""
    setting = setting_of(plan)
    names, wider = dict.fromkeys(row.switch for row in rows), settings("recipe", plan, runtime=setting.runtime)
    recipe: dict[str, Value] = {
        name: wider[name] if name in wider else SWITCHES[name].value_of(setting.runtime)
        for name in names
        if has_effect(name, setting)
    }
    if recipe.get("overlap_grad_reduce") is False:
        # gathers of weights hide only where reductions of gradients do
        recipe.pop("overlap_param_gather", None)
    return recipe


def broken_rules_of_recipe(plan: Plan) -> list[Reason]:
    """The rules that the plan's recipe breaks on its layout; the search chooses none that breaks one."""
    setting = setting_of(plan)
    return [
        Reason(rule.switch, rule.says)
        for rule in broken_recipe_rules(setting)
        if has_effect(rule.switch, setting) and rule.switch not in _LEFT_OUT
    ]


def unspelled(plan: Plan, rows: Iterable[Spelling], trainer: str) -> list[Reason]:
    """The switches for whose values the plan's version of a trainer has no word."""
    rows, version = tuple(rows), plan.runtime_spec.version
    return [
        Reason(name, f"{trainer} {version or 'of today'} has no {name}={written(value)}")
        for name, value in recipe_of(plan, rows).items()
        if spelling_of(rows, name, value, version) is None
    ]


def canonical(features: dict[str, Value]) -> dict[str, Value]:
    """Features with the values that switches give them: a list of graphed modules by the name of its set."""
    graphs, modules = SWITCHES["cuda_graph"], tuple(str(features.get("cuda_graph", "")).split("+"))
    known = (value for value, fields in graphs.values.items() if fields["graphed_modules"] == modules)
    value = next(known, None)
    return features if value is None else {**features, "cuda_graph": value}
