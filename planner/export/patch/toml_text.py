"""Changes settings of a TOML file, `section.key`, line by line, and leaves everything else as it is written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.export.patch.change import Change


def changed(text: str, changes: Sequence[Change]) -> str:
    """The file with every change made; a new key stands at the end of its section."""
    lines = text.splitlines(keepends=True)
    for change in changes:
        section, _, key = change.name.rpartition(".")
        first, last = _section(lines, section)
        if first is None:
            if change.words is not None:
                lines += ["\n", f"[{section}]\n", f"{key} = {change.text}\n"]
            continue
        index = next((i for i in range(first, last) if re.match(rf"[ \t]*{re.escape(key)}[ \t]*=", lines[i])), None)
        if index is None:
            if change.words is not None:
                lines.insert(_behind(lines, first, last), f"{key} = {change.text}\n")
        elif change.words is None:
            del lines[index]
        else:
            lines[index] = re.sub(
                r"^([ \t]*[\w.-]+[ \t]*=[ \t]*)(?:\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[^#\n]*?)([ \t]*(?:#.*)?\n?)$",
                lambda match, value=change.text: f"{match[1]}{value}{match[2]}",  # type: ignore[misc]
                lines[index],
            )
    return "".join(lines)


def _section(lines: Sequence[str], name: str) -> tuple[int | None, int]:
    """The first line below a section's head, and the line behind its last."""
    heads = [(i, match[1].strip()) for i, line in enumerate(lines) if (match := re.match(r"\[([^\[\]]+)\]", line))]
    for number, (index, head) in enumerate(heads):
        if head == name:
            return index + 1, heads[number + 1][0] if number + 1 < len(heads) else len(lines)
    return None, 0


def _behind(lines: Sequence[str], first: int, last: int) -> int:
    """The line behind the last setting of a section, before the empty lines that end it."""
    while last > first and not lines[last - 1].strip():
        last -= 1
    return last
