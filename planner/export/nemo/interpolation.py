"""References of OmegaConf (`${model.x}`, `${.x}`, `${multiply:2, ${.y}}`) in a YAML tree, put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.markup import yaml_of

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS, _MAX_CHARACTERS = 20, 2_000


def resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with its references put in; a reference to nothing is null."""
    return {name: _value(value, tree, [str(name)]) for name, value in tree.items()}


def _value(value: Any, tree: Mapping[str, Any], path: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _value(inner, tree, [*path, str(name)]) for name, inner in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    text = value
    for _ in range(_MAX_ROUNDS):
        if not (match := _INNERMOST.search(text)) or len(text) > _MAX_CHARACTERS:
            break
        text = text[: match.start()] + str(_reference(match[1], tree, path)) + text[match.end() :]
    try:
        return None if text == "None" else yaml_of(text, "")
    except SpecError:
        return text


def _reference(inner: str, tree: Mapping[str, Any], path: list[str]) -> Any:
    function, colon, arguments = inner.partition(":")
    if colon:
        numbers = [float(part) for part in arguments.split(",") if re.fullmatch(r"\s*-?[\d.]+\s*", part)]
        if function in ("multiply", "mult") and len(numbers) == 2:
            return _whole(numbers[0] * numbers[1])
        if function in ("div", "int_div", "divide_ceil", "divide_floor") and len(numbers) == 2 and numbers[1]:
            return _whole(numbers[0] / numbers[1])
        if function in ("sum", "add"):
            return _whole(sum(numbers))
        return None
    dots = len(inner) - len(inner.lstrip("."))
    names = [*(path[:-dots] if dots else []), *inner.lstrip(".").split(".")]
    found: Any = tree
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number
