"""Edits of saved files: every leaf of their JSON changed in the ways in which people change numbers."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

Path = tuple[str | int, ...]


def leaves(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of JSON that holds no other, with the way to it."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, (*path, key))
    else:
        yield path, data


def edits(value: Any) -> tuple[Any, ...]:
    """Other values that somebody may write: another sign, a little more, nothing, text, and far too much."""
    if isinstance(value, bool):
        return (not value, None, "x")
    if isinstance(value, int):
        return (-value or -1, value + 1, None, str(value), 10**30)
    if isinstance(value, float):
        return (-value or -1.0, value * 1.01 or 0.01, None, str(value), 1e300)
    return (1, "x") if value is None else (value + "x", None, 7)


def with_edit(data: Any, path: Path, value: Any) -> Any:
    """A copy of the data with another value at a path."""
    edited = deepcopy(data)
    holder = edited
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return edited
