"""A plan under the trainer that it is exported to: its price there, and why that trainer cannot express it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.answer import Plan
from planner.errors import Infeasible, SpecError
from planner.export.trainer_files import TrainerFiles, comment, notes_of
from planner.layout.price import shape_of, under_trainer
from planner.specs.base import Texts
from planner.specs.units import gib
from planner.trainers.load import load_runtime, versions_of
from planner.trainers.rules.facts import original_length
from planner.trainers.rules.recipe import export_rules_for
from planner.trainers.rules.rule_rows import Rule, rules_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import on_trainer
from planner.trainers.switches import SWITCHES, written


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


def refuse(target: str, reasons: Sequence[Reason], hint: str) -> None:
    """Raise Inexpressible if there are reasons."""
    if reasons:
        raise Inexpressible(target, reasons, hint)


def hint_for(plan: Plan, runtime: str, model_rules: Iterable[Rule] = ()) -> str:
    """The way out of a refusal: another trainer, another plan, or another choice in this one."""
    model_rules, layout = tuple(model_rules), plan.parallelism
    if plan.model.spec.traced is not None and (runtime != "torch-eager" or layout.tp * layout.cp * layout.pp > 1):
        return "plan again with --tp 1 --cp 1 --pp 1, and export that plan --to torch, which runs the module"
    if broken_rules((rule for rule in model_rules if rule in rules_of("whole_model")), plan):
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
    able = [name for name in _DESCRIBING if name != runtime and not broken_rules(rules_of(f"export {name}"), plan)]
    if able:
        return f"export to {' or '.join(able)}, which can say it"
    for version in reversed(versions_of(load_runtime("megatron"))):
        older = load_runtime(f"megatron@{version}")
        if not broken_rules(rules_of("export megatron", runtime=older), plan):
            return f"plan again with --runtime megatron@{version}, which can say it"
    if broken_rules(rules_of("unwritten"), plan):
        return "no target describes such a model: write your own files by what `plan show --full` prints"
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


LARGEST_RISK = 0.1
"""Largest probability of running out of memory that passes without a word: the one that a search accepts by itself."""
_NAMES = {"name": "", "trainer": ""}


def priced_for(plan: Plan, runtime: str, recomputes: Texts | None = None) -> Plan:
    """The plan under the trainer `runtime`; the plan itself where that can run all that it was priced with.

    `recomputes` are the modules that the trainer can recompute by themselves, if its runtime does not say.
    """
    planned = plan.best.runtime_spec or plan.runtime_spec
    there = on_trainer(planned, runtime)
    has_order = plan.parallelism.rank_order in there.rank_orders
    if has_order and there.model_copy(update=_NAMES) == planned.model_copy(update=_NAMES):
        return plan
    return under_trainer(plan, there, _modules(plan, there, recomputes))


def _modules(plan: Plan, runtime: RuntimeSpec, recomputes: Texts | None) -> Texts:
    """The modules that `selective` recomputes under a trainer, which may choose them itself."""
    modules = plan.parallelism.recompute_modules or plan.runtime_spec.selective_default
    if recomputes is not None:
        return tuple(name for name in modules if name in recomputes)
    return modules if runtime.family == plan.runtime_spec.family else runtime.selective_default


def notes_on_price(plan: Plan) -> list[str]:
    """A note on step and memory under the trainer that the plan is exported to, if it was made for another one."""
    made = plan.planned_as
    if made is None:
        return []
    lost = ", ".join(
        f"{name}={written(value)}"
        for name, value in made.best.recipe.items()
        if plan.best.recipe.get(name) != value and value != SWITCHES[name].plainest
    )
    risk, planned = plan.best.oom_probability or 0.0, made.best.oom_probability or 0.0
    is_risky = risk > max(LARGEST_RISK, planned)
    return notes_of("price", plan, made=made, lost=lost, memory=_memory, risk=risk, planned=planned, is_risky=is_risky)


def check_fits(plan: Plan, target: str) -> None:
    """Raise Infeasible where a plan that fits as it was made does not under the trainer that it is exported to."""
    if plan.fits or not plan.as_planned.fits:
        return
    raise Infeasible(
        f"--to {target}: stage {plan.best.worst_stage.stage} of this plan does not fit there: {_memory(plan)}, "
        f"planned for {plan.as_planned.runtime}: {_memory(plan.as_planned)}",
        f"plan again with --runtime {plan.runtime}, or add --force to write it anyway",
    )


def _memory(plan: Plan) -> str:
    needed = gib(plan.best.worst_stage.memory.total_bytes)
    return f"{needed:.1f} of {plan.cluster.hardware.memory_gib:.1f} GiB"


def unstretched(plan: Plan, runtime: str) -> tuple[Plan, str]:
    """The plan with the positions that its model was first trained on, and a note; the plan itself where all is well.

    Where a rule of the trainer refuses the model's `rope_scaling` and no sequence is longer than those before the
    stretching, the model is trained as it was then.
    """
    model, trainer = plan.model.spec, plan.runtime_spec
    if model.rope_scaling is None or plan.training.seq_length > original_length(model):
        return plan, ""
    if plan.runtime != runtime:
        trainer = load_runtime(runtime)
    reasons = [rule.stretches(model) for rule in export_rules_for(trainer) if rule.stretches is not None]
    refused = next(filter(None, reasons), None)
    if refused is None:
        return plan, ""
    spec = model.model_copy(update={"rope_scaling": None})
    note = (
        f"positions are not stretched: {refused}; sequences of {plan.training.seq_length:,} tokens stay within the "
        f"{original_length(model):,} positions that the model was trained on before they were stretched (rope_scaling)"
    )
    return plan.model_copy(update={"model": plan.model.model_copy(update={"spec": spec})}), note


def with_note(files: TrainerFiles, note: str) -> TrainerFiles:
    """The files with one more note, in the launcher's header too."""
    if not note:
        return files
    command = files.command
    if command is not None:
        command = replace(command, comments=command.comments + comment(note))
    return replace(files, command=command, notes=(*files.notes, note))
