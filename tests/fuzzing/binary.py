"""Changes pickles by their opcodes and by the data in them."""

from __future__ import annotations

import copy
import pickle
import pickletools
import random
import struct
from contextlib import suppress
from functools import lru_cache
from typing import Any

from fuzzing.trees import change

_OPCODES = (
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"cposix\nsystem\n", b"R", b"b", b"i__main__\nA\n", b"o", b"\x81",
    b"\x92", b"\x93", b"(", b"0", b"1", b"2", b".", b"a", b"e", b"s", b"u", b"t", b"l", b"d", b"]", b")", b"}", b"N",
    b"\x88", b"\x94", b"r\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\x7f", b"q\x00", b"h\x00", b"h\xff",
    b"p999999999\n", b"g999999999\n", b"\x8b\xff\xff\xff\x7f", b"\x8b\x04\x00\x00\x00abcd", b"\x8a\xff",
    b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f", b"\x96" + b"\xff" * 4 + b"\x00" * 4,
    b"\x95" + b"\xff" * 8, b"\x95\x10\x00\x00\x00\x00\x00\x00\x00", b"\x82\x01", b"\x83\x01\x00",
    b"\x84\x01\x00\x00\x00", b"Pid\n", b"Q", b"\x97", b"\x98", b"\x8f", b"\x90", b"\x91", b"I" + b"9" * 5000 + b"\n",
    b"L" + b"1" * 5000 + b"L\n", b"Fnan\n", b"I01\n", b"S'a'\n", b"V\\ud800\n", b"\x8c\x01\xff", b"\x80\x05",
    b"\x80\xff", b"G" + struct.pack(">d", float("inf")),
)  # fmt: skip
"""Opcodes with arguments that run code, ask for memory, or leave the stack in disorder."""


_NAMES = frozenset(
    ("GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "BUILD", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4",
     "PERSID", "BINPERSID")
)  # fmt: skip


def changed_pickle(data: bytes, chance: random.Random) -> bytes:
    """The pickle with some opcodes changed, or of other data; a file that is none changed as a tree."""
    if chance.random() < 0.6 and (tree := _data(data)) is not None:
        with suppress(pickle.PicklingError, RecursionError, OverflowError):
            return pickle.dumps(change(copy.deepcopy(tree), chance), chance.choice((2, 3, 4, 5)))
    try:
        ends = [spot for _, _, spot in pickletools.genops(data) if spot is not None]
    except Exception:  # no pickle, or one that was changed before
        return data
    parts = [data[a:b] for a, b in zip(ends, [*ends[1:], len(data)], strict=True)]
    for _ in range(chance.choice((1, 2, 3, 8))):
        a, b = chance.randrange(len(parts)), chance.randrange(len(parts))
        match chance.randrange(6):
            case 0:
                parts[a] = b""
            case 1:
                parts[a], parts[b] = parts[b], parts[a]
            case 2:
                parts[a] = parts[b]
            case 3:
                parts[a] = parts[a] * chance.choice((2, 50))
            case _:
                parts[a] += chance.choice(_OPCODES)
    return b"".join(parts)


@lru_cache(64)
def _data(pickled: bytes) -> Any:
    """The plain data of a pickle; None where it names anything that could run, or is broken."""
    with suppress(Exception):
        if not any(op.name in _NAMES for op, _, _ in pickletools.genops(pickled)):
            return pickle.loads(pickled)
    return None
