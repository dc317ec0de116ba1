"""Python that a user gave, as a tree: nothing of it is run."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from planner.errors import SpecError
from planner.specs.reading.limits import EXPRESSION, PYTHON, Limits
from planner.specs.reading.text import printable, refuse_longer

_SIGN = re.compile(r"\w+|[^\w\s]")
_FAILURES = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""Failures of `ast`: a NUL, nesting, an integer of thousands of digits, a key that cannot be hashed."""


def num_signs(text: str) -> int:
    """Words and signs of a text: there are no more nodes in its tree than about twice as many."""
    return sum(1 for _ in _SIGN.finditer(text))


def parse_python(text: str, where: str, hint: str, limits: Limits = PYTHON) -> ast.Module:
    """The tree of a file. Raises SpecError, which names `where`, for anything else and beyond the limits."""

    def refused(problem: str) -> SpecError:
        return SpecError(f"{where}: not Python: {problem}".removeprefix(": "), hint)

    refuse_longer(text, limits.num_bytes, refused)
    if num_signs(text) > limits.num_items:
        raise refused(f"more than {limits.num_items:,} words and signs")
    try:
        tree: ast.Module = _quiet(text, "exec")
        return tree
    except SyntaxError as error:
        raise refused(f"line {error.lineno}: {printable(error.msg)}") from None
    except _FAILURES:
        raise refused("nested too deeply, or with characters that no text has") from None


def parse_expression(text: str, limits: Limits = EXPRESSION) -> ast.expr:
    """The tree of one expression. Raises ValueError for anything else and beyond the limits."""
    if len(text) > limits.num_bytes:
        raise ValueError(f"{len(text):,} characters")
    try:
        tree: ast.expr = _quiet(text.strip(), "eval").body
    except _FAILURES as error:
        raise ValueError(f"no expression: {error}") from None
    return tree


def literal(text: str | ast.expr, limits: Limits = EXPRESSION) -> Any:
    """The value of a literal such as `[1, None]`, as text or as a tree. Raises ValueError for anything else."""
    tree = parse_expression(text, limits) if isinstance(text, str) else text
    try:
        return ast.literal_eval(tree)
    except _FAILURES as error:
        raise ValueError(f"no literal: {error}") from None


def _quiet(text: str, mode: str) -> Any:
    with warnings.catch_warnings():  # of `"\d"` and `1if x`, which are the file's own affair
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)
