"""Settings of torchtitan by `section.name`: from a recipe, a TOML file, or a launch script's overrides."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import CallRecord, Unknown
from planner.export.followed.shell_script import Script
from planner.export.imported_run import ConfigFile
from planner.export.named_models import Model, exported_model, model_called
from planner.specs.reading.python_text import literal, parse_python
from planner.specs.reading.toml_text import parse_toml

FLAVORS = {
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama3", "1B"): "llama-3.2-1b",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""(module, flavor) to the model's name here."""


_PREFIXES = {
    "deepseek_v3": "deepseek-",
    "llama3": "llama-3-",
    "llama4": "llama-4-",
    "llama2": "llama-2-",
    "llama": "llama-3-",
}


def model_of_flavor(name: str, flavor: str) -> Model | None:
    """The published model of a registry's flavor; None where it is of another size than any."""
    return FLAVORS.get((name, flavor)) or model_called(f"{_PREFIXES.get(name, f'{name}-')}{flavor}")


def flavor_of(module: str, function: str) -> tuple[str, str] | None:
    """The (module, flavor) that a registered function configures: `llama3_405b` of llama3 is its 405B."""
    flavor = function.removeprefix(f"{module}_").replace("_", "-").lower()
    return next((names for names in FLAVORS if (names[0], names[1].lower()) == (module, flavor)), None)


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
        for path, setting in value.flat(f"{section}.") if isinstance(value, CallRecord) else ():
            if isinstance(setting, (Unknown, CallRecord)):
                unreadable[path] = str(setting if isinstance(setting, Unknown) else setting.kind)[
                    :_MAX_SHOWN_CHARACTERS
                ]
            else:
                settings[path] = setting
    settings |= _policy(record, evaluator) | _model(record, config)
    if isinstance(debug := record.get("debug"), CallRecord) and debug.get("deterministic") is True:
        settings["debug.deterministic"] = True
    if record.kind and "." not in record.kind and record.kind[0].islower():
        settings["base"] = record.kind
    return settings, unreadable


def _at_top(evaluator: Evaluator) -> CallRecord:
    """The settings that a file without functions makes: `config.parallelism = …`, or sections of their own."""
    names = evaluator.module.names
    records = [value for value in names.values() if isinstance(value, CallRecord)]
    whole = [record for record in records if any(section in record.fields for section in _SECTIONS)]
    return whole[-1] if whole else CallRecord("", [], {name: names[name] for name in _SECTIONS if name in names})


def _policy(record: CallRecord, evaluator: Evaluator) -> Settings:
    """Mode of activation checkpointing."""
    if "activation_checkpoint" not in record.fields:
        return {}
    policy = record.fields["activation_checkpoint"]
    if policy is None:
        return {"activation_checkpoint.mode": "none"}
    name = policy.kind.partition(".")[0] if isinstance(policy, CallRecord) else str(policy)
    settings: Settings = {"activation_checkpoint.mode": _POLICIES.get(name, "selective")}
    if name == "PlannedAC":
        settings[RECOMPUTED] = evaluator.module.names.get("RECOMPUTED")
    if name == "MemoryBudgetAC":
        settings["activation_checkpoint.memory_budget"] = policy.get("memory_budget", True)
    return settings


def _model(record: CallRecord, config: ConfigFile) -> Settings:
    """Module and flavor of the model, and the converters of its layers."""
    if (exported := exported_model(config.text)) is not None:
        return {"model.published": exported}
    spec = record.get("model_spec")
    settings: Settings = {"model.name": _module(config)}
    if not isinstance(spec, CallRecord):
        return settings
    flavor = spec.fields.get("flavor") or next(iter(spec.arguments), None)
    settings["model.flavor"] = flavor if isinstance(flavor, str) else None
    for converter in spec.fields.get("converters") or []:
        name = (
            converter.kind.rpartition(".")[0] or converter.kind if isinstance(converter, CallRecord) else str(converter)
        )
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


_OLD = {
    "training.batch_size": "training.local_batch_size",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_type": "parallelism.data_parallel_type",
    "training.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "experimental.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
    "float8.enable_float8_linear": "float8.enable",
    "quantize.linear.float8.recipe_name": "float8.recipe_name",
}
"""Settings of older versions, and their names today."""


def read_settings(config: ConfigFile, script: Script) -> tuple[Settings, dict[str, str]]:
    """Settings, and those whose values only a run would know; `script` holds the text's words.

    Raises SpecError for a file that is broken, or has no settings of torchtitan.
    """
    unreadable: dict[str, str] = {}
    text = config.text
    if is_recipe(text):
        settings, unreadable = read_recipe(config)
    else:
        settings = _toml(text) if _is_toml(text) else override_settings(script)
    if not any(name.startswith(("parallelism.", "training.")) for name in settings):
        raise SpecError(
            "no torchtitan settings found", "give a recipe, a TOML file, or a script with --parallelism.… options"
        )
    return of_today(settings), unreadable


def of_today(settings: Settings) -> Settings:
    """Settings under today's names, with the dtype that converters ask for."""
    settings = {_OLD.get(name, name): value for name, value in settings.items()}
    return settings | _converted(settings)


def _converted(settings: Settings) -> Settings:
    """The dtype that converters of a TOML file, or its older switch, ask for."""
    converters = settings.get("model.converters") or settings.get("job.converters") or []
    names = " ".join(map(str, converters)) if isinstance(converters, list) else str(converters)
    if "mx" in names:
        return {"dtype": "mxfp8"}
    if "float8" in names or settings.get("float8.enable") is True:
        return {"dtype": "fp8", "float8.recipe_name": settings.get("float8.recipe_name") or "tensorwise"}
    return {}


def is_recipe(text: str) -> bool:
    """The text is a recipe in Python: it names torchtitan's classes of settings."""
    return bool(re.search(r"ParallelismConfig|TrainingConfig|Trainer\.Config|import .*model_registry", text))


def _is_toml(text: str) -> bool:
    return bool(re.search(r"^\[(parallelism|training|model)\]", text, re.MULTILINE))


def _toml(text: str) -> Settings:
    """Settings of a TOML file, as torchtitan took them up to 2025."""
    return flat(parse_toml(text, "", "give the file that --job.config_file names"))


def flat(data: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested tables as `section.name`."""
    settings: Settings = {}
    for key, value in data.items():
        settings |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return settings


def override_settings(script: Script) -> Settings:
    """`--section.key value`; a bare option is true, `--section.no-key` is false."""
    settings: Settings = {}
    key = ""
    for word in script.words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_") if "." in key else key
            section, _, name = key.rpartition(".")
            if name.startswith("no_"):
                settings[f"{section}.{name[3:]}"], key = False, ""
            elif "." in key or key in ("module", "config"):
                settings[key] = _literal(value) if equals else True
            else:
                key = ""
        elif key and settings.get(key) is True:
            settings[key] = _literal(word)
    if isinstance(config := settings.get("config"), str):
        flavor = flavor_of(str(settings.get("module", "")), config)
        settings |= {"model.name": flavor[0], "model.flavor": flavor[1]} if flavor else {}
    return settings


def _literal(text: str) -> Any:
    """A Python literal, or the text itself where it is none."""
    try:
        return literal(text)
    except ValueError:
        return text
