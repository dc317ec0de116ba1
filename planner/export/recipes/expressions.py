"""Expressions of Python that is followed and never run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from planner.export.common.config_file import ConfigFile
from planner.export.recipes.values import BINARY, COMPARE, MAX_CHARACTERS, Record, Unknown, is_small, told, truth

MAX_STEPS, MAX_DEPTH, MAX_ITEMS = 200_000, 60, 4_096
MAX_NUMBER, MAX_EXPONENT, MAX_BITS = 10**12, 64, 256
ITEMS_A_STEP = 16
"""Making a list or a text costs a step for so many items or characters: what all steps make is bounded."""


@dataclass(slots=True, eq=False)
class Function:
    node: ast.FunctionDef
    module: Module


@dataclass(slots=True, eq=False)
class Class:
    node: ast.ClassDef
    module: Module


@dataclass(slots=True, eq=False)
class Import:
    """A name that another file defines; the file is read when the name is used."""

    config: ConfigFile
    name: str


@dataclass(slots=True, eq=False)
class Module:
    """A file's names and their values."""

    config: ConfigFile
    names: dict[str, Any] = field(default_factory=dict)


class Scope:
    """The names that an expression sees."""

    def __init__(self, module: Module, names: dict[str, Any], outer: Scope | None = None) -> None:
        self.module, self.names, self.outer = module, names, outer

    def get(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer.get(name)
        return self.module.names.get(name, Unknown(name))


class Expressions:
    """Works out the values of expressions; what names, calls and classes mean is left to whoever follows statements."""

    steps = 0
    depth = 0

    def resolved(self, value: Any) -> Any:
        """A name's value, read from the file that defines it."""
        raise NotImplementedError

    def called(self, node: ast.Call, scope: Scope) -> Any:
        """The value of a call."""
        raise NotImplementedError

    def class_names(self, cls: Class) -> dict[str, Any]:
        """The names that the body of a class defines."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Give a name, a field or an item its value."""
        raise NotImplementedError

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression; Unknown where only a run knows it."""
        self.steps += 1
        if self.steps > MAX_STEPS or self.depth > MAX_DEPTH:
            return Unknown("…")
        self.depth += 1
        try:
            value = self._value(node, scope)
            if isinstance(value, (list, dict, tuple, str)):
                self.steps += len(value) // ITEMS_A_STEP
            is_long = isinstance(value, int) and value.bit_length() > MAX_BITS
            return Unknown(node) if is_long else value
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, AttributeError, MemoryError):
            return Unknown(node)
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.resolved(scope.get(node.id))
            case ast.Lambda():
                return Function(_as_function(node), scope.module)
            case ast.Attribute():
                return self._attribute(self.value(node.value, scope), node)
            case ast.Call():
                return self.called(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return [item for element in node.elts for item in self._items(element, scope)]
            case ast.Dict():
                return self._dict(node, scope)
            case ast.BinOp():
                return self._binary(node, scope)
            case ast.UnaryOp():
                value = self.value(node.operand, scope)
                if isinstance(node.op, ast.Not):
                    known = truth(value)
                    return Unknown(node) if known is None else not known
                return -value if isinstance(node.op, ast.USub) else value
            case ast.BoolOp():
                return self._bool(node, scope)
            case ast.Compare():
                return self._compare(node, scope)
            case ast.IfExp():
                return self.value(node.body if truth(self.value(node.test, scope)) else node.orelse, scope)
            case ast.JoinedStr():
                parts = [
                    self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope)
                    for part in node.values
                ]
                known = all(isinstance(part, (str, int, float)) for part in parts)
                text = "".join(map(str, parts)) if known else ""
                return text if known and len(text) <= MAX_CHARACTERS else Unknown(node)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, scope)
            case ast.Subscript():
                owner, key = self.value(node.value, scope), self.value(node.slice, scope)
                if isinstance(owner, Record):
                    return owner.fields.get(str(key), Unknown(node))
                return owner[key]
        return Unknown(node)

    def _attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, Class):
            inner = self.class_names(owner).get(node.attr)
            return inner if isinstance(inner, Class) else Record(told(node)) if inner is None else inner
        if isinstance(owner, Record):
            if node.attr not in owner.fields and node.attr in owner.defaults:
                return owner.defaults[node.attr]
            if node.attr not in owner.fields:
                # read before it is set: whoever sets a field on it, sets it in the owner
                owner.fields[node.attr] = Record(f"{owner.kind}.{node.attr}")
            return owner.fields[node.attr]
        return Unknown(node)

    def _items(self, element: ast.expr, scope: Scope) -> list[Any]:
        if not isinstance(element, ast.Starred):
            return [self.value(element, scope)]
        items = self.value(element.value, scope)
        return list(items) if isinstance(items, (list, tuple)) else [Unknown(element)]

    def _dict(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if key is None:
                result |= value if isinstance(value, dict) else {}
            elif isinstance(name := self.value(key, scope), (str, int)):
                result[name] = value
        return result

    def _binary(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        is_repeat = isinstance(node.op, ast.Mult) and (isinstance(left, (list, str)) or isinstance(right, (list, str)))
        if is_repeat:
            items, times = (left, right) if isinstance(right, int) else (right, left)
            return items * times if len(items) * times <= MAX_ITEMS else Unknown(node)
        if isinstance(left, (Record, Unknown)) or isinstance(right, (Record, Unknown)):
            return Unknown(node)
        if isinstance(node.op, ast.Pow) and not (abs(left) <= MAX_NUMBER and abs(right) <= MAX_EXPONENT):
            return Unknown(node)
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            return Unknown(node)
        value = BINARY[type(node.op)](left, right)
        is_long = isinstance(value, (str, list)) and len(value) > MAX_CHARACTERS
        return Unknown(node) if is_long else value

    def _bool(self, node: ast.BoolOp, scope: Scope) -> Any:
        value: Any = None
        for item in node.values:
            value = self.value(item, scope)
            known = truth(value)
            if known is (isinstance(node.op, ast.Or)):
                return value
        return value

    def _compare(self, node: ast.Compare, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
        kind = type(node.ops[0])
        if kind in (ast.Is, ast.IsNot, ast.Eq, ast.NotEq) and (left is None or right is None):
            other = right if left is None else left
            if isinstance(other, Unknown) or (isinstance(other, Record) and not other.fields):
                return Unknown(node)
            return (other is None) == (kind in (ast.Is, ast.Eq))
        if isinstance(left, (Record, Unknown)) or isinstance(right, (Record, Unknown)) or len(node.ops) > 1:
            return Unknown(node)
        return COMPARE[kind](left, right) if is_small(left, right) else Unknown(node)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope) -> Any:
        result: list[Any] = []
        return result if self._generated(node, 0, Scope(scope.module, {}, scope), result) else Unknown(node)

    def _generated(self, node: Any, depth: int, scope: Scope, result: list[Any]) -> bool:
        """Add the items of a comprehension from its `depth`-th loop on; False where one is not known."""
        if depth == len(node.generators):
            result.append(self.value(node.elt, scope))
            return len(result) <= MAX_ITEMS
        generator = node.generators[depth]
        items = self.value(generator.iter, scope)
        if not isinstance(items, (list, tuple)):
            return False
        for item in items[:MAX_ITEMS]:
            self.assign(generator.target, item, scope)
            if all(truth(self.value(test, scope)) for test in generator.ifs) and not self._generated(
                node, depth + 1, scope, result
            ):
                return False
        return True


def _as_function(node: ast.Lambda) -> ast.FunctionDef:
    body: list[ast.stmt] = [ast.Return(node.body)]
    return ast.FunctionDef("lambda", node.args, body, [], lineno=node.lineno, col_offset=0)
