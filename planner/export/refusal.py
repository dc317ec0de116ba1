"""The refusal of a plan that a target cannot express, with every reason and not only the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.price import shape_of
from planner.trainers.load import load_runtime, versions_of
from planner.trainers.rules.common import UNWRITTEN_RULES, WHOLE_MODEL_RULES, Rule
from planner.trainers.rules.megatron import megatron_model_rules
from planner.trainers.rules.named import EXPORT_RULES


class Reason(NamedTuple):
    """One reason why a target cannot express a plan."""

    name: str
    """Short, such as `schedule`; rules of the search bring their own."""
    message: str


class Inexpressible(SpecError):
    """The target has no way to say what the plan says."""

    def __init__(self, target: str, reasons: Sequence[Reason], hint: str) -> None:
        self.reasons = tuple(reasons)
        listed = "; ".join(f"{reason.name}: {reason.message}" for reason in reasons)
        super().__init__(f"{target} cannot express this plan: {listed}", hint)


@dataclass(slots=True)
class Objections:
    """Reasons against exporting a plan, collected before the export ends with all of them."""

    target: str
    reasons: list[Reason]
    hint: str

    def when(self, wrong: object, name: str, message: str) -> None:
        """Add a reason if `wrong`."""
        if wrong:
            self.reasons.append(Reason(name, message))

    def raise_any(self) -> None:
        """Raise Inexpressible if there are reasons."""
        if self.reasons:
            raise Inexpressible(self.target, self.reasons, self.hint)


def hint_for(plan: Plan, runtime: str, model_rules: Iterable[Rule] = ()) -> str:
    """The way out of a refusal: another trainer, another plan, or another choice in this one."""
    model_rules = tuple(model_rules)
    if broken_rules((rule for rule in model_rules if rule in WHOLE_MODEL_RULES), plan):
        return _hint_for_fine_tuning(plan)
    if broken_rules(model_rules, plan):
        return _hint_for_model(plan, runtime)
    if plan.as_planned.runtime != runtime:
        return f"plan again with --runtime {runtime}"
    return "plan again without what is named here, or with other values of it pinned"


def _hint_for_fine_tuning(plan: Plan) -> str:
    """Hugging Face's trainers say what is trained; they shard weights, and split no model."""
    layout, training = plan.parallelism, plan.training
    if training.objective.name not in ("lm", "dpo"):
        return "no target writes it: plan again with --objective lm or --objective dpo"
    if layout.tp * layout.cp * layout.pp * layout.ep == 1:
        return "--to hf writes " + ("it" if training.adapters is None else "them")
    return "plan again with --runtime hf, and export that plan --to hf"


_DESCRIBING = ("megatron", "bridge", "torchtitan")
"""Targets that describe the model; DeepSpeed's is the user's own."""


def _hint_for_model(plan: Plan, runtime: str) -> str:
    """No layout changes what the model is: another target or an older version may express it, or a part is left out."""
    able = [name for name in _DESCRIBING if name != runtime and not broken_rules(EXPORT_RULES[name], plan)]
    if able:
        return f"export to {' or '.join(able)}, which can say it"
    for version in reversed(versions_of(load_runtime("megatron"))):
        if not broken_rules(megatron_model_rules(version), plan):
            return f"plan again with --runtime megatron@{version}, which can say it"
    if broken_rules(UNWRITTEN_RULES, plan):
        return "no target describes such a model: write your own files by what `plan report` shows"
    return "leave out of the model's spec what is named here, if the model may be trained without"


def broken_rules(rules: Iterable[Rule], plan: Plan) -> list[Reason]:
    """The rules of a trainer that the plan's shape breaks."""
    shape = shape_of(plan.parallelism, plan.training.seq_length)
    model, training = plan.model.spec, plan.training
    return [
        Reason(rule.reason, rule.message(model, training, shape))
        for rule in rules
        if not rule.holds(model, training, shape)
    ]
