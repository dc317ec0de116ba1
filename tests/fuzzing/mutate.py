"""Changes files as users and accidents do: bytes, lines, numbers, and the tree of a JSON, YAML or TOML file."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

MAX_BYTES = 2**17
"""Mutants are cut to this length: size is a test of its own."""

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 1e-300, 0.5, 1e9, 1e308, 2**31, 2**63, 10**30, float("inf"), float("nan"), "1" * 400, "0x10",
    "1e5",
    "٣", "1_000", "08", True, None, "", "none", "null", "auto", "8,8", "8x", "-", "~",
)  # fmt: skip
"""Values that stand in for a number, or for anything."""
WORDS = (
    "", " ", "\x1b[31mred\x1b[0m", "[bold]x[/bold]", "[/]", "a" * 5000, "\u202eabc", "ü", "𝟙", "../../etc/passwd",
    "%s%n",
    "{0}",
    "$A$A", "$(id)", "`id`", "*", "t*9999999999", "([0]*9999999999+[1])", "E((((t|)*999)*999)*999)*999L",
    "!!python/object:x",
    "&a [*a]", "<<", "[" * 300, "{" * 300, "(" * 300, "0F0", "999999999999F0", "\\", "'", '"', "#", "\t", "\r",
    "2024-13-45",
)  # fmt: skip
"""Texts that have broken readers."""
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][\w.-]*")


def mutant(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the seeds after one to four changes."""
    data = chance.choice(seeds)
    if chance.random() < 0.4:
        data = _changed_tree(data, chance)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        data = chance.choice(_CHANGES)(data, seeds, chance)
    return data[:MAX_BYTES]


def _text(value: Any) -> bytes:
    return str(value).encode()


def _spot(data: bytes, chance: random.Random) -> int:
    return chance.randrange(len(data) + 1)


def _byte(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at = _spot(data, chance)
    return data[:at] + bytes([chance.choice((0, 9, 10, 13, 27, 34, 39, 255, chance.randrange(256)))]) + data[at + 1 :]


def _cut(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at = _spot(data, chance)
    return data[:at] if chance.random() < 0.3 else data[:at] + data[at + chance.randrange(1, 40) :]


def _repeated(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at, length = _spot(data, chance), chance.choice((1, 4, 30, 200))
    return data[:at] + data[at : at + length] * chance.choice((2, 3, 50)) + data[at + length :]


def _spliced(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(seeds)
    return data[: _spot(data, chance)] + other[_spot(other, chance) :]


def _number(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    return _replaced(data, _NUMBER, _text(chance.choice(NUMBERS)), chance)


def _word(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    return _replaced(data, _WORD, _text(chance.choice((*WORDS, *NUMBERS))), chance)


def _swapped(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """A word where another word of any seed stood: known names in places where nobody expects them."""
    words = _WORD.findall(chance.choice(seeds))
    return _replaced(data, _WORD, chance.choice(words), chance) if words else data


def _replaced(data: bytes, pattern: re.Pattern[bytes], value: bytes, chance: random.Random) -> bytes:
    spots = list(pattern.finditer(data))
    if not spots:
        return data + value
    match = chance.choice(spots)
    return data[: match.start()] + value + data[match.end() :]


def _lines(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    lines = data.split(b"\n")
    a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(4):
        case 0:
            lines[a], lines[b] = lines[b], lines[a]
        case 1:
            del lines[a]
        case 2:
            lines.insert(b, lines[a])
        case _:
            lines[a] = b"    " + lines[a]
    return b"\n".join(lines)


_CHANGES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    _byte, _cut, _repeated, _spliced, _number, _number, _word, _word, _swapped, _lines,
)  # fmt: skip


def _changed_tree(data: bytes, chance: random.Random) -> bytes:
    """The file with some values, keys or branches changed, written as it was; the file itself where it is no tree."""
    try:
        text = data.decode()
        is_json = text.lstrip().startswith("{")
        tree = json.loads(text) if is_json else yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (ValueError, yaml.YAMLError, RecursionError):
        return data
    if not isinstance(tree, dict | list):
        return data
    for _ in range(chance.choice((1, 1, 2, 5))):
        _change_branch(tree, chance)
    try:
        return (json.dumps(tree) if is_json else yaml.safe_dump(tree, sort_keys=False)).encode()
    except (ValueError, yaml.YAMLError, RecursionError, UnicodeEncodeError):
        return data


def _change_branch(tree: Any, chance: random.Random) -> None:
    """Walk down to some branch and change what hangs there."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = chance.choice(keys)
        child = tree[key]
        if isinstance(child, dict | list) and child and chance.random() < 0.7:
            tree = child
            continue
        match chance.randrange(6):
            case 0 | 1 | 2:
                tree[key] = chance.choice((*NUMBERS, *WORDS, [], {}, [child], {"a": child}))
            case 3:
                del tree[key]
            case 4 if isinstance(tree, dict):
                tree[chance.choice((str(key) + "x", "", "a" * 300, *map(str, keys)))] = child
            case _ if isinstance(tree, list):
                tree.extend([child] * chance.choice((1, 100)))
        return
