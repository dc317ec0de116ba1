"""A plan in the keys of Primus' Megatron backend: Megatron-LM's arguments by its parser's names, and Primus' own."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.megatron.arguments import megatron_arguments
from planner.export.megatron.run_options import training_arguments
from planner.export.megatron.write import notes_on_options
from planner.export.primus.keys import MEGATRON_DEFAULTS, Keys, keys_of

CORE = "0.16"
"""Megatron core of the commit that Primus v26.5 pins (third_party/Megatron-LM at d3528a21)."""
_LEFT_OUT = ("data_path", "split", "tokenizer_type", "tokenizer_model", "save", "load", "async_strategy")
"""Arguments of training that Primus has other means for."""


def megatron_keys(plan: Plan) -> Keys:
    """The overrides of a plan, but for data, tokenizer and checkpoints. Raises Inexpressible."""
    plan = with_core(plan)
    keys = keys_of(megatron_arguments(plan, "primus") | training_arguments(plan))
    keys = {name: value for name, value in keys.items() if name not in _LEFT_OUT}
    return MEGATRON_DEFAULTS | keys


def notes_on_megatron(plan: Plan) -> tuple[str, ...]:
    """Notes on the arguments."""
    return notes_on_options(with_core(plan))


def with_core(plan: Plan) -> Plan:
    """The plan for the version of Megatron core that Primus pins."""
    return plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": CORE})})
