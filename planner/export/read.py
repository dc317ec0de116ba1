"""Which trainer a file is for, by what it says."""

from __future__ import annotations

import re
from typing import Any

import yaml

from planner.errors import SpecError
from planner.export.common.imported_run import Imported
from planner.export.common.shell import Script, read_script
from planner.export.deepspeed.read import read_deepspeed
from planner.export.megatron.read import read_megatron
from planner.export.torchtitan.read import read_torchtitan

SOURCES = ("megatron", "torchtitan", "deepspeed")


def read_configuration(text: str, source: str | None = None) -> Imported:
    """The run that `text` describes; `source` says what it is where that is not to be guessed.

    Raises SpecError for what is none of Megatron-LM's, torchtitan's and DeepSpeed's configurations.
    """
    source = source or _guess(text)
    if source == "deepspeed":
        return read_deepspeed(text)
    script = _options_file(text) or read_script(text)
    if source == "torchtitan":
        return read_torchtitan(text, script)
    if source == "megatron":
        return read_megatron(script)
    raise SpecError(f"--from: {source!r} is unknown", f"one of {', '.join(SOURCES)}")


def _guess(text: str) -> str:
    if re.search(r"ParallelismConfig|torchtitan|--parallelism\.|^\[parallelism\]", text, re.MULTILINE):
        return "torchtitan"
    if text.lstrip().startswith("{") and re.search(r'"(zero_optimization|train_micro_batch_size_per_gpu)"', text):
        return "deepspeed"
    return "megatron"


def _options_file(text: str) -> Script | None:
    """Options as YAML or JSON: Megatron's `MODEL_ARGS:`, a mapping of options, or a list of words."""
    if not re.search(r"^\s*(MODEL_ARGS:|\{|\[)", text, re.MULTILINE) or text.startswith("#!"):
        return None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(data, list):
        return Script(words=[str(word) for word in data])
    if not isinstance(data, dict):
        return None
    options = data.get("MODEL_ARGS") or data.get("args") or data
    variables = {"WORLD_SIZE": [str(data["world_size"])]} if data.get("world_size") else {}
    if isinstance(options, list):
        return Script(words=[str(word) for word in options], variables=variables)
    words = [word for option, value in options.items() for word in _words(str(option), value)]
    return Script(words=words, variables=variables)


def _words(option: str, value: Any) -> list[str]:
    option = option if option.startswith("-") else f"--{option.replace('_', '-')}"
    if value is False or value is None:
        return []
    if value is True:
        return [option]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, str(value)]
