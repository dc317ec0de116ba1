"""Conditions of bash scripts: whether `[ … ]`, `[[ … ]]` and `(( … ))` hold, as far as variables say."""

from __future__ import annotations

import fnmatch
import re

from planner.export.scripts.words import Words

_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_REPEATS, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")
_MOST_WORDS = 200
_UNKNOWN = ("-f", "-d", "-e", "-x", "-r", "-w", "-s", "-L", "-t", "-nt", "-ot")
"""Tests of files and terminals."""


def holds(raw: list[str], words: Words) -> bool | None:
    """True or false as the test holds; None where only a machine knows."""
    if raw[0] == "((":
        value = words.arithmetic(" ".join(raw[1:]))
        return None if value is None else bool(value)
    inner = [word for word in raw[1:] if word not in ("]", "]]")]
    if len(inner) > _MOST_WORDS:
        return None
    for mark, combine in ((("||", "-o"), _either), (("&&", "-a"), _both)):
        places = [index for index, word in enumerate(inner) if word in mark]
        if places:
            head, tail = inner[: places[0]], inner[places[0] + 1 :]
            return combine(holds(["[[", *head], words), holds(["[[", *tail], words))
    inner = [word for word in inner if word not in ("(", ")")]
    if inner[:1] == ["!"]:
        status = holds(["[[", *inner[1:]], words)
        return None if status is None else not status
    if inner[:1] and inner[0] in _UNKNOWN:
        return None
    if len(inner) == 2 and inner[0] in ("-z", "-n", "-v"):
        text = words.text(f"${{{inner[1]}}}" if inner[0] == "-v" else inner[1])
        return bool(text) != (inner[0] == "-z")
    if len(inner) == 1:
        return bool(words.text(inner[0]))
    if len(inner) < 3:
        return None if inner else False
    return _compared(words.text(inner[0]), inner[1], words.text(" ".join(inner[2:])), words)


def _compared(left: str, comparison: str, right: str, words: Words) -> bool | None:
    if comparison in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if comparison == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if comparison in _COMPARISONS:
        value = words.arithmetic(f"({left or 0}) {_COMPARISONS[comparison]} ({right or 0})")
        return None if value is None else bool(value)
    if comparison == "=~":
        return _matches(right, left, words)
    return None


def _matches(pattern: str, text: str, words: Words) -> bool | None:
    """True or false as a regular expression is found; None for one that may take long, such as `(a+)+$`."""
    repeats = len(_REPEATS.findall(pattern))
    if len(pattern) > 200 or len(text) > 100 or repeats > 3 or _REPEATED_GROUP.search(pattern):
        return None
    words.spend((1 + len(text)) ** repeats // 8)
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return True if left and right else None


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return False if left is False and right is False else None
