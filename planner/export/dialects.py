"""Trainers' own words and defaults: the table in dialects.yaml, which says what its columns mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Dialect:
    """A trainer's row."""

    name: str
    documented: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    unasked: Mapping[str, Any] = field(default_factory=dict)
    harmless: str = ""
    marks: tuple[str, ...] = ()

    def is_harmless(self, key: str) -> bool:
        """The key moves neither the bytes nor the seconds of a step."""
        return bool(self.harmless) and beginnings(self.harmless).match(key) is not None

    def left_out(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that are not given, as the trainer has them."""
        return {key: value for key, value in self.unasked.items() if key not in settings}


@cache
def beginnings(words: str, before: str = "") -> re.Pattern[str]:
    """The pattern of keys that begin with one of the words."""
    return re.compile(f"{before}({'|'.join(words.split())})")


@cache
def table() -> dict[str, dict[str, Any]]:
    """dialects.yaml as it stands."""
    text = files("planner.export").joinpath("dialects.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


@cache
def dialect(name: str) -> Dialect:
    """The row of a trainer."""
    row = table()[name]
    return Dialect(
        name,
        row["documented"],
        row.get("renamed", {}),
        row.get("unasked", {}),
        row.get("harmless", ""),
        tuple(row.get("marks", ())),
    )
