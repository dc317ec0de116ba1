"""Units: human sizes become bytes, seconds and FLOPs here, at the spec boundary, and nowhere else.

One grammar of numbers holds for the command line, for the fields of a user's YAML and for the page: a number, a suffix
(`8k`, `16M`, `15T`), and where the quantity has a unit, another unit of its kind (`400Gb/s` for 50 GB/s).
"""

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

COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
"""Suffixes of tokens, examples and dollars."""
SIZE = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30}
"""Suffixes of sizes, which are powers of two in this field: a sequence of 8k has 8,192 tokens, 2k GPUs are 2,048."""
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_MEMORY = {f"{letter}b": 1000.0**power / GIB for power, letter in enumerate("kmgt", start=1)}
_MEMORY |= {f"{letter}ib": 1024.0**power / GIB for power, letter in enumerate("kmgt", start=1)}
_RATES = {
    f"{letter}{unit}{per}": 1000.0**power / (GB if unit == "B" else 8 * GB)
    for power, letter in enumerate("KMGT", start=1) for unit in "Bb" for per in ("/s", "ps")
}  # fmt: skip

UNITS: dict[str, tuple[dict[str, float], str]] = {
    "size": (SIZE, "8192 or 8k"),
    "count": (COUNT, "1048576, 16M or 15T"),
    "usd": (COUNT, "5M"),
    "fraction": ({"": 1.0, "%": 0.01}, "0.1 or 10%"),
    "gb_per_s": ({"": 1.0, **_RATES}, "50, 50GB/s or 400Gb/s"),
    "gib": ({"": 1.0, **_MEMORY}, "80 or 80GiB"),
    "tflops": ({"": 1.0, "t": 1.0, "p": 1e3, "tflops": 1.0, "pflops": 1e3}, "989 or 989T"),
    "s": (SECONDS, "30 or 5min"),
    "us": ({suffix: times / MICRO if suffix else 1.0 for suffix, times in SECONDS.items()}, "5 or 5us"),
    "days": ({suffix: SECONDS[suffix or "d"] / SECONDS["d"] for suffix in ("", "h", "d", "w")}, "30d, 6w or 12h"),
}
"""Suffixes of a quantity by the unit that ends its name, as factors to that unit; and examples."""
_NUMBER = re.compile(
    r"\s*(-?(?:[0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?)(e[+-]?[0-9]+)?\s*([^\d\s.]*)\s*", re.IGNORECASE
)
MOST_DIGITS = 24
"""Digits of the largest number that is read."""
_COUNTED = re.compile(r"(?:^|_)(?:tokens|tokens_per_step|samples|examples|num_parameters)$")


def unit_of(name: str) -> str:
    """The unit that a field's or an option's name ends in; counts are of tokens and examples, or else sizes."""
    own = next((unit for unit in UNITS if name == unit or name.endswith(f"_{unit}")), "size")
    return "count" if _COUNTED.search(name) else own


def parse_number(text: str, unit: str) -> float:
    """A number with what `UNITS` lets follow it, in that unit. Raises ValueError for anything else."""
    factors, examples = UNITS[unit]
    match = _NUMBER.fullmatch(text.replace("$", "") if unit == "usd" else text)
    suffix = "" if match is None else match[3]
    # a b of a rate is a bit, a B a byte; nothing else has a case
    factor = factors.get(suffix[:1].upper() + suffix[1:] if unit == "gb_per_s" else suffix.lower())
    if match is None or factor is None or not any(map(str.isdigit, match[1])):
        raise ValueError(f"{text!r} is not a number such as {examples}")
    digits = re.sub("[,_]", "", match[1])
    is_whole = "." not in digits and not match[2] and factor == int(factor) and len(digits) <= MOST_DIGITS
    number = int(digits) * int(factor) if is_whole else float(digits[: 2 * MOST_DIGITS] + (match[2] or "")) * factor
    if len(digits) > 2 * MOST_DIGITS or not abs(number) < 10.0**MOST_DIGITS:
        raise ValueError(f"{text[:60]!r} is larger than anything that is counted here")
    return number


def parse_whole(text: str, unit: str) -> int:
    """A whole number with a suffix. Raises ValueError for anything else, OverflowError for an infinite one."""
    number = parse_number(text, unit)
    if number != round(number):
        raise ValueError(f"{text!r} is not a whole number such as {UNITS[unit][1]}")
    return round(number)


def parse_count(text: str) -> int:
    """Read a count of tokens such as `15T`, `16M`, `2.5e12` or `1048576` (decimal suffixes).

    Raises ValueError when the text is not such a count.
    """
    return round(parse_number(text, "count"))


def is_count(text: str) -> bool:
    """True for a whole number that `int` takes at once: of 1 to 18 digits, which ² and ٣ are not."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def gib(num_bytes: float) -> float:
    """Bytes to GiB."""
    return num_bytes / GIB


EXAMPLE = "pod:3072:50,spine:*:50:7x"
"""A network as the command line writes it: from the inside to the outside, `*` for all GPUs, `7x` oversubscribed."""
