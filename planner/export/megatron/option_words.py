"""Megatron-LM's options and their values, from the words of a command line."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import overload

from planner.errors import SpecError
from planner.specs.reading.python_text import parse_expression

Options = Mapping[str, list[str]]
"""Option (with its dashes) to the words behind it."""


_TORCHRUN = ("--nproc", "--nnodes", "--node", "--master", "--rdzv", "--num_", "--ntasks")
"""Beginnings of torchrun's options, which it takes with `_` and with `-`."""


def options_of(words: Sequence[str]) -> Options:
    """Options and their values; of equal options the last wins. `--a=b` and torchrun's `--a_b` are read too."""
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            if name.startswith(_TORCHRUN):
                name = name.replace("_", "-")
            options[name] = [value] if equals else []
        elif name:
            options[name].append(word)
    return options


def text(options: Options, name: str, default: str = "") -> str:
    """An option's values as one text; `default` where the option is not given."""
    values = options.get(name)
    return default if values is None else " ".join(values)


def number(options: Options, name: str, default: int | None = None) -> int | None:
    """An option's value as a whole number; `default` where the option is not given.

    Raises SpecError where the value is no number; `1e6` is one.
    """
    values = options.get(name)
    if values is None:
        return default
    try:
        value = float(values[0])
        if value == int(value):
            return int(value)
    except (IndexError, ValueError, OverflowError):
        raise SpecError(
            f"{name}: {' '.join(values)[:60]!r} is no number", "variables of the shell must be set in the script"
        ) from None
    raise SpecError(f"{name}: {values[0][:60]!r} is no whole number", "write a whole number")


def positive(options: Options, name: str) -> int:
    """A number of ranks, layers or sequences, 1 where the option is not given; SpecError where it is below 1."""
    value = number(options, name, 1)
    if value is None or value < 1:
        raise SpecError(f"{name}: {value} is less than 1", "write a number of 1 or more")
    return value


def given(options: Options, name: str, default: int) -> int:
    """The size that an option gives; `default` where the option is not given."""
    return size(options, name) if name in options else default


def size(options: Options, name: str) -> int:
    """The size that an option gives; SpecError where it gives none."""
    values = options.get(name, [])
    try:
        return int(values[0])
    except IndexError:
        raise SpecError(f"{name}: is missing, or its variable is not set in the script", f"add {name} N") from None
    except ValueError:
        raise SpecError(f"{name}: {values[0][:60]!r} is no whole number", "write a number") from None


@overload
def decimal(options: Options, name: str, default: float) -> float: ...
@overload
def decimal(options: Options, name: str, default: None = None) -> float | None: ...
def decimal(options: Options, name: str, default: float | None = None) -> float | None:
    """The number that an option gives; `default` where the option is not given. SpecError where it is no number."""
    if name not in options:
        return default
    values = options[name]
    try:
        number = float(values[0])
    except (IndexError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"{name}: {' '.join(values)[:60]!r} is no number", "write a number")
    return number


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
