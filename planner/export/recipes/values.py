"""Values of configurations in Python that is followed and never run: records, unknowns, and what their methods do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.Pow: operator.pow,
}  # fmt: skip
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
BUILTINS: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "min": min, "max": max, "len": len, "list": list,
    "dict": dict, "tuple": tuple, "set": list, "sum": sum, "abs": abs, "sorted": sorted, "round": round,
}  # fmt: skip


MAX_CHARACTERS = 100_000
"""Characters of a text, and items of a list, that a configuration may make."""


def text_of(node: ast.AST) -> str:
    """The expression as Python writes it, worked out once: a call in a loop is named each time that it is followed."""
    text: str | None = vars(node).get("written")
    if text is None:
        text = node.written = ast.unparse(node)  # type: ignore[attr-defined]
    return text


class Unknown:
    """A value that only a run knows."""

    def __init__(self, text: str) -> None:
        self.text = text[:80]

    def __repr__(self) -> str:
        return self.text


@dataclass(slots=True, eq=False)
class Record:
    """The result of a call of code outside the file: its name, its arguments, and the fields that are set on it."""

    kind: str
    arguments: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of fields that nobody set, where the class is known."""

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path of fields."""
        value: Any = self
        for name in path.split("."):
            if isinstance(value, Record):
                value = value.fields.get(name, value.defaults.get(name))
            else:
                value = value.get(name) if isinstance(value, dict) else None
            if value is None:
                return default
        return value

    def flat(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Paths and values of all fields, those of records and dictionaries inside included."""
        for name, value in self.fields.items():
            yield from _flat(f"{prefix}{name}", value)

    def copied(self) -> Record:
        """A copy whose records can be changed."""
        fields = {name: _copied(value) for name, value in self.fields.items()}
        return Record(self.kind, list(self.arguments), fields, self.defaults)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Record):
        if not value.fields:
            yield path, value
        yield from value.flat(f"{path}.")
    elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    else:
        yield path, value


def _copied(value: Any) -> Any:
    if isinstance(value, Record):
        return value.copied()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def truth(value: Any) -> bool | None:
    """True or false as Python counts a value; None where it is not known."""
    if isinstance(value, (Unknown, Record)):
        return True if isinstance(value, Record) and value.fields else None
    return bool(value)


def has_field(owner: Any, name: str) -> bool:
    """True unless the class is known and has no such field."""
    return not (isinstance(owner, Record) and owner.defaults) or name in owner.defaults or name in owner.fields


def field_value(name: str, arguments: list[Any]) -> Any:
    owner, key = arguments[0], arguments[1]
    if not isinstance(owner, Record) or not isinstance(key, str):
        return Unknown(name)
    if name == "setattr":
        owner.fields[key] = arguments[2]
        return None
    return owner.fields.get(key, arguments[2] if len(arguments) > 2 else Unknown(key))


def method_value(owner: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> tuple[bool, Any]:
    """(it is known what it does, the value) of a method of a value."""
    if isinstance(owner, dict):
        if name == "update":
            owner |= (arguments[0] if arguments and isinstance(arguments[0], dict) else {}) | keywords
            return True, None
        if name in ("get", "pop", "setdefault") and arguments and isinstance(arguments[0], (str, int)):
            if name == "setdefault":
                return True, owner.setdefault(arguments[0], arguments[1] if len(arguments) > 1 else None)
            found = owner.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
            if name == "pop":
                owner.pop(arguments[0], None)
            return True, found
        if name in ("items", "keys", "values"):
            return True, [list(item) if name == "items" else item for item in getattr(owner, name)()]
        if name == "copy":
            return True, dict(owner)
    if isinstance(owner, list):
        if name == "append":
            owner.append(arguments[0])
            return True, None
        if name == "extend":
            more = arguments[0] if isinstance(arguments[0], list) else []
            owner.extend(more if len(owner) + len(more) <= MAX_CHARACTERS else [])
            return True, None
    if isinstance(owner, str) and name in (
        "lower",
        "upper",
        "strip",
        "replace",
        "split",
        "startswith",
        "endswith",
    ):
        is_long = name == "replace" and len(owner) * len(str(arguments[-1:])) > MAX_CHARACTERS
        return True, Unknown(name) if is_long else getattr(owner, name)(*arguments)
    if isinstance(owner, Record) and owner.arguments:
        # a method of what a call returned is about the same thing, such as AutoBridge's provider of a model
        return True, Record(f"{owner.kind}.{name}", [*owner.arguments, *arguments], dict(keywords))
    return False, None
