"""Reads files that the user names; anything wrong with one is a SpecError that names the file."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from planner.errors import SpecError

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML built without libyaml: the same language, ten times slower
    from yaml import SafeLoader  # type: ignore[assignment]

MAX_BYTES = 2**20
"""The most bytes of a file that is read: a spec is a page of text, and a larger file was named by mistake."""

MAX_DEPTH = 1000
"""The deepest nesting of YAML: libyaml composes by recursion in C, and deeper nesting would overflow its stack."""

STDIN = "-"


class _Loader(SafeLoader):
    """YAML 1.1 as PyYAML has it, except that `1e9` is a number, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_yaml(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; `-` is stdin. Raises SpecError for whatever is not one."""
    return parse_mapping(read_text(path, max_bytes), label(path))


def label(path: str | Path) -> str:
    """A file as messages name it."""
    return "stdin" if str(path) == STDIN else printable(str(path))


def printable(text: str, limit: int = 200) -> str:
    """`text` as it is where it is short and of printable characters, else shortened or escaped."""
    short = text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"
    return short if short.isprintable() else repr(short)


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a small file; SpecError when it is missing, a directory, locked, huge or binary."""
    where = label(path)
    try:
        data = sys.stdin.buffer.read(max_bytes + 1) if str(path) == STDIN else _read_bytes(path, max_bytes)
    except FileNotFoundError:
        raise SpecError(f"{where}: no such file", "check the path") from None
    except IsADirectoryError:
        raise SpecError(f"{where}: is a directory", "name a file in it") from None
    except PermissionError:
        raise SpecError(f"{where}: no permission to read it", "make it readable for this user") from None
    except (OSError, ValueError) as error:  # name too long, loop of links, a NUL in the name …
        raise SpecError(
            f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}", "check the path"
        ) from None
    if len(data) > max_bytes:
        raise SpecError(
            f"{where}: is larger than {max_bytes:,} bytes, too large for a spec", "name a YAML or JSON file"
        )
    if b"\0" in data:
        raise SpecError(f"{where}: is a binary file", "name a YAML or JSON file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{where}: is not UTF-8 text (byte {error.start})", "name a YAML or JSON file") from None


def _read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """At most max_bytes + 1 bytes; a file known to be larger is not read at all."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return b"\n" * (max_bytes + 1) if size > max_bytes else file.read(max_bytes + 1)


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping that `text` holds, as JSON where it looks like it and else as YAML."""
    if where.endswith(".json") or text.lstrip().startswith("{"):
        data = _parse_json(text, where)
    else:
        data = _parse_yaml(text, where)
    if data is None:
        raise SpecError(f"{where}: is empty", "write `key: value` lines")
    if not isinstance(data, dict):
        raise SpecError(f"{where}: holds {kind_of(data)}, not a mapping", "write `key: value` lines")
    return data


def kind_of(value: object) -> str:
    """The type of `value` in a user's words."""
    names = {type(None): "nothing", bool: "true or false", int: "an integer", float: "a number", str: "text",
             list: "a list", tuple: "a list", dict: "a mapping"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where), parse_int=whole_number)
    except json.JSONDecodeError as error:
        if where.endswith(".json"):
            hint = f"mend line {error.lineno}, column {error.colno}"
            raise SpecError(f"{where}: line {error.lineno}: not JSON: {error.msg}", hint) from None
        return _parse_yaml(text, where)  # a YAML flow mapping also starts with a brace
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, nesting without end
        raise SpecError(f"{where}: not JSON: {error}", "name a YAML or JSON file") from None


def whole_number(digits: str) -> int | float:
    """The number that JSON writes so; one of more digits than any count has is a float, on which no sum breaks.

    Raises ValueError for one that no float has.
    """
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits) if len(digits) < 20 else float(digits)


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise SpecError(f"{where}: {printable(key, 60)}: given twice", "keep one of them")
        result[key] = value
    return result


def _parse_yaml(text: str, where: str) -> Any:
    loader = _Loader(text)
    try:
        _refuse_nesting(text, where)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, where)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        problem = printable(str(error.problem or error.context))
        raise SpecError(f"{where}: {line}not YAML: {problem}", "mend that line") from None
    # what PyYAML's constructors let through for tagged or impossible scalars (2024-13-45, !!bool x, 5,000 digits)
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        problem = printable(str(error).partition("\n")[0])
        raise SpecError(f"{where}: not YAML: {problem}", "name a YAML or JSON file") from None
    finally:
        loader.dispose()


def _refuse_nesting(text: str, where: str) -> None:
    if sum(map(text.count, "[{-?")) <= MAX_DEPTH:  # what opens a collection inside a line
        return
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SpecError(f"{where}: not YAML: nested more than {MAX_DEPTH:,} deep", "name a YAML or JSON file")


def _refuse_duplicates(root: Node, where: str) -> None:
    """YAML keeps the last of two equal keys; here they are an error, with the line."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            todo.extend(node.value)
        elif isinstance(node, MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                todo += (key, value)
                if not isinstance(key, ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if key.value in lines:
                    name, first = printable(key.value, 60), lines[key.value]
                    raise SpecError(
                        f"{where}: line {line}: {name}: given twice, first on line {first}", "keep one of them"
                    )
                lines[key.value] = line
