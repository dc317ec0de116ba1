"""A grammar: a table of the lines that a trainer prints, each row with the words that every such line holds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from planner.observe.record import Record

Take = Callable[[Record, re.Match[str]], None]
_ISO = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_AMERICAN = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")
_FLOAT = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?")
MOST = 2**53
"""More of anything is no count: the first whole number that a float cannot tell from the next."""
_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of line."""

    says: str
    """The line's content in a word or two."""
    needle: str
    """Text that every such line holds, for a search that is cheap."""
    pattern: re.Pattern[str]
    """Searched for in the line, after colours and the launcher's words were taken off."""
    take: Take


@dataclass(frozen=True, slots=True)
class Grammar:
    """The lines of one trainer."""

    name: str
    trainer: str
    rows: tuple[Row, ...]
    rank: int = 0
    """The grammar with the lowest counts if several read equally many steps of a file."""
    finish: Callable[[Record], None] = field(default=lambda record: None)
    """Works out what only the whole file says."""


def row(says: str, needle: str, pattern: str, take: Take) -> Row:
    """A row with its pattern compiled."""
    return Row(says, needle, re.compile(pattern), take)


def number(text: str | None) -> float:
    """The number at the begin of a text, commas of thousands left out; not a number where there is none."""
    match = _FLOAT.match(text.strip().replace(",", "")) if text else None
    return float(match[0]) if match else math.nan


def suffixed(text: str) -> tuple[float, float]:
    """`1.2K` as 1200, and half a unit of its last digit: 50."""
    match = _FLOAT.match(text.strip())
    if match is None:
        return math.nan, math.nan
    size = _SIZES.get(text.strip()[match.end() : match.end() + 1].upper(), 1.0)
    digits = len(match[0].partition(".")[2])
    return float(match[0]) * size, 0.5 * 10.0**-digits * size


def whole(text: str | None) -> int | None:
    """The whole number in a text; None where there is none, or one that no file of a trainer has."""
    value = number(text)
    return int(value) if math.isfinite(value) and value == int(value) and 0 <= value < MOST else None


def moment(text: str) -> float:
    """The first date and time in a text as seconds since 1970, taken as UTC; not a number where there is none."""
    match = _ISO.search(text)
    try:
        if match is not None:
            *parts, fraction = match.groups()
            year, month, day, hour, minute, second = map(int, parts)
            at_s = datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
            return at_s + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)
        match = _AMERICAN.search(text)
        if match is not None:
            month, day, year, hour, minute, second = map(int, match.groups())
            return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        pass
    return math.nan


def fields(text: str, separator: str = "|") -> dict[str, str]:
    """`a: 1 | b: 2` as a mapping; of equal names the first counts."""
    found: dict[str, str] = {}
    for part in text.split(separator):
        name, colon, value = part.rpartition(": ") if ": " in part else part.rpartition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def mark(kind: str) -> Take:
    """A row that only says that something happened between steps."""
    return lambda record, match: record.mark(kind)


def fact(name: str, convert: Callable[[str], str | int | None] = whole) -> Take:
    """A row whose first group is a fact of the job."""

    def take(record: Record, match: re.Match[str]) -> None:
        value = convert(match[1])
        if value:
            record.facts[name] = value

    return take


def text_of(value: str) -> str:
    """A name from a log: printable, and not long."""
    return "".join(letter for letter in value.strip() if letter.isprintable())[:120]
