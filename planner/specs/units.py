"""Units: human sizes become bytes, seconds and FLOPs here, at the spec boundary, and nowhere else."""

from __future__ import annotations

import re

KIB = 2**10
MIB = 2**20
GIB = 2**30
"""Memory capacities are binary: 1 GiB = 2**30 bytes."""

GB = 10**9
"""Rates are decimal: 1 GB/s = 10**9 bytes per second."""

TERA = 10**12
MICRO = 1e-6

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbgt]?)\s*$", re.IGNORECASE)


def parse_count(text: str) -> int:
    """Read a count of tokens such as `15T`, `16M`, `2.5e12` or `1048576` (decimal suffixes).

    Raises ValueError when the text is not such a count.
    """
    match = _COUNT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a count such as 1048576, 16M or 15T")
    return round(float(match[1]) * _SUFFIX[match[2].lower()])


def is_count(text: str) -> bool:
    """True for a whole number that `int` takes at once: of 1 to 18 digits, which ² and ٣ are not."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def gib(num_bytes: float) -> float:
    """Bytes to GiB."""
    return num_bytes / GIB
