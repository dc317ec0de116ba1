"""JSON and YAML of the files that are imported: of two equal keys the last counts, as it does for their trainers."""

from __future__ import annotations

from typing import Any

from planner.specs.reading import parse_json, parse_yaml


def json_of(text: str, hint: str) -> Any:
    """The value that a JSON text holds. Raises SpecError with the hint where it is none, or nested too deeply."""
    return parse_json(text, "", hint, keeps_last=True)


def yaml_of(text: str, hint: str) -> Any:
    """The value that a YAML text holds. Raises SpecError with the hint where it is none, or nested too deeply."""
    return parse_yaml(text, "", hint, keeps_last=True)
