"""Switches as trainers spell them: one row for each value, and for each version in which the spelling changed.

Exporters write a value by its row and importers find the row whose settings a configuration has, so that a spelling has
one home. A setting is an option of a command line, or the path of a field in a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError
from planner.trainers.rules.common import release
from planner.trainers.switches import Value

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A setting that depends on the switch's value: the way there, and the way back."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Value]


ITSELF = Part(lambda value: value, lambda setting: " ".join(_words(setting)))
"""The value is the setting."""
SHARE = Part(lambda value: value, lambda setting: _share(setting))
"""The value is a number."""
IS_SET = Part(lambda value: value, lambda setting: True)
"""Any setting means true."""
MODULES = Part(lambda value: tuple(value.split("+")), lambda setting: "+".join(_words(setting)))
"""The value is names joined by `+`, the setting a list of them."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """A value of a switch in a trainer's settings."""

    switch: str
    value: Any
    """The value, or None for any that the parts of the settings say."""
    settings: Settings = field(default_factory=dict)
    """Settings and their values; none for the value that the trainer has unasked."""
    since: str = ""
    """The first version that spells it so; empty for the oldest that is known."""
    before: str = ""
    """The first version that no longer does; empty where none is known."""
    is_read_only: bool = False
    """True for a shorter or older way to say the value, which is understood and never written."""

    def is_of(self, version: str) -> bool:
        """True if a version's configuration is written so; an empty version is the newest."""
        if self.is_read_only:
            return False
        if not version:
            return not self.before
        return release(self.since) <= release(version) and (not self.before or release(version) < release(self.before))

    def written(self, value: Value) -> dict[str, Any]:
        """The settings that say `value`."""
        return {name: s.write(value) if isinstance(s, Part) else s for name, s in self.settings.items()}

    def read(self, found: Settings) -> Value | None:
        """The value that the settings found say by this row; None where they say it otherwise."""
        value: Value | None = self.value
        for name, expected in self.settings.items():
            if name not in found:
                return None
            if isinstance(expected, Part):
                value = expected.read(found[name])
            elif _words(expected) != _words(found[name]):
                return None
        return value


def spelling_of(rows: Iterable[Spelling], switch: str, value: Value, version: str) -> dict[str, Any] | None:
    """The settings that say a switch's value in a version; None where it has no word for it."""
    own = [row for row in rows if row.switch == switch and row.is_of(version)]
    exact = [row for row in own if row.value == value and type(row.value) is type(value)]
    # a row of another switch's kind of value, such as true beside joined names, does not say this one
    open_rows = [row for row in own if row.value is None and not isinstance(value, bool)]
    row = next(iter([*exact, *open_rows]), None)
    return None if row is None else row.written(value)


def read_switches(rows: Iterable[Spelling], found: Settings) -> dict[str, Value]:
    """The value of each switch that the settings found say: by the row that most of them match."""
    best: dict[str, tuple[int, Value]] = {}
    for row in rows:
        value = row.read(found)
        if value is not None and len(row.settings) > best.get(row.switch, (-1, value))[0]:
            best[row.switch] = (len(row.settings), value)
    return {switch: value for switch, (_, value) in best.items()}


def unexplained(rows: Iterable[Spelling], found: Settings) -> set[str]:
    """Settings that rows spell, with values that no row does."""
    rows = tuple(rows)
    spelled = {name for row in rows for name in row.settings if name in found}
    return spelled - {name for row in rows if row.read(found) is not None for name in row.settings}


def _share(setting: Any) -> float:
    try:
        return float(_words(setting)[0])
    except (IndexError, ValueError):
        raise SpecError(
            f"a share of the optimizer: {str(setting)[:60]!r} is no number", "write one from 0 to 1"
        ) from None


def _words(setting: Any) -> list[str]:
    """A setting as words, whichever way a configuration has it: a list, a text, a number, a bare option."""
    if setting is True or setting == []:
        return []
    if isinstance(setting, (list, tuple)):
        return [str(item) for item in setting]
    if isinstance(setting, float):
        return [format(setting, "g")]
    return str(setting).split()
