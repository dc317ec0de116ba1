"""The settings in a torchtitan recipe: a Python file that is followed and never run."""

from __future__ import annotations

import ast
from typing import Any

from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import exported_model
from planner.export.recipes.chosen import chosen_recipe
from planner.export.recipes.evaluator import Evaluator
from planner.export.recipes.values import Record, Unknown
from planner.specs.reading.python_text import parse_python

Settings = dict[str, Any]
"""`section.name` to value."""
RECOMPUTED = "activation_checkpoint.layers"
"""A setting of our own: the layers that the recipe's policy recomputes, where it names them."""
_NEVER_FOLLOWED = frozenset({"model_registry", "default_adamw"})
_SECTIONS = ("parallelism", "training", "compile")
_POLICIES = {"FullAC": "full", "PlannedAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "selective"}
"""Mode of each class of activation checkpointing; PlannedAC is the one that an exported recipe defines."""
_CONVERTERS = {"Float8": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
"""Beginnings of the names of converters of linear layers, and the dtype that they compute in."""
_MAX_SHOWN_CHARACTERS = 80


def read_recipe(config: ConfigFile) -> tuple[Settings, dict[str, str]]:
    """Settings by `section.name`, and those whose values cannot be read.

    Raises SpecError for what is no Python, and for a file with several recipes of which none is chosen.
    """
    evaluator = Evaluator(config, _NEVER_FOLLOWED)
    record = chosen_recipe(evaluator, config.recipe, _SECTIONS) or _at_top(evaluator)
    settings: Settings = {}
    unreadable: dict[str, str] = {}
    for section in _SECTIONS:
        value = record.get(section)
        for path, setting in value.flat(f"{section}.") if isinstance(value, Record) else ():
            if isinstance(setting, (Unknown, Record)):
                unreadable[path] = str(setting if isinstance(setting, Unknown) else setting.kind)[
                    :_MAX_SHOWN_CHARACTERS
                ]
            else:
                settings[path] = setting
    settings |= _policy(record, evaluator) | _model(record, config)
    if isinstance(debug := record.get("debug"), Record) and debug.get("deterministic") is True:
        settings["debug.deterministic"] = True
    if record.kind and "." not in record.kind and record.kind[0].islower():
        settings["base"] = record.kind
    return settings, unreadable


def _at_top(evaluator: Evaluator) -> Record:
    """The settings that a file without functions makes: `config.parallelism = …`, or sections of their own."""
    names = evaluator.module.names
    records = [value for value in names.values() if isinstance(value, Record)]
    whole = [record for record in records if any(section in record.fields for section in _SECTIONS)]
    return whole[-1] if whole else Record("", [], {name: names[name] for name in _SECTIONS if name in names})


def _policy(record: Record, evaluator: Evaluator) -> Settings:
    """Mode of activation checkpointing."""
    if "activation_checkpoint" not in record.fields:
        return {}
    policy = record.fields["activation_checkpoint"]
    if policy is None:
        return {"activation_checkpoint.mode": "none"}
    name = policy.kind.partition(".")[0] if isinstance(policy, Record) else str(policy)
    settings: Settings = {"activation_checkpoint.mode": _POLICIES.get(name, "selective")}
    if name == "PlannedAC":
        settings[RECOMPUTED] = evaluator.module.names.get("RECOMPUTED")
    if name == "MemoryBudgetAC":
        settings["activation_checkpoint.memory_budget"] = policy.get("memory_budget", True)
    return settings


def _model(record: Record, config: ConfigFile) -> Settings:
    """Module and flavor of the model, and the converters of its layers."""
    if (exported := exported_model(config.text)) is not None:
        return {"model.published": exported}
    spec = record.get("model_spec")
    settings: Settings = {"model.name": _module(config)}
    if not isinstance(spec, Record):
        return settings
    flavor = spec.fields.get("flavor") or next(iter(spec.arguments), None)
    settings["model.flavor"] = flavor if isinstance(flavor, str) else None
    for converter in spec.fields.get("converters") or []:
        name = converter.kind.rpartition(".")[0] or converter.kind if isinstance(converter, Record) else str(converter)
        dtype = next((dtype for start, dtype in _CONVERTERS.items() if name.startswith(start)), None)
        settings["dtype" if dtype else f"model.converters.{name}"] = dtype or True
        if dtype == "fp8":
            settings["float8.recipe_name"] = converter.get("recipe_name") or "tensorwise"
    for option, value in spec.fields.items():
        if option not in ("flavor", "converters", "model"):
            settings[f"model.{option}"] = value if isinstance(value, (str, int, bool, float)) else str(value)
    return settings


def _module(config: ConfigFile) -> str:
    """The package of models whose registry the recipe asks."""
    for node in ast.walk(parse_python(config.text, "", "give the recipe's file")):
        if isinstance(node, ast.ImportFrom) and any(alias.name.endswith("model_registry") for alias in node.names):
            module = (node.module or "").rpartition("torchtitan.models.")[2].split(".")[0]
            return module or (config.path.absolute().parent.name if config.path is not None else "")
    return ""
