"""Changes the cells of tables, the words of shell scripts and command lines, and the fields of log lines."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from typing import Any

from fuzzing.values import NUMBERS, WORDS

_WORD = re.compile(r"\S+")
_FIELD = re.compile(r"([\w. ()/-]+?)(\s*[:=]\s*)([^\s,|\]]+)")
"""A name and its value, as logs have them: `elapsed time per iteration (ms): 100.0`, `loss=2.1`."""
_SHELL: tuple[str, ...] = (
    "A=$A$A", "A=${A}${A}", "set -- $@ $@", "while true; do", "for i in {1..999999}; do", "done", "fi",
    "if [ $A ]; then", "case $A in", "esac", "f() { f; }", "f", "source $0", ". ./file.sh", "eval $A", "exec",
    "<<EOF", "EOF", "|", "&&", "$((9**9**9))", "$((1/0))", "$((A=A+1))", "${A//a/aa}", "${A[@]}", "${!A}",
    "${A:0:99999999}", "A=(", ")", "A+=($A)", "$(cat file.sh)", "\\", "'", '"', "--", "-", "export", "local", "${A:-",
    "}", "((", "))", "shift", "`", ";", "#",
)  # fmt: skip
"""Words that make a reader of shell scripts loop, grow or lose its place."""


def _anything(chance: random.Random) -> str:
    value: Any = chance.choice((*NUMBERS, *WORDS))
    return str(value)


def changed_cells(data: bytes, chance: random.Random) -> bytes:
    """The table with some cells, rows or columns changed."""
    try:
        rows = list(csv.reader(io.StringIO(data.decode(errors="replace"))))
    except csv.Error:
        return data
    rows = [row for row in rows if row]
    if not rows:
        return data
    for _ in range(chance.choice((1, 1, 2, 5))):
        row = chance.choice(rows)
        at, other = chance.randrange(len(row)), chance.choice(rows)
        match chance.randrange(7):
            case 0 | 1:
                row[at] = _anything(chance)
            case 2:
                row[at] = chance.choice(other)
            case 3:
                row.insert(at, chance.choice(other))
            case 4 if len(row) > 1:
                del row[at]
            case 5:
                longer = list(other) * chance.choice((1, 1, 100))  # five times in turn it would fill the memory
                rows.insert(chance.randrange(len(rows)), longer[:10_000])
            case _:
                row[at] += chance.choice(("0", "9", "F", "B", "e9", "-", row[at]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="replace")


def changed_words(data: bytes, chance: random.Random) -> bytes:
    """The script or command line with some words changed, moved, doubled or put into quotes."""
    text = data.decode(errors="replace")
    for _ in range(chance.choice((1, 1, 2, 4))):
        words = list(_WORD.finditer(text))
        if not words:
            return data
        word, other = chance.choice(words), chance.choice(words)[0]
        name, is_pair, value = word[0].partition("=")
        match chance.randrange(8):
            case 0:
                new = _anything(chance)
            case 1:
                new = other
            case 2:
                new = f"{word[0]} {chance.choice(_SHELL)}"
            case 3:
                new = chance.choice(_SHELL)
            case 4:
                new = ""
            case 5:
                new = chance.choice((f'"{word[0]}', f"'{word[0]}'", f"${{{word[0]}}}", f"$({word[0]})", f"{word[0]}\\"))
            case 6 if is_pair:
                new = f"{name}={chance.choice((_anything(chance), other, value * 2, '$' + name * 2))}"
            case _:
                new = f"{word[0]} {other}" * chance.choice((1, 1, 200))
        text = text[: word.start()] + new + text[word.end() :]
    return text.encode(errors="replace")


def changed_command(data: bytes, chance: random.Random) -> bytes:
    """The command line, a JSON list of words, with some values of its options changed, or options given twice."""
    words: list[str] = json.loads(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, other = chance.randrange(len(words)), chance.choice(words)
        word = words[at]
        if word.startswith("-") and chance.random() < 0.7 and at + 1 < len(words):
            at, word = at + 1, words[at + 1]
        match chance.randrange(7):
            case 0 | 1:
                words[at] = _anything(chance).replace("\0", "")
            case 2:
                words[at] = other
            case 3:
                words[at] = (
                    f"{word}{chance.choice((',', ':', '=', 'x', ''))}{chance.choice((word, other, '0', '9' * 30))}"
                )
            case 4 if len(words) > 1:
                del words[at]
            case 5:
                words.insert(at, other)
            case _:
                numbers = re.sub(r"\d+", lambda match: chance.choice(("0", "-1", "1e9", "9" * 30, match[0] * 2)), word)
                words[at] = numbers
    return json.dumps(words).encode()


def changed_lines(data: bytes, chance: random.Random) -> bytes:
    """The log with the values of some lines changed, or lines of it interrupted by others, as ranks do."""
    lines = data.decode(errors="replace").split("\n")
    for _ in range(chance.choice((1, 2, 5))):
        at = chance.randrange(len(lines))
        fields = list(_FIELD.finditer(lines[at]))
        if not fields or chance.random() < 0.3:
            cut, other = chance.randrange(len(lines[at]) + 1), chance.choice(lines)
            lines[at] = lines[at][:cut] + chance.choice((other, "\r", "\x1b[0m", "")) + lines[at][cut:]
            continue
        field = chance.choice(fields)
        value = chance.choice((_anything(chance), chance.choice(fields)[3], f"-{field[3]}", f"{field[3]}{field[3]}"))
        lines[at] = lines[at][: field.start(3)] + value + lines[at][field.end(3) :]
    return "\n".join(lines).encode(errors="replace")
