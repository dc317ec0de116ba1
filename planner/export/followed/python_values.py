"""Values of configurations in Python that is followed and never run: records, unknowns, and what their methods do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from planner.export.imported_run import ConfigFile
from planner.specs.base import Fields

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.Pow: operator.pow,
}  # fmt: skip
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
MAX_CHARACTERS = 100_000
"""Characters of a text, and items of a list, that a configuration may make."""
MAX_COMPARED, MAX_ITEMS = 5_000, 4_096
_MAX_NUMBER, _MAX_EXPONENT = 10**12, 64
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
    fields: Fields = field(default_factory=dict)
    defaults: Fields = field(default_factory=dict)
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


OPAQUE = (CallRecord, Unknown)
"""Kinds of values that only a run knows, and of calls outside the file."""


@dataclass(slots=True, eq=False)
class PythonFunction:
    node: ast.FunctionDef
    module: Scope

    @property
    def kind(self) -> str:
        return self.node.name

    @property
    def has_parameters(self) -> bool:
        """It has parameters without a default."""
        return len(self.node.args.args) > len(self.node.args.defaults)

    @property
    def returns(self) -> str:
        """The text of its annotation, or nothing."""
        return ast.unparse(self.node.returns) if self.node.returns is not None else ""


@dataclass(slots=True, eq=False)
class PythonClass:
    node: ast.ClassDef
    module: Scope

    @property
    def kind(self) -> str:
        return self.node.name


@dataclass(slots=True, eq=False)
class PythonImport:
    """A name that another file defines; the file is read when the name is used."""

    config: ConfigFile
    name: str


class Scope:
    """The names that an expression sees: those of a file, and of a function or a class inside it."""

    def __init__(self, config: ConfigFile, names: Fields, outer: Scope | None = None) -> None:
        self.config, self.names, self.outer = config, names, outer
        self.module: Scope = self if outer is None else outer.module

    def get(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        return Unknown(name) if self.outer is None else self.outer.get(name)

    def inside(self, names: Fields) -> Scope:
        """The scope of a function, a class or a comprehension, with its own names."""
        return Scope(self.config, names, self)


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


def computed(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    """The value of an operation; `value` gives those of its parts."""
    match node:
        case ast.BinOp():
            return _binary(node, value(node.left), value(node.right))
        case ast.Compare():
            return _compare(node, value(node.left), value(node.comparators[0]))
        case ast.UnaryOp(op=ast.Not()):
            known = truth(value(node.operand))
            return Unknown(node) if known is None else not known
        case ast.UnaryOp():
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        case ast.IfExp():
            return value(node.body if truth(value(node.test)) else node.orelse)
        case ast.BoolOp():
            found: Any = None
            for item in node.values:
                found = value(item)
                if truth(found) is isinstance(node.op, ast.Or):
                    break
            return found
    return Unknown(node)


def _binary(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, ast.Mult) and (isinstance(left, (list, str)) or isinstance(right, (list, str))):
        items, times = (left, right) if isinstance(right, int) else (right, left)
        return items * times if len(items) * times <= MAX_ITEMS else Unknown(node)
    if isinstance(left, OPAQUE) or isinstance(right, OPAQUE):
        return Unknown(node)
    if isinstance(node.op, ast.Pow) and not (abs(left) <= _MAX_NUMBER and abs(right) <= _MAX_EXPONENT):
        return Unknown(node)
    if isinstance(node.op, ast.Mod) and isinstance(left, str):
        return Unknown(node)
    made = BINARY[type(node.op)](left, right)
    return Unknown(node) if isinstance(made, (str, list)) and len(made) > MAX_CHARACTERS else made


def _compare(node: ast.Compare, left: Any, right: Any) -> Any:
    kind = type(node.ops[0])
    if kind in (ast.Is, ast.IsNot, ast.Eq, ast.NotEq) and (left is None or right is None):
        other = right if left is None else left
        if isinstance(other, Unknown) or (isinstance(other, CallRecord) and not other.fields):
            return Unknown(node)
        return (other is None) == (kind in (ast.Is, ast.Eq))
    if isinstance(left, OPAQUE) or isinstance(right, OPAQUE) or len(node.ops) > 1:
        return Unknown(node)
    if kind in (ast.In, ast.NotIn) and isinstance(right, dict):
        left = as_key(left)
    return COMPARE[kind](left, right) if is_small(left, right) else Unknown(node)


def as_key(value: Any) -> Any:
    """A value as a key: tuples are lists here, which are none."""
    return tuple(value) if isinstance(value, list) else value


def truth(value: Any) -> bool | None:
    """True or false as Python counts a value; None where it is not known."""
    if isinstance(value, OPAQUE):
        return True if isinstance(value, CallRecord) and value.fields else None
    return bool(value)


def is_of(value: Any, kinds: Any) -> bool | Unknown:
    """A value is of one of the classes; Unknown for a record of a class that is not among them by its name."""
    names = {str(getattr(kind, "kind", kind)) for kind in (kinds if isinstance(kinds, list) else [kinds])}
    if isinstance(value, OPAQUE):
        is_named = isinstance(value, CallRecord) and value.kind.rpartition(".")[2] in names
        return True if is_named else Unknown("isinstance")
    return not names.isdisjoint(kind.__name__ for kind in type(value).__mro__)


def has_field(owner: Any, name: str) -> bool:
    """True unless the class is known and has no such field."""
    return not (isinstance(owner, CallRecord) and owner.defaults) or name in owner.defaults or name in owner.fields


def field_value(name: str, owner: Any, key: Any, *more: Any) -> Any:
    if not isinstance(owner, CallRecord) or not isinstance(key, str):
        return Unknown(name)
    if name == "setattr":
        owner.fields[key] = more[0]
        return None
    return owner.fields.get(key, more[0] if more else Unknown(key))


_FLAT: Mapping[str, Callable[..., Any]] = {
    **{known.__name__: known for known in (len, list, dict, tuple, bool, divmod)},
    "set": list, "range": lambda *bounds: list(range(*bounds)[:MAX_ITEMS]),
    "isinstance": is_of, "hasattr": has_field, "getattr": partial(field_value, "getattr"),
    "setattr": partial(field_value, "setattr"),
}  # fmt: skip
"""Functions that look at no value inside another."""
BUILTINS: Mapping[str, Callable[..., Any]] = {
    **_FLAT, **{known.__name__: known for known in (int, float, str, min, max, sum, abs, sorted, round)},
}  # fmt: skip


def built_in(name: str, arguments: list[Any], keywords: Fields) -> Any:
    """The value of a call of one of BUILTINS; Unknown where it is not worth its time."""
    return BUILTINS[name](*arguments, **keywords) if name in _FLAT or is_small(*arguments) else Unknown(name)


_METHODS: Mapping[type, frozenset[str]] = {
    dict: frozenset({"update", "get", "pop", "setdefault", "items", "keys", "values", "copy"}),
    list: frozenset({"append", "extend"}),
    str: frozenset({"lower", "upper", "strip", "replace", "split", "startswith", "endswith", "join"}),
}


def method_value(owner: Any, name: str, arguments: list[Any], keywords: Fields) -> tuple[bool, Any]:
    """(it is known what it does, the value) of a method of a value."""
    if isinstance(owner, CallRecord) and owner.arguments:
        # a method of what a call returned is about the same thing, such as AutoBridge's provider of a model
        return True, CallRecord(f"{owner.kind}.{name}", [*owner.arguments, *arguments], dict(keywords))
    if name not in _METHODS.get(type(owner), ()):
        return type(owner) in _METHODS, Unknown(name)
    grows = len(owner) * len(str(arguments[-1:])) if name == "replace" else 0
    if name in ("extend", "join") and isinstance(arguments[0], list):
        times = len(arguments[0]) if name == "join" else 1
        grows = len(owner) * times + sum(len(item) if isinstance(item, str) else 1 for item in arguments[0])
    if grows > MAX_CHARACTERS:
        return True, Unknown(name)
    if name == "pop":
        arguments = [*arguments, None][:2]
    if name == "extend" and isinstance(arguments[0], Unknown):
        arguments = [arguments]
    value = getattr(owner, name)(*arguments, **keywords)
    return True, [list(item) if name == "items" else item for item in value] if name in (
        "items",
        "keys",
        "values",
    ) else value
