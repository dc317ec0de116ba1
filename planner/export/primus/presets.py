"""Primus' presets of modules and models, in the checkout around an experiment.

A preset's values lie over those of the presets that it `extends`; in an experiment, a model's preset fills in what the
module's leaves out, and `overrides` lie over both (primus/core/config and primus/core/launcher/parser.py).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.specs.reading import kind_of, parse_mapping, printable

Tree = dict[str, Any]
_ROOT = "primus/configs"
_MAX_DEPTH = 60
"""Presets that extend each other."""
_VARIABLE = re.compile(r"\$\{([^:{}]+):([^}]*)\}")
_MERGE = re.compile(r"<<\s*:|\?\s+(&\w+\s+)?<<|!!merge|2002:merge")
"""YAML's merges of mappings: copies of copies grow without end before anyone can count them."""
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def tree_of(text: str, where: str) -> Tree:
    """The mapping in a YAML text, each `${NAME:default}` by its default. Raises SpecError for what is none, or hostile.

    A variable without a default stays as it stands: no value, for whoever needs one.
    """
    if _MERGE.search(text):
        raise SpecError(f"{where}: <<: merges of mappings are not read", "write the keys out")
    tree = parse_mapping(text, where)
    return {str(key): _resolved(value) for key, value in tree.items()}


def _resolved(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    text = _VARIABLE.sub(lambda match: match[2], value)
    return value if text == value else _scalar(text)


def _scalar(text: str) -> Any:
    """The value of a default: true, false, nothing, a number, else the text."""
    words = {"true": True, "false": False, "null": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"-?\d{1,30}", text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def merged(base: Tree, over: Tree) -> Tree:
    """Both trees; where both have a value, that of `over`, and mappings are merged in turn."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if both else value
    return result


def preset(config: ConfigFile, section: str, framework: str, name: Any) -> Tree | None:
    """A preset with all that it extends; None where no checkout of Primus around the experiment has it.

    `section` is `models` or `modules`. Raises SpecError for a name that is none.
    """
    if not isinstance(name, str) or not name:
        raise SpecError(f"{section[:-1]}: {name!r:.60} is {kind_of(name)}, no preset's name", "name one of Primus'")
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    path = posixpath.normpath(posixpath.join(section, framework, file))
    return None if _text(config, path) is None else _extended(config, path, (), {})


def _text(config: ConfigFile, path: str) -> str | None:
    return None if path.startswith(("..", "/")) else config.above(f"{_ROOT}/{path}")


def _extended(config: ConfigFile, path: str, on_the_way: tuple[str, ...], known: dict[str, Tree]) -> Tree:
    """A preset with all that it extends; `known` has those that were read on the way, since many may extend one."""
    if path in known:
        return known[path]
    if path in on_the_way or len(on_the_way) > _MAX_DEPTH:
        raise SpecError(f"{printable(path, 80)}: extends itself", "mend its `extends:`")
    text = _text(config, path)
    if text is None:
        raise SpecError(f"{printable(path, 80)}: the checkout has no such preset", f"one below {_ROOT}")
    own = tree_of(text, path)
    bases = own.pop("extends", [])
    result: Tree = {}
    for base in bases if isinstance(bases, list) else [bases]:
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), str(base)))
        result = merged(result, _extended(config, beside, (*on_the_way, path), known))
    known[path] = merged(result, own)
    return known[path]
