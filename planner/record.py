"""A record: a dataclass with slots that nothing changes, soon declared and soon made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, *, eq: bool = True, slots: bool = True, kw_only: bool = False) -> Any:
    """`dataclass(frozen=True, slots=True)`, whose fields mypy alone guards, and whose methods are written once.

    Python's own takes three times as long to set each field, and compiles six methods for each class.
    """
    if cls is None:
        return partial(record, eq=eq, slots=slots, kw_only=kw_only)
    made: Any = dataclass(eq=False, repr=False, slots=slots, kw_only=kw_only)(cls)
    if eq:
        values = attrgetter("__class__", *(each.name for each in fields(made) if each.compare))
        made.__eq__ = lambda own, other: values(own) == values(other) if type(other) is type(own) else NotImplemented
        made.__hash__ = lambda own: hash(values(own))
    made.__repr__ = _shown
    return made


def _shown(value: Any) -> str:
    shown = (f"{each.name}={getattr(value, each.name)!r}" for each in fields(value) if each.repr)
    return f"{type(value).__qualname__}({', '.join(shown)})"
