"""Changes values of a JSON file by their path, and leaves everything else as it is written."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from planner.export.patch.change import Change


def changed(text: str, changes: Sequence[Change]) -> str:
    """The file with every change made: paths are `section.key`, words are JSON.

    Lines that only another layout of the same data would change stay as they are.
    """
    before = json.loads(text)
    after = json.loads(text)
    for change in changes:
        *parents, key = change.name.split(".")
        owner = after
        for parent in parents:
            owner = owner.setdefault(parent, {})
        if change.words is None:
            owner.pop(key, None)
        else:
            owner[key] = json.loads(change.text)
    indent = _indent(text)
    old, new = (json.dumps(data, indent=indent).splitlines() for data in (before, after))
    own = text.splitlines()
    end = "\n" if text.endswith("\n") else ""
    if [_key(line) for line in old] != [_key(line) for line in own]:
        return json.dumps(after, indent=indent) + end
    lines: list[str] = []
    bare = [[line.rstrip(",") for line in side] for side in (old, new)]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
        if kind == "equal":
            lines += [own[a + i].rstrip().rstrip(",") + "," * new[c + i].endswith(",") for i in range(b - a)]
        else:
            lines += new[c:d]
    return "\n".join(lines) + end


def _key(line: str) -> str:
    """The key of a line, however its value is written."""
    return line.partition(":")[0].strip() if ":" in line else line.strip()


def _indent(text: str) -> Any:
    """The indentation of the file: spaces or a tab."""
    for line in text.splitlines()[1:]:
        if stripped := line.lstrip():
            return "\t" if line.startswith("\t") else len(line) - len(stripped) or 2
    return 2
