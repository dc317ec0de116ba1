"""Files that start Megatron-Bridge: a recipe's overrides as JSON, and launchers that pass them in Hydra's grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable

from planner.answer import Plan
from planner.export.bridge.model import DOWNLOADS, RECIPES
from planner.export.bridge.overrides import arguments_for_bridge, bridge_overrides
from planner.export.bridge.run_words import first_run, hydra, training_run
from planner.export.common.arguments import ShellText
from planner.export.common.header import header
from planner.export.common.promise import promise
from planner.export.common.refusal import Objections
from planner.export.common.run_settings import run_settings
from planner.export.common.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    TrainerFiles,
    TrainerVersion,
)
from planner.export.megatron.arguments import NEWEST
from planner.export.megatron.environment import environment
from planner.export.megatron.requirements import requirements
from planner.export.megatron.run_options import PLACEHOLDERS
from planner.export.megatron.write import LOG, notes_on_options
from planner.trainers.rules.bridge_model import family_of

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
    variables = environment(plan)
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
