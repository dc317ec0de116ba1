"""Rows of the tables that say how fields are spelled in Megatron-LM's options, and in dialects that share its names.

A row has its options, Megatron-Bridge's field of the same value, how it is written and how it is read; writers and
readers are folds over rows. Primus' key of an option is the name that Megatron-LM's parser gives its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from planner.export.megatron.option_words import Options, decimal, size
from planner.export.trainer_files import Arguments, Value
from planner.trainers.rules.common import release

Fields = dict[str, Any]
"""Fields by their paths (`moe.num_experts`), as a configuration says them."""
REQUIRED = ...
"""Stands for the value of an option that must be given."""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """Options that say one thing of a model, a plan, or the settings of a run."""

    bridge: Mapping[str, str]
    """Each option, and Megatron-Bridge's field of the same value; an empty one where Bridge says it otherwise."""
    write: Callable[[Any], Arguments]
    read: Callable[[Options], Fields] | None = None
    """The fields that the options say; None where an importer passes them by."""
    since: str = ""
    """The first Megatron core that has them; empty for the oldest that is known."""

    def features(self, option: str) -> Fields:
        """The fields that one of the options says by itself, in some value."""
        return {} if self.read is None else self.read({option: []})


def known(options: Options) -> Fields:
    """The reader of an option that says nothing by itself that others do not."""
    return {}


def row(
    name: str,
    bridge: str,
    value: Callable[[Any], Value | None],
    read: Callable[[Options], Fields] | None = None,
    since: str = "",
) -> OptionRow:
    """A row of one option, which is left out where its value is None or False."""

    def write(source: Any) -> Arguments:
        found = value(source)
        return {} if found is None or found is False else {name: found}

    return OptionRow({name: bridge}, write, read, since)


def count(name: str, field: str, bridge: str = "", unasked: Any = REQUIRED) -> OptionRow:
    """A whole number that is a field; `unasked` is its value, or the function of the options that gives it."""

    def read(options: Options) -> Fields:
        if name in options or unasked is REQUIRED:
            return {field: size(options, name)}
        return {field: unasked(options) if callable(unasked) else unasked}

    return row(name, bridge, attrgetter(field), read)


def flag(name: str, field: str, bridge: str = "") -> OptionRow:
    """A bare option that says that a field is true."""
    return row(name, bridge, attrgetter(field), lambda options: {field: name in options})


def amount(name: str, field: str, bridge: str = "", unasked: float | None = None) -> OptionRow:
    """A number that is a field, and is left out where it is 0."""
    value = attrgetter(field)
    return row(
        name, bridge, lambda source: value(source) or None, lambda options: {field: _amount(options, name, unasked)}
    )


def _amount(options: Options, name: str, unasked: float | None) -> float | None:
    return decimal(options, name) if unasked is None else decimal(options, name, unasked)


def written(rows: Iterable[OptionRow], source: Any, version: str = "") -> Arguments:
    """The arguments that rows say of their source, in a version of Megatron core (empty: the newest)."""
    arguments: Arguments = {}
    for option in rows:
        if not version or not option.since or release(option.since) <= release(version):
            arguments |= option.write(source)
    return arguments


def read_fields(rows: Iterable[OptionRow], options: Options) -> Fields:
    """The fields that options say by rows, with those of a part (`moe.`, `mla.`) in a mapping of its own."""
    fields: Fields = {}
    for option in rows:
        for path, value in (option.read(options) if option.read else {}).items():
            part, _, name = path.rpartition(".")
            (fields.setdefault(part, {}) if part else fields)[name] = value
    return fields


def names_read(rows: Iterable[OptionRow]) -> frozenset[str]:
    """The options that rows read."""
    return frozenset(name for option in rows if option.read is not None for name in option.bridge)
