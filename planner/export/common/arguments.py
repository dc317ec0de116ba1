"""Command-line arguments as data, and their spellings: argv, YAML, shell arrays."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

Value = bool | int | float | str | tuple[str, ...]
Arguments = dict[str, Value]
"""Option (with its dashes) to value: true is a bare flag, a tuple several words."""


def argv(arguments: Mapping[str, Value]) -> list[str]:
    """The words of a command line."""
    words: list[str] = []
    for option, value in arguments.items():
        words.append(option)
        if isinstance(value, tuple):
            words += value
        elif value is not True:
            words.append(spell(value))
    return words


def spell(value: Value) -> str:
    """A scalar in the words of a command line."""
    return format(value, "g") if isinstance(value, float) else str(value)


def shell_array(name: str, arguments: Mapping[str, Value], words: Iterable[str] = ()) -> str:
    """A bash array with one option, or one further word, a line, each quoted."""
    lines = [shell_words(argv({option: value})) for option, value in arguments.items()]
    lines += [shell_words([word]) for word in words]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in lines), ")"])


def shell_words(words: Iterable[str]) -> str:
    """Words joined by blanks, each quoted where the shell would read it otherwise."""
    return " ".join(map(shlex.quote, words))


def comment(text: str) -> str:
    """`text` as comment lines: control characters and line breaks cannot leave the comment."""
    return "".join(f"# {_printable(line)}".rstrip() + "\n" for line in text.split("\n"))


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in line)


def slug(name: str) -> str:
    """A name for jobs and Kubernetes objects: a-z, 0-9 and -, at most 40, letter or digit at the ends."""
    text = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    return "-".join(part for part in text.split("-") if part)[:40].strip("-") or "plan"
