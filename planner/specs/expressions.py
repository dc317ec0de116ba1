"""Expressions in the planner's own tables: Python's, over names that a caller gives, and texts with such in braces.

They stand in files that ship with the planner; nothing that a user gives is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from operator import and_, or_
from types import CodeType
from typing import Any

import numpy as np


class _Elementwise(ast.NodeTransformer):
    """`and`, `or` and `not` as calls, which know arrays; what decides alone leaves the rest unread."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        name = "_all" if isinstance(node.op, ast.And) else "_any"
        nothing = ast.arguments([], [], None, [], [], None, [])
        return _call(name, [ast.Lambda(nothing, self.visit(value)) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("_not", [node.operand]) if isinstance(node.op, ast.Not) else node


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])


def _joined(join: Callable[[Any, Any], Any], *values: Callable[[], Any]) -> Any:
    """Values joined by `and` or `or`: the first that decides alone, else the last, or the truths of all arrays."""
    found, value = None, None
    for read in values:
        value = read()
        if isinstance(value, np.ndarray):
            found = truth(value) if found is None else join(found, truth(value))
        elif bool(value) is (join is or_):
            return value
    return value if found is None else found


def truth(value: Any) -> Any:
    """A value as true or false, or an array of truths."""
    return value.astype(bool) if isinstance(value, np.ndarray) else bool(value)


_ALWAYS = {
    "_all": partial(_joined, and_),
    "_any": partial(_joined, or_),
    "_not": lambda value: np.logical_not(truth(value)),
    "__builtins__": {
        known.__name__: known
        for known in (all, any, bool, dict, float, format, int, len, list, max, min, range, round, set, str, sum, tuple)
    },
}


@lru_cache(maxsize=4096)
def names_in(text: str) -> frozenset[str]:
    """The names that an expression reads."""
    return frozenset(node.id for node in ast.walk(_tree(text)) if isinstance(node, ast.Name))


@lru_cache(maxsize=4096)
def _tree(text: str) -> ast.Expression:
    return ast.parse(text, mode="eval")


@lru_cache(maxsize=4096)
def _compiled(text: str, of_arrays: bool) -> CodeType:
    if not of_arrays:
        return compile(_tree(text), text, "eval")
    tree = _Elementwise().visit(ast.parse(text, mode="eval"))
    return compile(ast.fix_missing_locations(tree), text, "eval")


def value_of(text: str, names: Mapping[str, Any], of_arrays: bool = False) -> Any:
    """The value of an expression; where names are arrays, `and`, `or` and `not` are of each element."""
    return eval(_compiled(text, of_arrays), {**_ALWAYS, **names})


def as_expression(template: str) -> str:
    """The expression of a text with expressions in braces."""
    return f'f"""{template}"""'


def text_of(template: str, names: Mapping[str, Any]) -> str:
    """A text with the values of the expressions that stand in braces in it."""
    return str(value_of(as_expression(template), names))


def standing(rows: Iterable[Any], names: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of which what stands under `if` holds; one without always does."""
    return (row for row in rows if not isinstance(row, dict) or value_of(row.get("if", "True"), names))


def told(rows: Iterable[Any], names: Mapping[str, Any]) -> Iterator[list[str]]:
    """The texts of each row that stands; a row is a text or several, or has them under `says`."""
    for row in standing(rows, names):
        says = row["says"] if isinstance(row, dict) else row
        yield [text_of(text, names) for text in ([says] if isinstance(says, str) else says)]


def texts_of(rows: Iterable[Any], names: Mapping[str, Any]) -> list[str]:
    """The texts of rows that have one each."""
    return [says for (says,) in told(rows, names)]
