"""Megatron-LM's pipeline layout strings, such as `Et*2|(tt|)*3tL`, with every repetition written out."""

from __future__ import annotations

from planner.errors import SpecError
from planner.specs.reading import printable

MAX_SYMBOLS = 1_000_000
"""The longest layout that is written out: a hundred symbols for each of ten thousand layers."""


def expanded(layout: str) -> str:
    """The layout without repetitions: `Et*2|(t|)*2L` is `Ett|t|t|L`. SpecError where it is none, or has no end."""
    out: list[str] = [""]
    position, shown = 0, printable(layout)
    text = layout.replace(" ", "").replace(",", "")
    while position < len(text):
        symbol = text[position]
        position += 1
        if symbol == "(":
            out.append("")
            continue
        if symbol == ")":
            if len(out) < 2:
                raise SpecError(f"layout {shown!r}: ) without (", "balance the parentheses")
            symbol = out.pop()
        if text[position : position + 1] == "*":
            digits = position + 1
            while digits < len(text) and text[digits] in "0123456789":
                digits += 1
            times = text[position + 1 : digits]
            if not times:
                raise SpecError(f"layout {shown!r}: * without a count", "write t*4 or (t|)*14")
            if len(times) > 7 or len(symbol) * int(times) > MAX_SYMBOLS:
                raise SpecError(f"layout {shown!r}: more than {MAX_SYMBOLS:,} symbols", "write t*4 or (t|)*14")
            symbol, position = symbol * int(times), digits
        out[-1] += symbol
        if len(out[-1]) > MAX_SYMBOLS:
            raise SpecError(f"layout {shown!r}: more than {MAX_SYMBOLS:,} symbols", "write t*4 or (t|)*14")
    if len(out) != 1:
        raise SpecError(f"layout {shown!r}: ( without )", "balance the parentheses")
    return out[0]
