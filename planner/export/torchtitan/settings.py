"""Settings of torchtitan by `section.name`: from a recipe, a TOML file, or a launch script's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.scripts.shell import Script
from planner.export.torchtitan.flavors import flavor_of
from planner.export.torchtitan.read_recipe import Settings, read_recipe
from planner.specs.reading.python_text import literal
from planner.specs.reading.toml_text import parse_toml

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
