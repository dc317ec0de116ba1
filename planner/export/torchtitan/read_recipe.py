"""The settings in a torchtitan recipe: a Python file that is read and never run."""

from __future__ import annotations

import ast
import re
from typing import Any

from planner.errors import SpecError

Settings = dict[str, Any]
"""`section.name` to value."""
BY_NAME = "activation_checkpoint.by_name"
"""A setting of our own: the recipe's policy recomputes only the layers that it names."""
_SECTIONS = {
    "ParallelismConfig": "parallelism",
    "TrainingConfig": "training",
    "CompileConfig": "compile",
    "parallelism.update": "parallelism",
    "training.update": "training",
}
"""Calls whose keywords are settings."""
_POLICIES = {"None": "none", "FullAC": "full", "PlannedAC": "full"}
"""Mode of each class of activation checkpointing; PlannedAC is the one that an exported recipe defines."""
_MAX_SHOWN_CHARACTERS = 80


class _UnreadableError(Exception):
    """An expression has no value unless it is run."""


def read_recipe(text: str) -> tuple[Settings, dict[str, str]]:
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
    settings: Settings = {}
    unreadable: dict[str, str] = {}
    for node in ast.walk(tree):
        for name, expression in _settings(node):
            try:
                settings[name] = _value(expression, names)
            except _UnreadableError:
                unreadable[name] = ast.unparse(expression)[:_MAX_SHOWN_CHARACTERS]
        settings |= _model(node)
    return settings, unreadable


def _settings(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Names and expressions of the settings that a node makes."""
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


def _model(node: ast.AST) -> Settings:
    """Settings of model, flavor and activation checkpointing that a node makes."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("model_registry") and node.args:
        flavor = node.args[0]
        return {"model.flavor": flavor.value} if isinstance(flavor, ast.Constant) else {}
    if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
        return {"model.name": (node.module or "").rpartition("torchtitan.models.")[2].split(".")[0]}
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("activation_checkpoint"):
        policy = ast.unparse(node.value).partition(".")[0]
        return {"activation_checkpoint.mode": _POLICIES.get(policy, "selective"), BY_NAME: policy == "PlannedAC"}
    return {}


def _value(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """The value of a literal, a product, a list of module names, or a name that is assigned one of these.

    Raises _UnreadableError for any other expression.
    """
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
