"""TOML that a user gave."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from planner.errors import SpecError
from planner.specs.reading.limits import TOML, Limits
from planner.specs.reading.text import printable, refuse_depth, refuse_longer, refuse_signs

_MAX_DOTS = 50
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{_MAX_DOTS}}}")
"""A key of so many parts: tomllib keeps every beginning of it, and thousands of parts fill gigabytes."""


def parse_toml(text: str, where: str, hint: str, limits: Limits = TOML) -> dict[str, Any]:
    """The tables of a text. Raises SpecError, which names `where`, for anything else and beyond the limits."""

    def refused(problem: str) -> SpecError:
        return SpecError(f"{where}: not TOML: {problem}".removeprefix(": "), hint)

    refuse_longer(text, limits.num_bytes, refused)
    refuse_signs(text, ",=[{.", limits.num_items, refused)
    if _DOTTED.search(text):
        raise refused(f"a key of more than {_MAX_DOTS} parts")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise refused(f"nested more than {limits.depth:,} deep") from None
    except ValueError as error:  # a TOMLDecodeError is one, and an integer of thousands of digits is another
        raise refused(printable(str(error))) from None
    refuse_depth(data, limits.depth, refused)
    return data
