"""A plan in the keys of Primus' Megatron backend: Megatron-LM's arguments by its parser's names, and Primus' own."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.refusal import Objections, hint_for
from planner.export.common.stages import virtual_stages
from planner.export.common.unstretched import unstretched
from planner.export.megatron.arguments import megatron_arguments
from planner.export.megatron.run_options import training_arguments
from planner.export.megatron.write import notes_on_options
from planner.export.primus.keys import MEGATRON_DEFAULTS, Keys, keys_of
from planner.export.primus.schedules import OWN_SCHEDULES, objections_to_schedule, schedule_keys
from planner.export.primus.turbo import objections_to_recipe, turbo_keys

CORE = "0.16"
"""Megatron core of the commit that Primus v26.5 pins (third_party/Megatron-LM at d3528a21)."""
_LEFT_OUT = ("data_path", "split", "tokenizer_type", "tokenizer_model", "save", "load", "async_strategy")
"""Arguments of training that Primus has other means for."""


def megatron_keys(plan: Plan) -> Keys:
    """The overrides of a plan, but for data, tokenizer and checkpoints. Raises Inexpressible."""
    plan, _ = with_core(plan)
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    reasons = [*objections_to_schedule(plan, stages), *objections_to_recipe(plan)]
    objections = Objections("primus", reasons, hint_for(plan, "primus-megatron"))
    objections.raise_any()
    keys = keys_of(megatron_arguments(plan, "primus", own_schedules=OWN_SCHEDULES) | training_arguments(plan))
    keys = {name: value for name, value in keys.items() if name not in _LEFT_OUT}
    return turbo_keys(plan, MEGATRON_DEFAULTS | keys | schedule_keys(plan))


def notes_on_megatron(plan: Plan) -> tuple[str, ...]:
    """Notes on the arguments."""
    pinned, note = with_core(plan)
    return (*notes_on_options(pinned), *([note] if note else []))


def with_core(plan: Plan) -> tuple[Plan, str]:
    """The plan for the version of Megatron core that Primus pins, and a note where that stretches no positions."""
    runtime = plan.runtime_spec.model_copy(update={"version": CORE})
    return unstretched(plan.model_copy(update={"runtime_spec": runtime}), plan.runtime)
