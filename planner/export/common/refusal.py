"""The refusal of a plan that a target cannot express, with every reason and not only the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.answer import Layout, Plan
from planner.errors import SpecError
from planner.shape import RANK_ORDERS, Shape
from planner.trainers.rules.common import Rule


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
    if broken_rules(model_rules, plan):
        return "no layout changes what the model is: export to another trainer"
    if plan.as_planned.runtime != runtime:
        return f"plan again with --runtime {runtime}"
    return "plan again without what is named here, or with other values of it pinned"


def broken_rules(rules: Iterable[Rule], plan: Plan) -> list[Reason]:
    """The rules of a trainer that the plan's shape breaks."""
    shape = shape_of(plan.parallelism, plan.training.seq_length)
    model, training = plan.model.spec, plan.training
    return [
        Reason(rule.reason, rule.message(model, training, shape))
        for rule in rules
        if not rule.holds(model, training, shape)
    ]


def shape_of(layout: Layout, seq_length: int) -> Shape:
    """The plan's sizes as the rules take them."""
    return Shape(
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        pp=layout.pp,
        vpp=layout.vpp,
        dp=layout.dp,
        micro_batch_size=layout.micro_batch_size,
        num_microbatches=layout.num_microbatches,
        seq_length=seq_length,
        sequence_parallel=int(layout.sequence_parallel),
        zero_stage=layout.zero_stage,
        shard_size=layout.shard_size,
        dp_outermost=RANK_ORDERS.index(layout.rank_order),
    )
