"""Texts of files that the user names, and how messages show what they hold."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from planner.errors import SpecError, shortened
from planner.specs.reading.limits import CONFIGURATION, MAX_DIGITS, YAML

STDIN = "-"
MAX_BYTES = YAML.num_bytes


def label(path: str | Path) -> str:
    """A file as messages name it."""
    return "stdin" if str(path) == STDIN else printable(str(path))


def printable(text: str, limit: int = 200) -> str:
    """`text` as it is where it is short and of printable characters, else shortened or escaped."""
    short = shortened(text, limit)
    return short if short.isprintable() else repr(short)


def kind_of(value: object) -> str:
    """The type of `value` in a user's words."""
    names = {type(None): "nothing", bool: "true or false", int: "an integer", float: "a number", str: "text",
             list: "a list", tuple: "a list", dict: "a mapping"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def whole_number(digits: str) -> int | float:
    """The number that JSON writes so; one of more digits than any count has is a float, on which no sum breaks.

    Raises ValueError for one that no float has.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits) if len(digits) < 20 else float(digits)


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a small file; SpecError when it is missing, a directory, locked, huge or binary."""
    where, data = label(path), _read(path, max_bytes)
    if len(data) > max_bytes:
        raise SpecError(
            f"{where}: is larger than {max_bytes:,} bytes, too large for a spec", "name a YAML or JSON file"
        )
    if b"\0" in data:
        raise SpecError(f"{where}: is a binary file", "name a YAML or JSON file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{where}: is not UTF-8 text (byte {error.start})", "name a YAML or JSON file") from None


def read_configuration_text(path: str | Path) -> str:
    """The text of a trainer's configuration; characters that are no UTF-8 are replaced."""
    where, data = label(path), _read(path, CONFIGURATION.num_bytes)
    hint = "give a script, YAML, Python, TOML or JSON file"
    if len(data) > CONFIGURATION.num_bytes:
        raise SpecError(f"{where}: is no configuration: it is larger than {CONFIGURATION.num_bytes:,} bytes", hint)
    if b"\0" in data:
        raise SpecError(f"{where}: is no configuration: it is a binary file", hint)
    return data.decode("utf-8-sig", errors="replace")


def text_beside(path: Path) -> str | None:
    """The text of a file that a configuration names; None where there is none, or none that could be one."""
    try:
        if not path.is_file() or path.stat().st_size > CONFIGURATION.num_bytes:
            return None
        return _as_utf8(path.read_bytes()).decode("utf-8-sig", errors="replace")
    except (OSError, ValueError):  # the latter of a NUL in the name
        return None


def refuse_longer(text: str, max_characters: int, refused: Callable[[str], SpecError]) -> None:
    """Raise for a text that is longer than a file of its kind may be."""
    if len(text) > max_characters:
        raise refused(f"{len(text):,} characters, where {max_characters:,} are the most that is read")


def refuse_signs(text: str, signs: str | re.Pattern[str], most: int, refused: Callable[[str], SpecError]) -> None:
    """Raise for a text that may have more values than `most`, by the signs that stand between values."""
    count = sum(map(text.count, signs)) if isinstance(signs, str) else sum(1 for _ in signs.finditer(text))
    if count > most:
        raise refused(f"more than {most:,} values")


def _read(path: str | Path, max_bytes: int) -> bytes:
    """At most max_bytes + 1 bytes of a file, or of stdin."""
    where = label(path)
    try:
        return _as_utf8(sys.stdin.buffer.read(max_bytes + 1) if str(path) == STDIN else _read_bytes(path, max_bytes))
    except FileNotFoundError:
        raise SpecError(f"{where}: no such file", "check the path") from None
    except IsADirectoryError:
        raise SpecError(f"{where}: is a directory", "name a file in it") from None
    except PermissionError:
        raise SpecError(f"{where}: no permission to read it", "make it readable for this user") from None
    except (OSError, ValueError) as error:  # name too long, loop of links, a NUL in the name …
        raise SpecError(
            f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}", "check the path"
        ) from None


def _as_utf8(data: bytes) -> bytes:
    """The data; those of a text in UTF-16, as PowerShell's `>` writes it, in UTF-8."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16", errors="replace").encode() if is_utf16 else data


def _read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """At most max_bytes + 1 bytes; a file known to be larger is not read at all."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return b"\n" * (max_bytes + 1) if size > max_bytes else file.read(max_bytes + 1)
