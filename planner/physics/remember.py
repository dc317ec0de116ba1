"""A memory of seconds that depend on a few numbers: what a switch does not change is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

MOST_ENTRIES = 4096
"""Entries of one owner after which its memory begins anew."""
MOST_OWNERS = 8
"""Owners after which the memory begins anew."""
MOST_ELEMENTS = 2048
"""Elements of an array beyond which nothing is remembered."""

_known: dict[int, tuple[object, dict[Hashable, Any]]] = {}
"""Seconds known of each owner, by its identity, beside the owner, which must live as long."""


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
    _, known = _known.get(id(owner), (owner, {}))
    if not known:
        if len(_known) >= MOST_OWNERS:
            _known.clear()
        _known[id(owner)] = owner, known
    if key not in known:
        if len(known) >= MOST_ENTRIES:
            known.clear()
        known[key] = work_out()
    return known[key]  # type: ignore[no-any-return]
