"""The words and variables of a launch: from a bash script, or from options kept as YAML or JSON."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.common.markup import json_of, yaml_of
from planner.export.scripts.shell import Files, Script, read_shell


def read_script(text: str, files: Files = lambda name: None) -> Script:
    """Options as YAML or JSON where the text is that, else the words of a bash script, which may source `files`."""
    return _options_file(text) or read_shell(text, files)


def _options_file(text: str) -> Script | None:
    """Megatron's `MODEL_ARGS:`, a mapping of options, or a list of words; None for any other text."""
    if not re.search(r"^\s*(MODEL_ARGS:|\{|\[)", text, re.MULTILINE) or text.startswith("#!"):
        return None
    try:
        data = json_of(text, "") if text.lstrip()[:1] in "{[" else yaml_of(text, "")
    except SpecError:
        return None
    if isinstance(data, list):
        return Script(words=[str(word) for word in data])
    if not isinstance(data, dict):
        return None
    options = data.get("MODEL_ARGS") or data.get("args") or data
    variables = {"WORLD_SIZE": [str(data["world_size"])]} if data.get("world_size") else {}
    if isinstance(options, list):
        return Script(words=[str(word) for word in options], variables=variables)
    if not isinstance(options, dict):
        return None
    words = [word for option, value in options.items() for word in _words(str(option), value)]
    return Script(words=words, variables=variables)


def _words(option: str, value: Any) -> list[str]:
    """An option and its value as words of a command line; true is a bare flag, false and null are none."""
    option = option if option.startswith("-") else f"--{option if '.' in option else option.replace('_', '-')}"
    if value is False or value is None:
        return []
    if value is True:
        return [option]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, str(value)]
