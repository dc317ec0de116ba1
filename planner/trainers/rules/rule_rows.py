"""Rules: each says whether a trainer takes a shape and, if not, why with which numbers. Most are rows of rules.yaml.

A condition judges one shape, or an array of them, in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any, Final, Literal

import numpy as np

from planner.record import record
from planner.shape import Shape
from planner.specs.base import Fields, Said, Texts
from planner.specs.expressions import as_expression, names_in, truth, value_of
from planner.specs.model import ModelSpec
from planner.specs.reading import shipped_table
from planner.specs.training import TrainingSpec
from planner.trainers.rules.facts import FACTS, original_length, release
from planner.trainers.spec import RuntimeSpec

SIZES: Final = frozenset(name for name in dir(Shape) if not name.startswith("_"))
"""Names of a shape's sizes in expressions."""
_KNOWN = FACTS.keys() | {
    "model", "moe", "training", "runtime", "cluster", "hardware", "value", "recompute", "modules", "switches",
}  # fmt: skip


def value_at(text: str, names: Said, shape: Shape | None) -> Any:
    """The value of an expression of rules.yaml for a shape, or for arrays of them."""
    read = names_in(text)
    sizes = {name: getattr(shape, name) for name in read & SIZES}
    known = {name: names[name] if name in names else FACTS[name] for name in read & _KNOWN}
    return value_of(text, known | sizes, np.ndarray in map(type, sizes.values()))


@record
class Rule:
    """One hard constraint of a trainer."""

    reason: str
    """Short name for counts of rejections."""
    holds: Callable[[ModelSpec, TrainingSpec, Shape], Any]
    """True where the shape is legal: a bool, or an array of them."""
    message: Callable[[ModelSpec, TrainingSpec, Shape], str]
    """A sentence that says why one shape is illegal, with its numbers."""
    stretches: Callable[[ModelSpec], str | None] | None = None
    """For rules about stretched rotary frequencies: why the model's are refused, however long sequences are."""


def rule_of(row: Mapping[str, str], runtime: RuntimeSpec | None = None, core: str = "") -> Rule:
    """The rule that a row of rules.yaml is, for a runtime, and a release of Megatron core, where it reads them."""
    says, unless = row.get("says", ""), row.get("unless")
    if "multiple" in row:
        (name, value), (axis, size) = (_named(row[key]) for key in ("multiple", "of"))
        condition, says = f"({value}) % ({size}) == 0", f"{name} {{{value}}} is no multiple of {axis} {{{size}}}"
    else:
        condition = row.get("holds") or f"not ({row.get('refuses') or row.get('stretched')})"
    judged = f"({unless}) or ({condition})" if unless else condition
    if "since" in row:
        says = f"Megatron core {core} has no {says}, which came with {row['since']}"
    says = as_expression(says)

    def read(text: str, model: ModelSpec, training: TrainingSpec | None, shape: Shape | None) -> Any:
        return value_at(text, {"model": model, "moe": model.moe, "training": training, "runtime": runtime}, shape)

    def holds(model: ModelSpec, training: TrainingSpec, shape: Shape) -> Any:
        if "stretched" in row and training.seq_length <= original_length(model):
            return True
        return truth(read(judged, model, training, shape))

    def message(model: ModelSpec, training: TrainingSpec | None, shape: Shape | None) -> str:
        return str(read(says, model, training, shape))

    def stretches(model: ModelSpec) -> str | None:
        return None if read(condition, model, None, None) else message(model, None, None)

    return Rule(row["reason"], holds, message, stretches if "stretched" in row else None)


def _named(text: str) -> tuple[str, str]:
    """The name that a message has for an expression, and the expression."""
    name, is_named, value = text.partition(" = ")
    return (name, value) if is_named else (text.removeprefix("model."), text)


@cache
def rule_table() -> Fields:
    """rules.yaml as it stands."""
    found: Fields = shipped_table("trainers/rules/rules.yaml")
    return found


def rule_names(kind: Literal["layout", "export"]) -> Texts:
    """Names of the sets that a trainer's file may have under `rules`, or under `export_rules`."""
    return tuple(name.removeprefix(f"{kind} ") for name in rule_table()["sets"] if name.startswith(f"{kind} "))


@cache
def _alone(name: str, number: int) -> Rule:
    """The rule of a row that reads no runtime."""
    return rule_of(rule_table()["sets"][name][number])


def rules_of(*names: str, runtime: RuntimeSpec | None = None) -> tuple[Rule, ...]:
    """The rules of some sets of rules.yaml, or of single rows (`set/reason`), for a runtime and its version."""
    core = "" if runtime is None else runtime.version
    return tuple(rule for name in names for rule in _rules(name, runtime, core))


def _rules(path: str, runtime: RuntimeSpec | None, core: str) -> Iterator[Rule]:
    name, _, reason = path.partition("/")
    for number, row in enumerate(rule_table()["sets"][name]):
        if isinstance(row, str):
            assert not reason, f"{path}: a set of sets has no rows of its own"
            yield from _rules(row, runtime, core)
        elif "set" in row:
            rules = _rules(row["set"], runtime, value_at(row["core"], {}, None) if "core" in row else core)
            yield from (_unless(row["unless"], rule) for rule in rules) if "unless" in row else rules
        elif row["reason"] == (reason or row["reason"]) and _is_in(row, runtime, core):
            is_bound = "since" in row or any("runtime." in text for text in row.values())
            yield rule_of(row, runtime, core) if is_bound else _alone(name, number)


@cache
def _unless(text: str, rule: Rule) -> Rule:
    """A rule that is not about models of which an expression is true."""
    return replace(
        rule, holds=lambda model, *others: value_at(text, {"model": model}, None) or rule.holds(model, *others)
    )


def _is_in(row: Mapping[str, str], runtime: RuntimeSpec | None, core: str) -> bool:
    """True where a runtime has the rule, under a release of Megatron core; an empty one is the newest."""
    newest: tuple[float, ...] = release(core) or (inf,)
    if ("since" in row and newest >= release(row["since"])) or newest < release(row.get("from", "0")):
        return False
    return bool(value_at(row.get("where", "True"), {"runtime": runtime}, None))


def schedule_rules(schedule: str) -> tuple[Rule, ...] | None:
    """The rules of torch's class for a schedule, or of none."""
    return rules_of(name) if (name := f"torch:{schedule}") in rule_table()["sets"] else None


def torchtitan_rules(schedule: str) -> tuple[Rule, ...]:
    """The rules of torchtitan's layouts under a schedule; of one without a class, those of what runs at its vpp."""
    of_class = schedule_rules(schedule)
    return rules_of("layout torchtitan") if of_class is None else rules_of("torchtitan_layout") + of_class


def first_broken(rules: Iterable[Rule], model: ModelSpec, training: TrainingSpec, shape: Shape) -> Rule | None:
    """The first rule that one shape (no arrays) breaks, or None."""
    return next((rule for rule in rules if not rule.holds(model, training, shape)), None)
