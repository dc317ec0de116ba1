"""The one home of reading what users' files hold: bytes, nesting, values and digits have limits, and nothing is run.

Every parse raises SpecError for whatever cannot be read. Text, JSON and YAML stand together; TOML, Python and CSV, a
module each, are imported where they are needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.errors import SpecError
from planner.specs.reading.limits import JSON, Limits
from planner.specs.reading.text import (
    MAX_BYTES,
    STDIN,
    NotJsonError,
    json_value,
    kind_of,
    label,
    parse_json,
    parse_yaml,
    printable,
    read_text,
    whole_number,
)

__all__ = [
    "MAX_BYTES", "STDIN", "NotJsonError", "json_value", "kind_of", "label", "load_yaml", "parse_json", "parse_mapping",
    "parse_yaml", "printable", "read_text", "whole_number",
]  # fmt: skip


def load_yaml(path: str | Path, limits: Limits = JSON) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; `-` is stdin. Raises SpecError for whatever is not one."""
    return parse_mapping(read_text(path, limits.num_bytes), label(path), limits)


def parse_mapping(text: str, where: str, limits: Limits = JSON) -> dict[str, Any]:
    """The mapping that `text` holds, as JSON where it looks like it and else as YAML; the limits are those of JSON."""
    if where.endswith(".json"):
        data = parse_json(text, where, limits=limits)
    elif text.lstrip().startswith("{"):
        try:
            data = json_value(text, where, "", limits)
        except NotJsonError:  # a YAML flow mapping also starts with a brace
            data = parse_yaml(text, where)
    else:
        data = parse_yaml(text, where)
    if data is None:
        raise SpecError(f"{where}: is empty", "write `key: value` lines")
    if not isinstance(data, dict):
        raise SpecError(f"{where}: holds {kind_of(data)}, not a mapping", "write `key: value` lines")
    return data
