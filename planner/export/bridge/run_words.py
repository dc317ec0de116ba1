"""Overrides that only one kind of run has, training or the first one on mock data, as words in Hydra's grammar."""

from __future__ import annotations

import json
from typing import Any

from planner.answer import Plan
from planner.export.bridge.fields import SAME
from planner.export.common.arguments import Arguments, ShellText
from planner.export.common.trainer_files import Part
from planner.export.megatron.run_options import DATA_PATH, first_run_arguments, training_arguments
from planner.trainers.rules.common import release

_LEFT_OUT = ("--padded-vocab-size", "--mock-data", "--save-retain-interval")
"""The model's own vocabulary is a field already, mock data is an option of run_recipe.py, and Bridge deletes old
checkpoints by their number."""
_KEPT_CHECKPOINTS = 10
_FIRST_SECTIONS = "0.17"
"""The first Megatron core whose Bridge has a section `validation` and reads paths of data as one text."""


def first_run(plan: Plan) -> Part:
    """A short run on mock data, which saves nothing."""
    words = [*_words(plan, first_run_arguments(plan)), "checkpoint.save=null", "checkpoint.load=null"]
    return Part({"--dataset": "mock"}, tuple(words))


def training_run(plan: Plan) -> Part:
    """Training, on the user's data."""
    kept = f"checkpoint.most_recent_k={_KEPT_CHECKPOINTS}"
    return Part(words=(*_words(plan, training_arguments(plan)), kept))


def hydra(value: Any) -> str:
    """A value in Hydra's grammar for overrides: JSON, except that keys of a dictionary have no quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _words(plan: Plan, arguments: Arguments) -> list[str]:
    version = plan.runtime_spec.version
    is_old = bool(version) and release(version) < release(_FIRST_SECTIONS)
    words: list[str] = []
    for option, value in arguments.items():
        if option in _LEFT_OUT:
            continue
        path = SAME[option]
        if is_old and path.startswith("validation."):
            path = path.replace("validation.", "train.")
        if is_old and option == "--data-path":
            words.append(ShellText(f'"dataset.blend=[[\\"{DATA_PATH.words}\\"],null]"'))
        elif isinstance(value, ShellText):
            words.append(ShellText(f'"{path}=\\"{value.unquoted}\\""'))
        else:
            words.append(f"{path}={hydra(value)}")
    return words
