"""Command-line arguments as data, and as the words of a command line."""

from __future__ import annotations

from collections.abc import Mapping


class ShellText(str):
    """Shell text with variables in it, which is written as it is: `"${CHECKPOINTS}"`, `${DATA_PATH}`."""

    __slots__ = ()

    @property
    def unquoted(self) -> str:
        """The text for files in which variables are replaced without a shell."""
        return self.replace('"', "")


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
            words.append(_spelled(value))
    return words


def _spelled(value: Value) -> str:
    """A scalar in the words of a command line: of a number the shortest that is exact."""
    if isinstance(value, str):
        return value
    if not isinstance(value, float):
        return str(value)
    short = format(value, "g")
    return short if float(short) == value else repr(value)
