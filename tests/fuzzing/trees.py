"""Changes the tree that a JSON, YAML or TOML file holds, and writes it as it was."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import yaml

from fuzzing.values import NUMBERS, WORDS

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def changed_tree(data: bytes, chance: random.Random) -> bytes:
    """The file with some values, keys or branches changed, written as it was; the file itself where it is no tree."""
    tree, write = _tree(data)
    if not isinstance(tree, dict | list):
        return data
    tree = change(copy.deepcopy(tree), chance)
    try:
        return write(tree).encode(errors="surrogateescape")
    except (ValueError, TypeError, yaml.YAMLError, RecursionError):
        return data


def change(tree: Any, chance: random.Random) -> Any:
    """The tree after some changes, made in place."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        _change_branch(tree, chance)
    return tree


@lru_cache(256)
def _tree(data: bytes) -> tuple[Any, Callable[[Any], str]]:
    """The tree of a file and what writes one; None where it is none."""
    text = data.decode(errors="surrogateescape")
    for read, write in (
        (json.loads, json.dumps),
        (tomllib.loads, _toml),
        (lambda text: yaml.load(text, Loader=_LOADER), _yaml),
        (_json_lines, lambda rows: "\n".join(map(json.dumps, rows))),
    ):
        try:
            tree = read(text)
        except (ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(tree, dict | list) and tree:
            return tree, write
    return None, _yaml


def _json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _yaml(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_DUMPER, sort_keys=False)


def _toml(tree: dict[str, Any]) -> str:
    return "\n".join(_toml_lines(tree, ""))


def _toml_lines(table: dict[str, Any], name: str) -> Iterator[str]:
    """The values of a table, then the tables in it."""
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{json.dumps(str(key))} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            inner = f"{name}.{json.dumps(str(key))}" if name else json.dumps(str(key))
            yield f"[{inner}]"
            yield from _toml_lines(value, inner)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float) or value is None:
        return str(value).lower()
    return json.dumps(value, default=str)


def _change_branch(tree: Any, chance: random.Random) -> None:
    """Walk down to some branch and change what hangs there."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = chance.choice(keys)
        child = tree[key]
        if isinstance(child, dict | list) and child and chance.random() < 0.8:
            tree = child
            continue
        match chance.randrange(8):
            case 0 | 1 | 2:
                tree[key] = chance.choice((*NUMBERS, *WORDS, [], {}, [child], {"a": child}))
            case 3 if isinstance(child, int | float) and not isinstance(child, bool):
                tree[key] = chance.choice((child + 1, child * 2, -child, child / 2, float(child), str(child)))
            case 4:
                del tree[key]
            case 5 if isinstance(tree, dict):
                tree[chance.choice((str(key) + "x", "", "a" * 300, "\x1b[2J", *map(str, keys)))] = child
            case 6:
                tree[key] = tree[chance.choice(keys)]
            case _ if isinstance(tree, list):
                tree.extend([child] * chance.choice((1, 100)))
        return
