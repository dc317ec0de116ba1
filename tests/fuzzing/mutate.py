"""Changes files as users and accidents do: in what the file is made of (`GRAMMARS`), then in its bytes and lines."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuzzing.binary import changed_pickle
from fuzzing.cells import changed_cells, changed_command, changed_lines, changed_words
from fuzzing.source import changed_source
from fuzzing.trees import changed_tree
from fuzzing.values import NUMBERS, WORDS

MAX_BYTES = 2**17
"""Mutants are cut to this length: size is a test of its own."""
GRAMMARS: dict[
    str, Callable[[bytes, random.Random], bytes],
] = {
    "tree": changed_tree, "cells": changed_cells, "words": changed_words, "lines": changed_lines,
    "command": changed_command, "python": changed_source, "pickle": changed_pickle,
}  # fmt: skip
"""Each gives the file with a part of it changed, or the file itself where it is not of its kind."""
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][\w.-]*")


def mutant(seeds: Mapping[str, bytes], grammar: str, chance: random.Random) -> tuple[str, bytes]:
    """One of the seeds by its name, and its content after one to four changes."""
    name, others = chance.choice(list(seeds)), list(seeds.values())
    data = before = seeds[name]
    if grammar == "command":  # its words are all that a shell lets through
        return name, changed_command(data, chance)
    if chance.random() < 0.6:
        data = GRAMMARS[grammar](data, chance)
    for _ in range(chance.choice((0, 0, 1, 2, 3)) or data is before):
        data = chance.choice(_CHANGES)(data, others, chance)
    return name, data[:MAX_BYTES]


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
    word = _found(_WORD, chance.choice(seeds), chance)
    return data if word is None else _replaced(data, _WORD, word[0], chance)


def _replaced(data: bytes, pattern: re.Pattern[bytes], value: bytes, chance: random.Random) -> bytes:
    match = _found(pattern, data, chance)
    return data + value if match is None else data[: match.start()] + value + data[match.end() :]


def _found(pattern: re.Pattern[bytes], data: bytes, chance: random.Random) -> re.Match[bytes] | None:
    """The first match after a random place, or the first of all."""
    return pattern.search(data, _spot(data, chance)) or pattern.search(data)


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
