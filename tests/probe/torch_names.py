"""The names below torch that our modules take, read from their source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOTS = {
    "torch": "torch", "dist": "torch.distributed", "nn": "torch.nn", "functional": "torch.nn.functional",
    "SDPBackend": "torch.nn.attention.SDPBackend",
}  # fmt: skip
"""Names under which our modules know parts of torch."""
PACKAGE = Path(__file__).parents[2] / "planner"
FILES = sorted([*(PACKAGE / "probe").rglob("*.py"), *(PACKAGE / "profile").rglob("*.py")])


def torch_names(path: Path) -> set[str]:
    """Dotted names below torch that a file takes, whether imported or reached through its modules."""
    names = set[str]()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(_dotted(node))
    return {name.removeprefix("torch.") for name in names if name}


def torch_modules(path: Path) -> set[str]:
    """Modules of torch from which a file imports names."""
    imports = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom))
    return {node.module for node in imports if (node.module or "").split(".")[0] == "torch" if node.module}


def keywords(path: Path) -> Iterator[tuple[str, str]]:
    """Each dotted name below torch that a file calls, with each keyword that it passes."""
    tree = _tree(path)
    imported = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = _uncast(node.func)
            name = imported.get(called.id, "") if isinstance(called, ast.Name) else _dotted(called)
            yield from ((name.removeprefix("torch."), word.arg) for word in node.keywords if name and word.arg)


def _uncast(node: ast.expr) -> ast.expr:
    """f of cast(Any, f)."""
    is_cast = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"
    return node.args[1] if is_cast and isinstance(node, ast.Call) else node


def attributes(path: Path) -> set[str]:
    """All attributes that a file reads of anything, or asks for by name."""
    tree = _tree(path)
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return read | {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _dotted(node: ast.expr) -> str:
    """torch.cuda.Event of such an expression; empty where it does not begin with a part of torch."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    if not isinstance(node, ast.Name) or node.id not in ROOTS:
        return ""
    return ".".join([ROOTS[node.id], *parts])
