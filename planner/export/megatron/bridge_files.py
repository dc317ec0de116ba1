"""Files that start Megatron-Bridge: a recipe's overrides as JSON, and launchers that pass them in Hydra's grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from planner.answer import Plan
from planner.export.environment import megatron_environment
from planner.export.megatron.bridge_overrides import arguments_for_bridge, bridge_overrides
from planner.export.megatron.bridge_rows import DOWNLOADS, RECIPES, SAME
from planner.export.megatron.megatron_files import LOG, notes_on_options, requirements
from planner.export.megatron.plan_arguments import (
    DATA_PATH,
    NEWEST,
    PLACEHOLDERS,
    first_run_arguments,
    training_arguments,
)
from planner.export.refusal import Objections
from planner.export.run_settings import run_settings
from planner.export.trainer_files import (
    Arguments,
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    RunPart,
    ShellText,
    TrainerFiles,
    TrainerVersion,
    header,
    promise,
)
from planner.trainers.rules.bridge_model import family_of
from planner.trainers.rules.common import release

_LEFT_OUT = ("--padded-vocab-size", "--mock-data", "--save-retain-interval")
"""The model's own vocabulary is a field already, mock data is an option of run_recipe.py, and Bridge deletes old
checkpoints by their number."""
_KEPT_CHECKPOINTS = 10
_FIRST_SECTIONS = "0.17"
"""The first Megatron core whose Bridge has a section `validation` and reads paths of data as one text."""


def first_run(plan: Plan) -> RunPart:
    """A short run on mock data, which saves nothing."""
    words = [*_words(plan, first_run_arguments(plan)), "checkpoint.save=null", "checkpoint.load=null"]
    return RunPart({"--dataset": "mock"}, tuple(words))


def training_run(plan: Plan) -> RunPart:
    """Training, on the user's data."""
    kept = f"checkpoint.most_recent_k={_KEPT_CHECKPOINTS}"
    return RunPart(words=(*_words(plan, training_arguments(plan)), kept))


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


_RELEASES = {"0.17": "0.4", "0.18": "0.5", "0.19": "0.6", "0.20": "0.7"}
"""Megatron core to the release of Megatron-Bridge whose submodule it is."""
_NEWEST = "0.7.0"
_OVERRIDES_FILE = "bridge.json"
_CHECKOUT = Placeholder("BRIDGE_PATH", "checkout of Megatron-Bridge", default="$PWD", kind="folder", in_first_run=True)


def export_bridge(plan: Plan) -> TrainerFiles:
    """Overrides of a recipe that needs no download, and the command that passes them.

    Raises Inexpressible where Bridge cannot run the plan.
    """
    version = plan.runtime_spec.version
    objections = Objections("bridge", [], f"plan again with --runtime bridge@{max(_RELEASES)}")
    objections.when(version and version not in _RELEASES, "version", f"no release has Megatron core {version}")
    objections.raise_any()
    written_for = f"Megatron-Bridge {_RELEASES[version] if version else _NEWEST}"
    overrides = bridge_overrides(plan)
    words = [f"{path}={hydra(value)}" for path, value in overrides.items()]
    notes = _notes(plan)
    variables = megatron_environment(plan)
    comments = header(plan, written_for, notes)
    recipe = RECIPES[family_of(plan.model.spec)]
    first, training = first_run(plan), training_run(plan)
    data = {
        "recipe": recipe,
        "world_size": plan.parallelism.num_gpus_used,
        "env": variables,
        "overrides": words,
        "first_run": _unquoted(first.words),
        "training_run": _unquoted(training.words),
    }
    command = LaunchCommand(
        program='"$BRIDGE_PATH"/scripts/training/run_recipe.py',
        arguments={"--recipe": recipe, "--mode": "pretrain"},
        words=tuple(words),
        first_run=first,
        training_run=training,
        placeholders=(_CHECKOUT, *PLACEHOLDERS),
        requirements=(
            *requirements(arguments_for_bridge(plan)),
            Requirement("megatron.bridge", "the trainer", hint="pip install megatron-bridge"),
        ),
        trainer=TrainerVersion(
            "Megatron core", is_exactly=version, at_least="" if version else NEWEST, package="megatron-core"
        ),
        promise=promise(plan, LOG),
        environment=variables,
        exit_minutes="train.exit_duration_in_mins={}",
        comments=comments,
    )
    file = ExportFile(_OVERRIDES_FILE, json.dumps(data, indent=2) + "\n")
    return TrainerFiles(written_for, (file,), command, notes)


def _unquoted(words: Iterable[str]) -> list[str]:
    """Words as Hydra sees them, with variables as `${NAME}`."""
    return [word[1:-1].replace('\\"', '"') if isinstance(word, ShellText) else word for word in words]


def _notes(plan: Plan) -> tuple[str, ...]:
    """Placeholders, notes on Megatron-LM's options, and downloads of the recipe."""
    notes = [
        *run_settings(plan).notes,
        *notes_on_options(plan),
    ]
    if download := DOWNLOADS.get(family_of(plan.model.spec)):
        notes.append(f"the recipe reads the configuration of {download} from Hugging Face or its cache")
    return tuple(notes)
