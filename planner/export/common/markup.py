"""JSON and YAML of the files that are imported."""

from __future__ import annotations

import json
from typing import Any

import yaml

from planner.errors import SpecError


def json_of(text: str, hint: str) -> Any:
    """The value that a JSON text holds. Raises SpecError with the hint where it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not JSON: {error}", hint) from None


def yaml_of(text: str, hint: str) -> Any:
    """The value that a YAML text holds. Raises SpecError with the hint where it is none, or nested too deeply."""
    try:
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"not YAML: {str(error).splitlines()[0]}", hint) from None
