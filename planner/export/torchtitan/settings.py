"""Settings of torchtitan by `section.name`: from a recipe, a TOML file, or a launch script's overrides."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.shell import Script
from planner.export.torchtitan.flavors import flavor_of
from planner.export.torchtitan.read_recipe import Settings, read_recipe


def read_settings(text: str, script: Script) -> tuple[Settings, dict[str, str]]:
    """Settings, and those whose values only a run would know; `script` holds the text's words.

    Raises SpecError for a file that is broken, or has no settings of torchtitan.
    """
    unreadable: dict[str, str] = {}
    if is_recipe(text):
        settings, unreadable = read_recipe(text)
    else:
        settings = _toml(text) if _is_toml(text) else _overrides(script)
    if not any(name.startswith(("parallelism.", "training.")) for name in settings):
        raise SpecError(
            "no torchtitan settings found", "give a recipe, a TOML file, or a script with --parallelism.… options"
        )
    return settings, unreadable


def is_recipe(text: str) -> bool:
    """The text is a recipe in Python: it names torchtitan's classes of settings."""
    return "ParallelismConfig" in text or "TrainingConfig" in text


def _is_toml(text: str) -> bool:
    return bool(re.search(r"^\[(parallelism|training|model)\]", text, re.MULTILINE))


def _toml(text: str) -> Settings:
    """Settings of a TOML file, as torchtitan took them up to 2025."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"not TOML: {error}", "give the file that --job.config_file names") from None
    return _flat(data)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested tables as `section.name`."""
    settings: Settings = {}
    for key, value in data.items():
        settings |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return settings


def _overrides(script: Script) -> Settings:
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
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
