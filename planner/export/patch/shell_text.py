"""Changes options in the text of a shell script and leaves everything else as it is written.

A value that a variable holds is changed where the variable is assigned; a new option stands before one of its kind,
with the indentation and the line continuation that this has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import lru_cache

from planner.export.patch.change import Change

_ANCHORS = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size",
    "--num-layers", "--parallelism.", "--training.", "--seq-length", "--bf16",
)  # fmt: skip
"""Options beside which a new one belongs, the best first."""
_VARIABLE = re.compile(r"\"?\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::-[^}]*)?\}|(?P<plain>[A-Za-z_]\w*))\"?")
_PLAIN = re.compile(r"[\w.,:=+/-]+")


def changed(text: str, changes: Sequence[Change], quotes: bool = True) -> str:
    """The script with every change made.

    Without `quotes`, words stand bare inside a quoted text: a shell that splits such a text takes none off.
    """
    for change in changes:
        place = _find(text, change.name)
        if place is None:
            text = text if change.words is None else _inserted(text, change, quotes)
        elif change.words is None:
            text = _removed(text, place)
        else:
            text = _replaced(text, place, change, quotes)
    return text


def directive_changed(text: str, name: str, value: str) -> str:
    """The script with `#SBATCH --name` at another value, where it has one."""
    pattern = re.compile(rf"^(#SBATCH[ \t]+--{name}[= ])(\S+)", re.MULTILINE)
    return pattern.sub(lambda match: match[1] + value, text)


def _find(text: str, name: str) -> tuple[int, int, int] | None:
    """The start of the last option of that name, its end, and the end of its words."""
    code = _without_comments(text)
    found = list(re.finditer(rf"(?<![\w-]){re.escape(name)}(?![\w.-])", code))
    if not found:
        return None
    start, end = found[-1].span()
    return start, end, _end_of_words(code, end)


@lru_cache(16)
def _without_comments(text: str) -> str:
    """The text with comments, and lines that only print, as spaces of the same length."""
    blank = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*|^[ \t]*(?:echo|printf)\b[^\n]*")
    return blank.sub(lambda match: " " * len(match[0]), text)


def _end_of_words(code: str, at: int) -> int:
    """The end of an option's words: those before the next option, the line's end or a closing mark."""
    end = at
    while match := re.compile(
        r"(?:[ \t]+|=)(\"[^\"\n]*\"|'[^'\n]*'|\$\{[^}\n]*\}|\$\(\([^\n]*?\)\)|[^\s\"'\\)]+)"
    ).match(code, end):
        if match[1].startswith(("--", "|", "&", ";", ">", "<", "(")) or match[1].endswith((".py", ".sh")):
            break
        end = match.end()
    return end


def _replaced(text: str, place: tuple[int, int, int], change: Change, quotes: bool) -> str:
    start, name_end, end = place
    old = text[name_end:end]
    variable = _VARIABLE.fullmatch(old.strip(" \t="))
    if variable is not None and change.words and len(change.words) == 1:
        name = variable["braced"] or variable["plain"]
        if (assigned := _assigned(text, name, change.words[0])) is not None and _uses(text, name) == 1:
            return assigned
    separator = old[0] if old else " "
    is_bare = not quotes and _in_quotes(text, start) is not None
    words = f"{separator}{change.text if is_bare else _quoted(change, old)}" if change.words else ""
    return text[:name_end] + words + text[end:]


def _uses(text: str, name: str) -> int:
    """How many options take their value from a variable."""
    return len(re.findall(rf"--[\w.-]+[ \t=]+\"?\$\{{?{name}\b", _without_comments(text)))


def _assigned(text: str, name: str, value: str) -> str | None:
    """The script with a variable's only assignment changed; None where there is none to a plain value."""
    pattern = re.compile(rf"(?m)^([ \t]*(?:export[ \t]+|declare[ \t]+)?{name}=)([\"']?)(\$\{{[^}}]*?:-)?([\w.,+-]+)")
    found = list(pattern.finditer(_without_comments(text)))
    if len(found) != 1:
        return None
    start, end = found[0].span(4)
    return text[:start] + value + text[end:]


def _quoted(change: Change, old: str) -> str:
    """The words in the quotes of the old ones where these have some, or where a shell needs them."""
    text = change.text
    mark = re.match(r"[ \t=]*([\"'])", old)
    if mark is not None and len(change.words or ()) == 1:
        return f"{mark[1]}{text}{mark[1]}"
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in change.words or ())


def _removed(text: str, place: tuple[int, int, int]) -> str:
    """The script without an option; its line goes too where nothing else stands on it."""
    start, _, end = place
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    before, after = text[line_start:start], text[end:line_end]
    if not before.strip() and after.strip() in ("", "\\"):
        return text[:line_start] + text[line_end + 1 :]
    return (
        text[: start - (len(before) - len(before.rstrip(" ")))] + text[end:]
        if before.strip()
        else text[:start] + text[end:].lstrip(" ")
    )


def _inserted(text: str, change: Change, quotes: bool) -> str:
    """The script with a new option before one that it has, at best one that begins a line."""
    places = [place for name in _ANCHORS for place in _beginnings(text, name)]
    place = next((p for p in places if not _before(text, p).strip()), next(iter(places), None))
    if place is None:
        return text
    option = f"{change.name} {_quoted(change, '')}".rstrip()
    if (mark := _in_quotes(text, place)) is not None:
        # inside a quoted text the other mark quotes
        option = (
            f"{change.name} {change.text}".rstrip()
            if not quotes
            else option.replace("'", '"')
            if mark == "'"
            else option
        )
    indent = _before(text, place)
    if indent.strip():
        return f"{text[:place]}{option} {text[place:]}"
    line_start = place - len(indent)
    line_end = text.find("\n", place)
    line = text[line_start : len(text) if line_end < 0 else line_end]
    previous = text[:line_start].rstrip("\n").rsplit("\n", 1)[-1].rstrip()
    continues = " \\" if line.rstrip().endswith("\\") or previous.endswith("\\") else ""
    return f"{text[:place]}{option}{continues}\n{indent}{text[place:]}"


def _before(text: str, place: int) -> str:
    """The text before a place on its line."""
    return text[text.rfind("\n", 0, place) + 1 : place]


def _beginnings(text: str, name: str) -> list[int]:
    """The places of options that begin so, the last first."""
    found = re.finditer(rf"(?<![\w-]){re.escape(name)}(?:[\w.-]*)(?=[\s=])", _without_comments(text))
    return [match.start() for match in found][::-1]


def _in_quotes(text: str, place: int) -> str | None:
    """The mark of the quoted text that a place lies in; None outside of any."""
    mark = None
    for char in re.sub(r"\\.", "__", _without_comments(text)[:place]):
        if mark is None and char in "\"'":
            mark = char
        elif char == mark:
            mark = None
    return mark
