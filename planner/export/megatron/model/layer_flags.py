"""Patterns of layers as Megatron-LM takes them: a number n, or a Python expression such as `([0]*3+[1]*58)`."""

from __future__ import annotations

import ast

from planner.errors import SpecError
from planner.specs.reading.python_text import parse_expression

_MAX_LAYERS = 10_000


def layer_flags(option: str, pattern: str, num_layers: int) -> list[bool]:
    """A flag for each layer from a list expression. Raises SpecError for anything else, and for another length."""
    try:
        flags = _list(parse_expression(pattern))
    except (ValueError, RecursionError):
        raise SpecError(f"{option}: {pattern[:60]!r} is no list of layers", "write it as ([0]*3+[1]*58)") from None
    if len(flags) != num_layers:
        raise SpecError(f"{option}: {len(flags)} entries for {num_layers} layers", "write one entry for each layer")
    return flags


def _list(node: ast.expr) -> list[bool]:
    """The value of a sum or multiple of lists; ValueError for what is neither, or too long."""
    if isinstance(node, ast.List):
        return [bool(_whole(item)) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _short(_list(node.left), _list(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times, items = (node.left, node.right) if isinstance(node.left, ast.Constant) else (node.right, node.left)
        count, flags = _whole(times), _list(items)
        if count * len(flags) > _MAX_LAYERS:
            raise ValueError
        return flags * count
    raise ValueError


def _short(left: list[bool], right: list[bool]) -> list[bool]:
    if len(left) + len(right) > _MAX_LAYERS:
        raise ValueError
    return left + right


def _whole(node: ast.expr) -> int:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        raise ValueError
    return node.value
