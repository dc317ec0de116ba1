"""Types what a hint says: the command line that failed, with the hint's options and values in it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
_WORDS = r"[A-Za-z0-9_.@:+=/,*-]*[A-Za-z0-9_@=/*]"
_SHORT = {"--gpus": "-g", "--model": "-m", "--global-batch-size": "-b", "--seq-length": "-s"}
_PROSE = ("has", "is", "alone", "and", "works")
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_LEAVES = re.compile(r"\bleave (?:out )?|(?:^|, |; |or )(?:without|plan the phases without) ")


@dataclass(frozen=True, slots=True)
class Case:
    """A command line that fails with a hint, and the option that a bare value in the hint belongs to."""

    home: str
    """The file that the hint stands in, below planner/."""
    says: str
    """Part of the hint as the source has it."""
    fails: str
    """The command line."""
    option: str = ""
    """The option that the hint's bare value is for; a hint that names its options needs none."""
    moves_on: bool = False
    """True where the hint mends what it speaks of, and the command line then lacks something else."""


def mended(case: Case, hint: str) -> list[list[str]]:
    """The command lines that a hint amounts to: each of its alternatives by itself."""
    words = shlex.split(case.fails)
    if case.option:
        return [_given(words, case.option, value, hint) for value in _values(hint)]
    if _LEAVES.search(hint):
        return [_without(words, _OPTION.findall(hint))]
    return [_with(words, part) for part in re.split(r"; or |, or | or (?=--)", hint) if _OPTION.search(part)]


def _values(hint: str) -> list[str]:
    """The bare values that a hint offers."""
    close = re.search(r"did you mean (.*)\?", hint)
    if close:
        return close.group(1).split(" or ")
    listed = re.search(r"(?:one )?of (.*)|write (\S+) alone", hint)
    if listed:
        return re.findall(_WORDS, listed.group(1) or listed.group(2))
    numbers = re.findall(r"\d[\d,.]*[MT]?", re.split(r" to leave |, or give ", hint)[0])
    return [word.replace(",", "") if _THOUSANDS.fullmatch(word) else word.rstrip(",.") for word in numbers]


def _given(words: list[str], option: str, value: str, hint: str) -> list[str]:
    """The words with a value in the place of the option's own, or in the place of a word that is no option."""
    if not option.startswith("-"):
        return [value if word == option else word for word in words]
    own = words[words.index(option) + 1] if option in words[:-1] else ""
    if "@" in own and value[:1].isdigit():
        value = f"{own.partition('@')[0]}@{value}"
    name, _, stated = own.partition("=")
    if stated and "=" not in value:
        value = f"{name}={value}" if hint.startswith(f"write {name}=") else f"{value}={stated}"
    return _replaced(words, option, value)


def _without(words: list[str], options: list[str]) -> list[str]:
    kept: list[str] = []
    skips = False
    for word in words:
        skips = word in options or (skips and not re.match(r"--?[a-z]", word))
        kept += [] if skips else [word]
    return kept


def _with(words: list[str], said: str) -> list[str]:
    """The words with each option that is said, and its value if one is said."""
    said = re.sub(r" from \S+ GiB to ", " ", said)
    for match in _OPTION.finditer(said):
        value = re.match(rf"[ =]({_WORDS})", said[match.end() :])
        is_value = value is not None and not value.group(1).startswith("--") and value.group(1) not in _PROSE
        words = _replaced(words, match.group(), value.group(1) if value and is_value else None)
    return words


def _replaced(words: list[str], option: str, value: str | None) -> list[str]:
    short = _SHORT.get(option)
    kept = _without(words, [option, *([short] if short else [])])
    return [*kept, option] if value is None else [*kept, option, value]
