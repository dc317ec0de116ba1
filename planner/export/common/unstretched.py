"""Rotary frequencies that a trainer cannot stretch as the model's are, where no sequence needs them stretched."""

from __future__ import annotations

from dataclasses import replace

from planner.answer import Plan
from planner.export.common.header import comment
from planner.export.common.trainer_files import TrainerFiles
from planner.trainers.load import load_runtime
from planner.trainers.rules.facts import original_length
from planner.trainers.rules.of_trainer import export_rules_for


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
