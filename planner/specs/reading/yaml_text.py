"""YAML that a user gave: plain data and nothing else, with every alias counted as often as it is repeated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from planner.errors import SpecError
from planner.specs.reading.limits import MAX_DIGITS, YAML, Limits
from planner.specs.reading.text import printable, refuse_longer

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML built without libyaml: the same language, ten times slower
    from yaml import SafeLoader  # type: ignore[assignment]

_MAX_TAGS = 16
"""Directives that name tags: libyaml compares each with all before it."""
_TELLING = re.compile(rf"[*!]|\S{{{MAX_DIGITS}}}")
"""An alias, a tag or a long word: without one there is nothing to count."""
_TOO_DEEP = "exceeded maximum nesting depth"
"""The problem of a thousand brackets to libyaml 0.2.6 (PyYAML 6.0.4), which reads all before the first event."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(SafeLoader):
    """YAML 1.1 as PyYAML has it, except that `1e9` is a number, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str, hint: str = "", limits: Limits = YAML, *, keeps_last: bool = False) -> Any:
    """The value that a text holds. Raises SpecError, which names `where`, for anything else and beyond the limits.

    Two equal keys in one mapping are refused with their lines, unless `keeps_last` says that the last one counts.
    """

    def refused(problem: str, line: int | None = None) -> SpecError:
        place = "" if line is None else f"line {line}: "
        fallback = "name a YAML or JSON file" if line is None else "mend that line"
        return SpecError(f"{where}: {place}not YAML: {problem}".removeprefix(": "), hint or fallback)

    refuse_longer(text, limits.num_bytes, refused)
    if text.count("%TAG") > _MAX_TAGS:
        raise refused(f"more than {_MAX_TAGS} %TAG lines")
    loader = _Loader(text)
    try:
        if _may_exceed(text, limits):
            _refuse_events(text, limits, refused)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_nodes(node, text, limits, refused)
        if not keeps_last:
            _refuse_duplicates(node, where)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        if error.problem == _TOO_DEEP:
            raise refused(f"nested more than {limits.depth:,} deep") from None
        mark = error.problem_mark or error.context_mark
        raise refused(printable(str(error.problem or error.context)), mark.line + 1 if mark else None) from None
    # what PyYAML's constructors let through for tagged or impossible scalars (2024-13-45, !!bool x, 5,000 digits)
    except (
        yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, IndexError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise refused(printable(str(error).partition("\n")[0])) from None
    finally:
        loader.dispose()


def _may_exceed(text: str, limits: Limits) -> bool:
    """False for a text of too few characters and brackets, dashes and blanks to go beyond the limits."""
    openings = sum(map(text.count, ("[", "{", "- ", "-\n", "-\t", "-\r", "? ", "?\n", "?\t", "?\r")))
    return len(text) > limits.num_items or openings > limits.depth or "\n" + " " * limits.depth in text


def _refuse_events(text: str, limits: Limits, refused: Callable[[str], SpecError]) -> None:
    """Raise for more values, or values nested deeper, than the limits say, as soon as they show."""
    depth = num_items = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        num_items += isinstance(event, yaml.NodeEvent)
        if depth > limits.depth:
            raise refused(f"nested more than {limits.depth:,} deep")
        if num_items > limits.num_items:
            raise refused(f"more than {limits.num_items:,} values")


def _refuse_nodes(root: Node, text: str, limits: Limits, refused: Callable[..., SpecError]) -> None:
    """Raise for aliases that make too many values, or a value inside itself, and for numbers of too many digits."""
    if not _TELLING.search(text):
        return
    num_items: dict[int, int] = {}
    todo = [(root, False)]
    while todo:
        node, is_after = todo.pop()
        if is_after:
            num_items[id(node)] = size = 1 + sum(num_items[id(inner)] for inner in _inside(node))
            if size > limits.num_items:
                raise refused(f"its aliases make more than {limits.num_items:,} values")
        elif id(node) not in num_items:
            num_items[id(node)] = 0  # until all inside it is counted
            todo += [(node, True), *((inner, False) for inner in _inside(node))]
        elif not num_items[id(node)]:
            raise refused("a value holds itself", node.start_mark.line + 1)
        if isinstance(node, ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise refused(f"a number of {len(node.value):,} digits", node.start_mark.line + 1)


def _inside(node: Node) -> list[Node]:
    if isinstance(node, SequenceNode):
        return list(node.value)
    return [inner for pair in node.value for inner in pair] if isinstance(node, MappingNode) else []


def _refuse_duplicates(root: Node, where: str) -> None:
    """YAML keeps the last of two equal keys; here they are an error, with the line."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        todo += _inside(node)
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, MappingNode) else ():
            if not isinstance(key, ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                name, first = printable(key.value, 60), lines[key.value]
                problem = f"line {line}: {name}: given twice, first on line {first}"
                raise SpecError(f"{where}: {problem}".removeprefix(": "), "keep one of them")
            lines[key.value] = line
