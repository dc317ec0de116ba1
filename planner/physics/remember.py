"""A memory of seconds that depend on a few numbers: what a switch does not change is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

MOST_BYTES = 8 << 20
"""Bytes of the keys of one owner, of which values take about as many, after which its memory begins anew."""
MOST_OWNERS = 8
"""Owners after which the memory begins anew."""
MOST_ELEMENTS = 2048
"""Elements of an array beyond which nothing is remembered."""
NUMBER_BYTES = 512
"""Bytes that an entry of numbers alone takes, about."""


@dataclass(slots=True)
class _Memory:
    """Values known of an owner, which lives as long, so that its identity is not another's."""

    owner: object
    values: dict[Hashable, Any] = field(default_factory=dict)
    num_bytes: int = 0


_known: dict[int, _Memory] = {}
"""The memory of each owner, by its identity."""


def content(value: Any) -> Hashable:
    """A key that is equal for equal numbers, and for arrays of equal numbers and shape; None for a large array."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.char, value.tobytes()) if value.size <= MOST_ELEMENTS else None
    return value  # type: ignore[no-any-return]


def remembered(owner: object, key: tuple[Hashable, ...], work_out: Callable[[], T]) -> T:
    """The value that was worked out for this very owner under an equal key, or what is worked out now.

    A key with None in it is of something too large to be remembered.
    """
    if None in key:
        return work_out()
    memory = _known.get(id(owner))
    if memory is None:
        if len(_known) >= MOST_OWNERS:
            _known.clear()
        memory = _known[id(owner)] = _Memory(owner)
    if key not in memory.values:
        if memory.num_bytes > MOST_BYTES:
            memory.values.clear()
            memory.num_bytes = 0
        memory.values[key] = work_out()
        memory.num_bytes += NUMBER_BYTES + sum(
            len(part[2]) for part in key if isinstance(part, tuple) and len(part) == 3
        )
    return memory.values[key]  # type: ignore[no-any-return]
