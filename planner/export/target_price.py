"""The price of a plan under the trainer that it is exported to: what it can run decides step and memory there."""

from __future__ import annotations

from dataclasses import replace

from planner.answer import Plan
from planner.errors import Infeasible
from planner.export.trainer_files import TrainerFiles, comment
from planner.layout.price import under_trainer
from planner.specs.units import gib
from planner.trainers.load import load_runtime
from planner.trainers.rules.common import original_length
from planner.trainers.rules.recipe import export_rules_for
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import on_trainer
from planner.trainers.switches import SWITCHES, written

LARGEST_RISK = 0.1
"""Largest probability of running out of memory that passes without a word: the one that a search accepts by itself."""
_NAMES = {"name": "", "trainer": ""}


def priced_for(plan: Plan, runtime: str, recomputes: tuple[str, ...] | None = None) -> Plan:
    """The plan under the trainer `runtime`; the plan itself where that can run all that it was priced with.

    `recomputes` are the modules that the trainer can recompute by themselves, if its runtime does not say.
    """
    planned = plan.best.runtime_spec or plan.runtime_spec
    there = on_trainer(planned, runtime)
    has_order = plan.parallelism.rank_order in there.rank_orders
    if has_order and there.model_copy(update=_NAMES) == planned.model_copy(update=_NAMES):
        return plan
    return under_trainer(plan, there, _modules(plan, there, recomputes))


def _modules(plan: Plan, runtime: RuntimeSpec, recomputes: tuple[str, ...] | None) -> tuple[str, ...]:
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
        if plan.best.recipe.get(name) != value and value != next(iter(SWITCHES[name].values))
    )
    notes = [
        f"priced for {plan.runtime}: {plan.step.step_s:.4g} s a step, {_memory(plan)}; planned for {made.runtime}: "
        f"{made.step.step_s:.4g} s, {_memory(made)}" + (f", with {lost}" if lost else "")
    ]
    risk, planned = plan.best.oom_probability or 0.0, made.best.oom_probability or 0.0
    if risk > max(LARGEST_RISK, planned):
        again = f"plan again with --runtime {plan.runtime} for a safer layout"
        notes.append(
            f"it runs out of memory there with a probability of {risk:.0%}, planned with {planned:.0%}: {again}"
        )
    return notes


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
