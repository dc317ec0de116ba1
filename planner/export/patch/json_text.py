"""Changes values of a JSON file by their path, and leaves everything else as it is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from planner.export.common.markup import json_of
from planner.export.patch.change import Change


def changed(text: str, changes: Sequence[Change]) -> str:
    """The file with every change made: paths are `section.key`, words are JSON.

    Lines that only another layout of the same data would change stay as they are.
    """
    before, after = (json_of(text, "give a JSON file") for _ in range(2))
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
    written = dict(zip(_places(old), own, strict=True))
    lines = [
        written[place].rstrip().rstrip(",") + "," * line.endswith(",") if place in written else line
        for place, line in zip(_places(new), new, strict=True)
    ]
    return "\n".join(lines) + end


def _places(lines: list[str]) -> list[tuple[str, ...]]:
    """Each line's text below the keys that it lies in: a line that says the same has the same place in another dump."""
    open_keys: list[str] = []
    places = []
    for number, line in enumerate(lines):
        bare = line.strip().rstrip(",")
        if bare[:1] in ("}", "]") and open_keys:
            places.append((*open_keys, bare))
            open_keys.pop()
            continue
        # items of a list may be alike
        places.append((*open_keys, bare if ":" in bare else f"{number} {bare}"))
        if bare.endswith(("{", "[")):
            open_keys.append(_key(line))
    return places


def _key(line: str) -> str:
    """The key of a line, however its value is written."""
    return line.partition(":")[0].strip() if ":" in line else line.strip()


def _indent(text: str) -> Any:
    """The indentation of the file: spaces or a tab."""
    for line in text.splitlines()[1:]:
        if stripped := line.lstrip():
            return "\t" if line.startswith("\t") else len(line) - len(stripped) or 2
    return 2
