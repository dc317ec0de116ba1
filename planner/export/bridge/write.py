"""Files that start Megatron-Bridge: a recipe's overrides as JSON, and launchers that pass them in Hydra's grammar."""

from __future__ import annotations

import json
from typing import Any

from planner.answer import Plan
from planner.export.bridge.overrides import bridge_overrides
from planner.export.common.header import header
from planner.export.common.refusal import Objections
from planner.export.common.trainer_files import ExportFile, LaunchCommand, TrainerFiles
from planner.export.megatron.recipe import environment
from planner.export.megatron.write import notes_on_options

_RELEASES = {"0.16": "0.3", "0.17": "0.4", "0.18": "0.5", "0.19": "0.6", "0.20": "0.7"}
"""Megatron core to the release of Megatron-Bridge whose submodule it is."""
_NEWEST = "0.7.0"
_OVERRIDES_FILE = "bridge.json"


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
    recipe = _recipe_of(plan)
    data = {
        "recipe": recipe,
        "world_size": plan.parallelism.num_gpus_used,
        "env": variables,
        "overrides": words,
    }
    command = LaunchCommand(
        program='"$BRIDGE_PATH"/scripts/training/run_recipe.py',
        arguments={"--recipe": recipe, "--mode": "pretrain", "--dataset": "mock"},
        words=tuple(words),
        environment=variables,
        setup=('export BRIDGE_PATH="${BRIDGE_PATH:-$PWD}"', *_version_check(version)),
        comments=comments,
    )
    file = ExportFile(_OVERRIDES_FILE, json.dumps(data, indent=2) + "\n")
    return TrainerFiles(written_for, (file,), command, notes)


def _version_check(version: str) -> tuple[str, ...]:
    """A shell line that ends the launch where another Megatron core is installed than the one asked for."""
    if not version:
        return ()
    code = (
        'import sys; from importlib.metadata import version; found = version("megatron-core"); '
        f'sys.exit(None if found.startswith("{version}.") else '
        f'f"the overrides are for Megatron core {version}, {{found}} is installed")'
    )
    return (f"python3 -c '{code}'",)


def _notes(plan: Plan) -> tuple[str, ...]:
    """Placeholders, notes on Megatron-LM's options, and downloads of the recipe."""
    notes = [
        "data (mock), learning rate and number of steps are placeholders: append yours to the launcher",
        "BRIDGE_PATH names a checkout of Megatron-Bridge",
        *notes_on_options(plan),
    ]
    if plan.model.spec.mla is not None:
        notes.append("the recipe reads the configuration of deepseek-ai/DeepSeek-V3 from Hugging Face or its cache")
    return tuple(notes)


def _recipe_of(plan: Plan) -> str:
    """The recipe to start from: its model is all overrides, with latent attention where the plan's model has it."""
    return "vanilla_gpt_pretrain_config" if plan.model.spec.mla is None else "deepseek_v3_pretrain_config"


def hydra(value: Any) -> str:
    """A value in Hydra's grammar for overrides: JSON, except that keys of a dictionary have no quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
