"""Checks of saved answers: a digest, which is a short hash of each entry, names the one that was edited later.

It tells an edit from an answer. It is no signature: whoever edits a file can also hash it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import Any, Final

from planner.errors import SpecError, printable

KEY: Final = "digest"
"""The key under which a file has its digest."""
_NUM_DIGITS: Final = 12
_FEW: Final = 40
"""A mapping of more fields than that has one hash: a file is for people too."""
_SECONDS: Final = "search.seconds"
"""The one number that differs between two answers to the same question; it is of no answer's worth."""
_POINT_ZERO: Final = re.compile(r"(?<=\d)\.0(?=[],}]|$)")
"""The end of a whole number that one writer of JSON puts and another leaves out."""


def with_digest(data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with the digest of all its entries as the last one."""
    return {**data, KEY: dict(_hashes(data))}


def changed_entry(data: Mapping[str, Any], beside: Collection[str] = ()) -> str | None:
    """The name of the first entry that is not as its digest says; None where all are, `beside` left aside.

    `best.step` is such a name: an entry of the file, or of a mapping in it.
    """
    saved = data[KEY]
    if not isinstance(saved, dict):
        return KEY
    have = dict(_hashes({name: value for name, value in data.items() if name not in (KEY, *beside)}))
    names = (*have, *(name for name in saved if name not in have))
    return next((str(name) for name in names if saved.get(name) != have.get(name)), None)


def as_saved(data: Mapping[str, Any], where: str, hint: str, beside: Collection[str] = ()) -> dict[str, Any]:
    """Data without their digest; SpecError where they are not those that were saved.

    Data without a digest, as versions before 0.2 saved them, are held against what every measurement keeps to.
    """
    try:
        name = changed_entry(data, beside) if KEY in data else None
        problem = _impossible(data) if KEY not in data else None if name is None else said(name)
    except (RecursionError, TypeError, ValueError):  # nested without end, or with keys that JSON has not
        problem = "is no JSON that the planner wrote"
    if problem is not None:
        raise SpecError(f"{where}: {problem}", hint)
    return {key: value for key, value in data.items() if key != KEY}


def numbers(data: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in plain data, with the name of the field that holds it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from numbers(value, str(key))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from numbers(value, name)
    elif isinstance(data, int | float):
        yield name, data


def _impossible(data: Mapping[str, Any]) -> str | None:
    """A number that nobody measures; None without one."""
    for name, value in numbers(data):
        is_amount = name.startswith("num_") or name.endswith("_bytes") or name in ("step_s", "tokens_per_s")
        if not (0 if is_amount else -inf) <= value < inf or value == -inf:
            return f"{printable(name[:60])} is {value:.4g}"
    return None


def said(name: str) -> str:
    """The problem of an entry that is not as it was saved."""
    return f"{printable(name[:100])}: was edited after it was saved"


def _hashes(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A name and a hash of each entry that is held; those of a mapping of fields stand for it."""
    yield from (entry for entry in _all_hashes(data) if entry[0] != _SECONDS)


def _all_hashes(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if isinstance(value, dict) and 0 < len(value) <= _FEW and all(str(field).isidentifier() for field in value):
            yield from ((f"{name}.{field}", _hash(entry)) for field, entry in value.items())
        else:
            yield name, _hash(value)


def _hash(value: Any) -> str:
    """The hash of a value however a JSON writer orders, spaces and writes it: 1.0 and 1 are one number."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(_POINT_ZERO.sub("", text).encode()).hexdigest()[:_NUM_DIGITS]
