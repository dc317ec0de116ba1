"""Axes of a sweep as they are typed: `256,512`, `h100,h200`, `256..4096`, `256..4096:512`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from planner.errors import SpecError
from planner.specs.units import is_count

MOST_POINTS = 32
"""The most points of a range that gives no step of its own; a longer one is thinned out, in equal ratios."""
MOST_STEPS = 1024
"""The most points of a range that gives its step."""
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})(?::([0-9]{1,18}))?")


def numbers(option: str, text: str, between: Callable[[int, int], list[int]]) -> list[int]:
    """The numbers of a list of numbers and ranges; `between` gives those of a range without a step."""
    found: dict[int, None] = {}
    for part in text.split(","):
        found |= dict.fromkeys(_numbers_of(option, part.strip(), between))
    if len(found) > MOST_STEPS:
        raise SpecError(f"{option}: {text[:60]!r} are {len(found):,} points", f"at most {MOST_STEPS:,}: a longer step")
    return list(found)


def _numbers_of(option: str, part: str, between: Callable[[int, int], list[int]]) -> list[int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        if not is_count(part) or int(part) < 1:
            raise SpecError(
                f"{option}: {part[:60]!r} is no whole number and no range", f"write {option} 256,512 or 256..4096"
            )
        return [int(part)]
    first, last, step = int(match[1]), int(match[2]), match[3]
    if not 0 < first <= last or (step is not None and int(step) < 1):
        raise SpecError(
            f"{option}: {part[:60]!r} is an empty range", f"write the smaller number first: {option} 256..4096"
        )
    if step is None:
        return between(first, last)
    if (last - first) // int(step) >= MOST_STEPS:
        raise SpecError(f"{option}: {part[:60]!r} has more than {MOST_STEPS:,} points", "a longer step, or a list")
    return list(range(first, last + 1, int(step)))


def by_nodes(node_size: int) -> Callable[[int, int], list[int]]:
    """The whole nodes between two numbers of GPUs, both ends included; a long range is thinned out in equal ratios."""

    def between(first: int, last: int) -> list[int]:
        low, high = -(-first // node_size), last // node_size
        if low > high:
            raise SpecError(
                f"--gpus: {first}..{last} holds no whole node of {node_size} GPUs", "name the numbers instead"
            )
        if high - low < MOST_POINTS:
            return [nodes * node_size for nodes in range(low, high + 1)]
        ratio = (high / low) ** (1 / (MOST_POINTS - 1))
        return [nodes * node_size for nodes in dict.fromkeys(round(low * ratio**i) for i in range(MOST_POINTS))]

    return between


def doubling(first: int, last: int) -> list[int]:
    """The first number and its doubles up to the last one."""
    return list(_doubles(first, last))


def _doubles(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def days(option: str, text: str) -> float:
    """`30d`, `6w`, `12h` as days; a number by itself is days."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw]?)", text.strip().lower())
    if match is None or not float(match[1]) > 0:
        raise SpecError(f"{option}: {text[:60]!r} is no time", f"write {option} 30d, 6w or 12h")
    return float(match[1]) * {"h": 1 / 24, "d": 1.0, "": 1.0, "w": 7.0}[match[2]]
