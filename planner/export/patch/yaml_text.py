"""Changes options of a `MODEL_ARGS:` mapping, line by line, and leaves everything else as it is written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.export.patch.change import Change

_SPECIAL = re.compile(r"[:#{}\[\],&*?|<>=!%@`'\"]|^[-\s]|\s$|^(true|false|null|yes|no|on|off)$", re.IGNORECASE)


def changed(text: str, changes: Sequence[Change]) -> str:
    """The file with every change made; a new option stands behind the last of the mapping."""
    lines = text.splitlines(keepends=True)
    for change in changes:
        index = next((i for i, line in enumerate(lines) if _named(line) == change.name), None)
        if index is None:
            if change.words is not None:
                at = _last_option(lines)
                indent = re.match(r"[ \t]*", lines[at])[0]  # type: ignore[index]
                lines.insert(at + 1, f"{indent}{change.name}: {_value(change)}\n")
        elif change.words is None:
            del lines[index]
        else:
            match = re.match(r"([ \t]*[\"']?--[\w.-]+[\"']?:[ \t]*)([^#\n]*?)([ \t]*(?:#.*)?\n?)$", lines[index])
            assert match is not None
            lines[index] = f"{match[1]}{_value(change)}{match[3]}"
    return "".join(lines)


def _named(line: str) -> str | None:
    match = re.match(r"[ \t]*[\"']?(--[\w.-]+)[\"']?:", line)
    return None if match is None else match[1]


def _last_option(lines: Sequence[str]) -> int:
    """The line of the last option that has the mapping's indentation."""
    return max(i for i, line in enumerate(lines) if _named(line) is not None)


def _value(change: Change) -> str:
    words = change.words or ()
    if not words:
        return "true"
    if len(words) > 1:
        return f"[{', '.join(words)}]"
    return f"'{words[0]}'" if _SPECIAL.search(words[0]) else words[0]
