"""Values of configurations in Python that is followed and never run: records, unknowns, and what their methods do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from planner.export.imported_run import ConfigFile

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
MAX_COMPARED = 5_000
_MAX_NODES = 100


def told(node: ast.expr) -> str:
    """The text of a short expression; that of a long one is not worth the time, which a loop takes each time."""
    return "…" if len(list(islice(ast.walk(node), _MAX_NODES))) == _MAX_NODES else ast.unparse(node)


class Unknown:
    """A value that only a run knows."""

    def __init__(self, what: str | ast.expr) -> None:
        self._what = what

    def __repr__(self) -> str:
        return (self._what if isinstance(self._what, str) else told(self._what))[:80]


@dataclass(slots=True, eq=False)
class CallRecord:
    """The result of a call of code outside the file: its name, its arguments, and the fields that are set on it."""

    kind: str
    arguments: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of fields that nobody set, where the class is known."""
    line: int = 0
    """The line of the call; 0 where it is no call in the text."""

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path of fields."""
        value: Any = self
        for name in path.split("."):
            if isinstance(value, CallRecord):
                value = value.fields.get(name, value.defaults.get(name))
            else:
                value = value.get(name) if isinstance(value, dict) else None
            if value is None:
                return default
        return value

    def flat(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Paths and values of all fields, those of records and dictionaries inside included."""
        yield from islice(self._flat(prefix), MAX_CHARACTERS)

    def _flat(self, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in self.fields.items():
            yield from _flat(f"{prefix}{name}", value)

    def copied(self, known: dict[int, Any] | None = None) -> CallRecord:
        """A copy whose records can be changed; what stands in it twice is copied once."""
        known = {} if known is None else known
        copy = known[id(self)] = CallRecord(self.kind, list(self.arguments), {}, self.defaults)
        copy.fields |= {name: _copied(value, known) for name, value in self.fields.items()}
        return copy


@dataclass(slots=True, eq=False)
class PythonFunction:
    node: ast.FunctionDef
    module: PythonModule


@dataclass(slots=True, eq=False)
class PythonClass:
    node: ast.ClassDef
    module: PythonModule


@dataclass(slots=True, eq=False)
class PythonImport:
    """A name that another file defines; the file is read when the name is used."""

    config: ConfigFile
    name: str


@dataclass(slots=True, eq=False)
class PythonModule:
    """A file's names and their values."""

    config: ConfigFile
    names: dict[str, Any] = field(default_factory=dict)


class Scope:
    """The names that an expression sees."""

    def __init__(self, module: PythonModule, names: dict[str, Any], outer: Scope | None = None) -> None:
        self.module, self.names, self.outer = module, names, outer

    def get(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer.get(name)
        return self.module.names.get(name, Unknown(name))


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, CallRecord):
        if not value.fields:
            yield path, value
        yield from value._flat(f"{path}.")
    elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    else:
        yield path, value


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, CallRecord):
        return value.copied(known)
    if isinstance(value, list):
        copies = known[id(value)] = [_copied(item, known) for item in value]
        return copies
    if isinstance(value, dict):
        named = known[id(value)] = {key: _copied(item, known) for key, item in value.items()}
        return named
    return value


def is_small(*values: Any) -> bool:
    """True for values that hold at most MAX_COMPARED others, one that stands in them twice counted twice.

    Text is made of a value, and values are compared, in time that grows with this count and not with their memory.
    """
    todo, count = list(values), 0
    while todo:
        value = todo.pop()
        count += 1
        if count > MAX_COMPARED:
            return False
        if isinstance(value, (list, tuple)):
            todo += value[: MAX_COMPARED + 1]
        elif isinstance(value, dict):
            todo += islice(value.values(), MAX_COMPARED + 1)
    return True


def built_in(name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """The value of a call of one of BUILTINS; Unknown where it is not worth its time."""
    is_flat = name in ("len", "list", "dict", "tuple", "set", "bool")
    return BUILTINS[name](*arguments, **keywords) if is_flat or is_small(*arguments) else Unknown(name)


def truth(value: Any) -> bool | None:
    """True or false as Python counts a value; None where it is not known."""
    if isinstance(value, (Unknown, CallRecord)):
        return True if isinstance(value, CallRecord) and value.fields else None
    return bool(value)


def has_field(owner: Any, name: str) -> bool:
    """True unless the class is known and has no such field."""
    return not (isinstance(owner, CallRecord) and owner.defaults) or name in owner.defaults or name in owner.fields


def field_value(name: str, arguments: list[Any]) -> Any:
    owner, key = arguments[0], arguments[1]
    if not isinstance(owner, CallRecord) or not isinstance(key, str):
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
    if isinstance(owner, CallRecord) and owner.arguments:
        # a method of what a call returned is about the same thing, such as AutoBridge's provider of a model
        return True, CallRecord(f"{owner.kind}.{name}", [*owner.arguments, *arguments], dict(keywords))
    return False, None
