"""How large and how deep a file may be before it is refused.

Every parse ends because what it is given ends: no clock and no signal is needed. The limits are such that the worst
file that we know within them takes less than two seconds and 300 MB on one core, those that the planner wrote itself
less than five and 500 MB (`tools/worst_files`, docs/reliability.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that is read of one text."""

    num_bytes: int
    """Bytes of a file, characters of a text that was read before."""
    num_items: int
    """Keys and values, those that an alias repeats counted each time; of Python: words and signs."""
    depth: int
    """Mappings and lists inside each other."""


MAX_DIGITS = 308
"""Digits of a whole number: one of more digits is no float either."""

YAML = Limits(2**20, 50_000, 100)
"""A spec is a page of text; the longest that ships has 6 kB and 250 values."""
JSON = Limits(2**20, 2**20, 100)
SAVED = Limits(2**28, 2**23, 100)
"""JSON that the planner wrote itself: probes and observations, with a number for each of a million steps."""
DUMP = Limits(300 * 10**6, 2**24, 100)
"""A flight recorder's dump as JSON; torch's pickles of it have the limits of `planner/observe/traces/source.py`."""
TOML = Limits(2**20, 20_000, 100)
PYTHON = Limits(2**20, 100_000, 100)
"""A recipe and the files that it imports, all together."""
SHELL = Limits(2**18, 4_000_000, 40)
"""A launch script; its values are the characters that its words and variables make, its depth that of blocks."""
EXPRESSION = Limits(40_000, 40_000, 100)
"""One expression in Python's spelling: a list of layers, a value of an option."""
CSV = Limits(2**24, 2**20, 1)
CONFIGURATION = Limits(2**20, 100_000, 100)
"""A file of any language that is imported; that of its language holds too."""
