"""The settings in a torchtitan recipe: a Python file that is read and never run."""

from __future__ import annotations

import ast
import re
from typing import Any

from planner.errors import SpecError

Fields = dict[str, Any]
_SECTIONS = {
    "ParallelismConfig": "parallelism",
    "TrainingConfig": "training",
    "CompileConfig": "compile",
    "parallelism.update": "parallelism",
    "training.update": "training",
}
"""Calls whose keywords are settings."""
_MAX_SHOWN = 80


class _UnreadableError(Exception):
    """An expression that says nothing without being run."""


def read_recipe(text: str) -> tuple[Fields, dict[str, str]]:
    """Settings by `section.name`, and those whose values cannot be read.

    Literals, products of numbers and lists of module names count; of two values of a setting the later one.
    Raises SpecError for what is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SpecError(f"not Python: line {error.lineno}: {error.msg}", "give the recipe's file") from None
    names = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    fields: Fields = {}
    opaque: dict[str, str] = {}
    for node in ast.walk(tree):
        for key, expression in _settings(node):
            try:
                fields[key] = _value(expression, names)
            except _UnreadableError:
                opaque[key] = ast.unparse(expression)[:_MAX_SHOWN]
        fields |= _model(node)
    return fields, opaque


def _settings(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Settings that a node makes, by name."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        section = _SECTIONS.get(name) or _SECTIONS.get(name.rpartition(".")[2])
        return [(f"{section}.{k.arg}", k.value) for k in node.keywords if k.arg] if section else []
    if not isinstance(node, ast.Assign):
        return []
    target = ast.unparse(node.targets[0])
    if target in ("parallelism", "training") and isinstance(node.value, ast.Call):
        return [(f"{target}.{k.arg}", k.value) for k in node.value.keywords if k.arg]
    match = re.search(r"\.(parallelism|training|compile)\.(\w+)$", target)
    return [(f"{match[1]}.{match[2]}", node.value)] if match else []


def _model(node: ast.AST) -> Fields:
    """Model, flavor and activation checkpointing."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("model_registry") and node.args:
        flavor = node.args[0]
        return {"model.flavor": flavor.value} if isinstance(flavor, ast.Constant) else {}
    if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
        return {"model.name": (node.module or "").rpartition("torchtitan.models.")[2].split(".")[0]}
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("activation_checkpoint"):
        policy = ast.unparse(node.value)
        known = {"None": "none", "FullAC": "full", "PlannedAC": "full"}
        return {"activation_checkpoint.mode": known.get(policy.partition(".")[0], "selective")}
    return {}


def _value(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """What an expression is worth: a literal, a product, a named one of these, or a list of module names."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        pass
    if isinstance(node, ast.Name) and node.id in names and depth < 10:
        return _value(names[node.id], names, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = (_value(side, names, depth + 1) for side in (node.left, node.right))
        if isinstance(left, int) and isinstance(right, int):
            return left * right
    if isinstance(node, ast.List):
        return [item for element in node.elts for item in _items(element, names, depth)]
    raise _UnreadableError


def _items(element: ast.expr, names: dict[str, ast.expr], depth: int) -> list[Any]:
    """One item, or those of `*(f"layers.{i}" for i in range(a, b))`."""
    if not isinstance(element, ast.Starred):
        return [_value(element, names, depth + 1)]
    generator = element.value
    if isinstance(generator, ast.GeneratorExp) and isinstance(generator.elt, ast.JoinedStr):
        head, source = generator.elt.values[0], generator.generators[0].iter
        prefix = head.value if isinstance(head, ast.Constant) else None
        if isinstance(prefix, str) and isinstance(source, ast.Call) and ast.unparse(source.func) == "range":
            bounds = [_value(bound, names, depth + 1) for bound in source.args]
            if all(isinstance(bound, int) and abs(bound) <= 100_000 for bound in bounds):
                return [f"{prefix}{index}" for index in range(*bounds)]
    raise _UnreadableError
