"""Settings by name, whichever way a trainer is given them: a command line, YAML, JSON, or keywords in Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, json_of, yaml_of
from planner.export.megatron.option_rows import options_of
from planner.export.megatron.script_reading import num_gpus
from planner.specs.reading.python_text import literal, parse_python

Settings = dict[str, Any]
_ON = (True, "true", "True", "yes", "1", 1, "y")
_OFF = (False, "false", "False", "no", "n")


def is_on(value: Any) -> bool:
    """A setting is true in any of the ways that YAML and command lines write it."""
    return not isinstance(value, (list, dict)) and value in _ON


def is_off(value: Any) -> bool:
    """A setting is false, or no setting."""
    return value is None or (
        isinstance(value, (bool, str)) and (value in _OFF or value in ("", "none", "None", "null"))
    )


@dataclass(slots=True)
class KeyedSettings:
    """A configuration's settings, and the words around them."""

    settings: Settings
    script: Script
    """The script that launches; an empty one for a file of settings."""
    num_gpus: int | None = None
    unread: dict[str, str] = field(default_factory=dict)
    """Settings whose values only a run knows, and their texts."""


def settings_of(config: ConfigFile, calls: re.Pattern[str] | None = None) -> KeyedSettings:
    """The settings of a text, and those of a YAML file that it names; `calls` are Python's that take settings.

    Raises SpecError for what is broken.
    """
    text = config.text
    if text.lstrip().startswith("{") and not re.search(r"^\s*#", text, re.MULTILINE):
        data = json_of(text, "give the file of arguments")
        return KeyedSettings(data if isinstance(data, dict) else {}, Script())
    if re.search(r"^\s*(import|from) \w", text, re.MULTILINE) and not text.startswith("#!/bin"):
        return _of_python(text, calls)
    if re.search(r"^[\"']?[A-Za-z_]\w*[\"']?:(\s|$)", text, re.MULTILINE) and not re.search(
        r"^\s*--\w", text, re.MULTILINE
    ):
        return KeyedSettings(mapping_of(text), Script())
    return _of_script(config)


def mapping_of(text: str) -> Settings:
    """The mapping that a YAML text holds."""
    data = yaml_of(text, "give the configuration's file")
    if not isinstance(data, dict):
        raise SpecError("the file holds no settings", "give the configuration's file")
    return data


def _of_script(config: ConfigFile) -> KeyedSettings:
    script = read_script(config.text, config.beside)
    options = options_of(script.words)
    settings: Settings = {}
    for name in [word for word in script.words if word.endswith((".yaml", ".yml")) and not word.startswith("-")]:
        if (text := config.beside(name)) is not None and not any(name in words for words in options.values()):
            settings |= mapping_of(text)
    for name, words in options.items():
        values = [word for word in words if not word.endswith(".py")]
        key = name.lstrip("-").replace("-", "_")
        settings[key] = True if not values else values[0] if len(values) == 1 else values
    overrides = dict(word.split("=", 1) for word in script.words if re.match(r"[a-z_]\w*=", word))
    settings |= {name: value for name, value in overrides.items() if name not in settings}
    return KeyedSettings(settings, script, num_gpus({n.replace("_", "-"): w for n, w in options.items()}, script))


def _of_python(text: str, calls: re.Pattern[str] | None) -> KeyedSettings:
    """Keywords of the calls that make a trainer's arguments, and the model that is loaded."""
    tree = parse_python(text, "", "give the script that makes the trainer's arguments")
    names = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    keyed = KeyedSettings({}, Script())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: k.value for k in node.keywords if k.arg} if calls is not None and calls.search(name) else {}
        if name.endswith("from_pretrained") and "Model" in name and node.args:
            keywords.setdefault("model_name_or_path", node.args[0])
        for key, expression in keywords.items():
            value = _literal(expression, names)
            if value is not ...:
                keyed.settings[key] = value
            elif key not in keyed.settings:
                keyed.unread[key] = f"{ast.unparse(expression)[:80]} (line {expression.lineno})"
    return keyed


def _literal(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """A literal, or the one that a name is assigned; … for anything else."""
    for _ in range(5):
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
    try:
        return literal(node)
    except ValueError:
        return ...


def number(settings: Mapping[str, Any], *names: str) -> int | None:
    """The first of the settings that is given, as a whole number. SpecError where it is none."""
    for name in names:
        value = settings.get(name)
        if value in (None, "", "auto", "null"):
            continue
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            raise SpecError(f"{name}: {value!r:.60} is no number", "write a number") from None
    return None
