"""A run of Megatron-Bridge: a recipe in Python, overrides of one, or an exported bridge.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import CallRecord
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, json_of, yaml_of
from planner.export.megatron.bridge_fields import Fields, fields_of, model_fields, options_of_fields, sort_fields
from planner.export.megatron.option_words import options_of
from planner.export.megatron.script_reading import run_of
from planner.export.named_models import Model, model_called, num_layers_of
from planner.specs.reading import kind_of

_RANKS = ("--nnodes", "--nproc-per-node")
"""The options of torchrun that say how many ranks there are."""
_MARKS = ("model", "train", "ddp", "mixed_precision")
_HARDWARE = ("h100", "h200", "b200", "b300", "gb200", "gb300", "a100")


def read_bridge(config: ConfigFile) -> ImportedRun:
    """The run that a recipe's function, or its overrides, describe; a recipe that is only named is not known.

    Raises SpecError for a text without overrides or recipes, and for values that are no numbers.
    """
    is_python = re.search(r"^\s*def |^from |^import ", config.text, re.MULTILINE)
    # a manifest of Kubernetes has programs in its ConfigMap
    if is_python and not config.text.startswith("#!") and not re.search(r"^apiVersion:", config.text, re.MULTILINE):
        return _read_recipe(config)
    words, script, recipe = _words(config)
    fields = dict(_field(word) for word in words)
    if not fields:
        raise SpecError("the text overrides no field of a recipe", "give bridge.json, or the script that sets fields")
    imported = _run(fields, script, recipe)
    imported.notes.append("what the recipe sets beside these overrides is not read")
    return imported


def _read_recipe(config: ConfigFile) -> ImportedRun:
    evaluator = Evaluator(config)
    record = chosen_recipe(evaluator, config.recipe, _MARKS)
    if record is None:
        raise SpecError("no function of the file returns a recipe that can be followed", "give the recipe's own file")
    names = [name for name in evaluator.own_functions() if not name.startswith("_")]
    name = config.recipe or (names[0] if len(names) == 1 else "")
    fields = fields_of(record)
    script = Script(variables={"WORLD_SIZE": [match[1]]} if (match := re.search(r"_(\d+)gpus?_", name)) else {})
    imported = _run(fields, script, name, _hub_name(record))
    hardware = next((gpu for gpu in _HARDWARE if f"_{gpu}_" in name), None)
    if hardware is not None:
        imported.run["hardware"] = hardware
    return imported


def _hub_name(record: CallRecord) -> str:
    """The repository of the hub that the recipe's model comes from."""
    model = record.fields.get("model")
    arguments = model.arguments if isinstance(model, CallRecord) else []
    return next((argument for argument in arguments if isinstance(argument, str)), "")


def _run(fields: Fields, script: Script, recipe: str, hub_name: str = "") -> ImportedRun:
    launched = {name: words for name, words in options_of(script.words).items() if name in _RANKS}
    options = {**launched, **options_of_fields(fields)}
    named = None if "--hidden-size" in options else model_called(hub_name) or model_of_recipe(recipe)
    imported = run_of(options, script, "bridge", num_layers=num_layers_of(named))
    imported.run["runtime"] = "bridge"
    if imported.run["model"] is not None and named is None:
        imported.run["model"] |= model_fields(fields, recipe)
    imported.unknown.clear()
    sort_fields(fields, imported.ignored, imported.unknown)
    if imported.run["model"] is None:
        imported.run["model"] = named
        if named is None and (hub_name or recipe):
            imported.notes.append(f"{hub_name or recipe} is no model that the planner knows: add --model")
        imported.run["parallelism"] |= _expert_tensor_parallel(imported.run["model"], fields)
        _sort_mixture(imported)
    imported.notes = [note for note in imported.notes if not note.startswith("neither --bf16")]
    return imported


def _expert_tensor_parallel(model: Model | None, fields: Fields) -> dict[str, Any]:
    """A mixture's experts are split as its attention is unless told."""
    if model is None:
        return {}
    size = fields.get("model.expert_tensor_parallel_size") or fields.get("model.tensor_model_parallel_size") or 1
    return {"etp": size} if isinstance(size, int) else {}


def _sort_mixture(imported: ImportedRun) -> None:
    """Features of mixtures that a model by name may have."""
    imported.run["features"].pop("dispatcher", None)


def model_of_recipe(recipe: str) -> Model | None:
    """The model that a recipe's name begins with: `qwen3_30b_a3b_pretrain_config`."""
    parts = re.split(r"_(?:pretrain|sft|peft|finetune|config|low_precision|lora)", recipe)[0].split("_")
    for length in range(len(parts), 0, -1):
        if (model := model_called("-".join(parts[:length]))) is not None:
            return model
    return None


def _words(config: ConfigFile) -> tuple[list[str], Script, str]:
    """The overrides as words, the variables around them, and the name of the recipe."""
    text = config.text
    if text.lstrip().startswith("{"):
        data = json_of(text, "give the bridge.json that plan export wrote")
        world = {"WORLD_SIZE": [str(data["world_size"])]} if data.get("world_size") else {}
        overrides = data.get("overrides", [])
        if not isinstance(overrides, list):
            raise SpecError(f"overrides: holds {kind_of(overrides)}, not a list", 'write ["train.train_iters=100", …]')
        return [str(word) for word in overrides], Script(variables=world), str(data.get("recipe", ""))
    if re.match(r"(#.*\n|\s|---)*(model|train|ddp|optimizer):\s*(#.*)?\n", text):
        data = yaml_of(text, "give the file of overrides")
        rows = _flat(data) if isinstance(data, dict) else []
        return [f"{path}={json.dumps(value)}" for path, value in rows], Script(), ""
    script = read_script(text, config.beside)
    recipes = [script.words[i + 1] for i, word in enumerate(script.words[:-1]) if word == "--recipe"]
    return [word for word in script.words if re.match(r"[+a-z_]+(\.\w+)+=", word)], script, next(iter(recipes), "")


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in data.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return rows


def _field(word: str) -> tuple[str, Any]:
    """An override's path and value."""
    path, _, value = word.partition("=")
    if value.startswith("{"):
        # Hydra writes keys without quotes
        value = re.sub(r"([{,])(\w+):", r'\1"\2":', value)
    try:
        return path.lstrip("+"), json_of(value, "")
    except SpecError:
        return path.lstrip("+"), {"True": True, "False": False, "None": None}.get(value, value)
