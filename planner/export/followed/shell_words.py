"""Words of bash scripts with quotes taken off and variables put in, and conditions. No command is run."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.errors import SpecError
from planner.export.followed.python_values import computed
from planner.export.followed.shell_syntax import closing, double_end, found
from planner.specs.reading import SHELL, InputLimits, parse_expression

Environment = dict[str, list[str]]
"""Variables; an array has several words."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = re.compile(r"['\"\\$`]")
_NAMED = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
_LISTS = re.compile(r"\$(?:\{[A-Za-z_]\w*\[(?=[@*]\]\}))?([@*])")
"""`$@`, `${A[@]}` and their like with a star."""
_PARAMETER = re.compile(
    r"(?P<mark>[!#]?)(?P<name>[A-Za-z_]\w*|[0-9@*#?$!])(?P<index>\[[^\]]*\])?"
    r"(?P<operation>:?[-=+?]|##?|%%?|,,?|\^\^?|//?|:)?(?P<rest>.*)",
    re.DOTALL,
)
_ASSIGNS = re.compile(r"(\+\+|--)([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)\s*(.+))")
_MAX_CHARACTERS = SHELL.num_items
EACH = 32
"""A word or a statement costs as much as so many characters, even if it makes none."""
_MAX_DEPTH = 20
_ARITHMETIC = InputLimits(4_000, 4_000, 100)
_MAX_INTEGER = 10**30


@dataclass(slots=True)
class Words:
    """Expands words with the variables that are known so far."""

    variables: Environment = field(default_factory=dict)
    outcome: Callable[[str], str | None] = lambda command: None
    """The output of a command in `$(…)`; None where it is not known without running it."""
    num_unknown: int = 0
    """Outputs asked for so far that are not known."""
    spent: int = 0
    depth: int = 0

    def expand(self, raw: str, split: bool = True) -> list[str]:
        """The words that a word stands for; with `split`, an unquoted variable may hold several.

        Raises SpecError where variables that double themselves fill memory.
        """
        if self.depth >= _MAX_DEPTH:
            return []
        self.depth += 1
        fields, is_quoted, at = [""], False, 0
        while at < len(raw):
            char, start = raw[at], at
            if char == "'" or raw.startswith("$'", at):
                start += 1 + (char == "$")
                at = found(raw, "'", start)
                words, is_quoted, at = [raw[start:at]], True, at + 1
            elif char == '"':
                at = double_end(raw, at)
                words = self.quoted(raw[start + 1 : at - 1 if raw[at - 1 : at] == '"' else at])
                is_quoted = is_quoted or bool(words)
            else:
                words, at = self._piece(raw, at)
                if char in "$`":
                    joined = " ".join(words)
                    words = joined.split() if split else [joined]
            _add(fields, words)
        self.depth -= 1
        self.spend(EACH + sum(map(len, fields)))
        return fields if fields[-1] or is_quoted else fields[:-1]

    def text(self, raw: str) -> str:
        """A word as one text."""
        return " ".join(self.expand(raw, split=False))

    def quoted(self, inner: str) -> list[str]:
        """The words that a double-quoted text stands for: `"${A[@]}"` makes several, or none."""
        fields, is_list, at = [""], False, 0
        while at < len(inner):
            listed = _LISTS.match(inner, at)
            words, at = self._piece(inner, at, '"\\$`\n')
            is_list = is_list or (listed is not None and listed[1] == "@")
            # `"${A[*]}"` has the first character of IFS between its words
            by = "".join(self.variables.get("IFS", " "))[:1] if listed else " "
            _add(fields, words if listed and listed[1] == "@" else [by.join(words)])
        self.spend(EACH + sum(map(len, fields)))
        return [] if is_list and fields == [""] else fields

    def _piece(self, text: str, at: int, escaped: str = "") -> tuple[list[str], int]:
        """The words of an expansion, an escaped sign or plain text, and the index behind.

        `escaped` are the signs that a backslash takes the meaning from; none for any.
        """
        after = text[at + 1 : at + 2]
        if text[at] in "$`":
            return self._expansion(text, at)
        if text[at] == "\\" and (not escaped or (after and after in escaped)):
            return [after.replace("\n", "")], at + 2
        special = _SPECIAL.search(text, at + 1)
        end = special.start() if special else len(text)
        return [text[at:end]], end

    def counted(self, text: str) -> int | None:
        """The value of `((text))`, which may also assign: `i=0`, `i++`, `i += 2`."""
        if (match := _ASSIGNS.fullmatch(text.strip())) is None:
            return self.arithmetic(text)
        name, step, sign, change = match[2] or match[3], match[1] or match[4], match[5], match[6]
        old = " ".join(self.variables.get(name, ["0"]))
        value = self.arithmetic(f"({old}) {step[0]} 1" if step else f"({old}) {sign} ({change})" if sign else change)
        if value is not None:
            self.variables[name] = [str(value)]
        return value

    def arithmetic(self, text: str) -> int | None:
        """The value of `$((text))`; None where it is no integer arithmetic."""
        num_unknown = self.num_unknown
        expanded = " ".join(self.expand(text.replace(" ", "\\ "), split=False))
        if self.num_unknown > num_unknown:
            return None
        named = _NAME.sub(self._number, expanded)
        named = re.sub(r"\b0+(?=\d)", "", named).replace("&&", " and ").replace("||", " or ").replace("/", "//").strip()
        try:
            return _integer(parse_expression(named, _ARITHMETIC))
        except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
            return None

    def spend(self, characters: int) -> None:
        """Count work in characters. Raises SpecError above what any launch script needs."""
        self.spent += characters
        if self.spent > _MAX_CHARACTERS:
            raise SpecError(
                f"variables of the script make more than {_MAX_CHARACTERS:,} characters", "give a simpler launch script"
            )

    def _number(self, match: re.Match[str]) -> str:
        """A variable's value in arithmetic, where it needs no dollar sign."""
        text = " ".join(self.variables.get(match[0], [match[0]]))
        self.spend(len(text))
        return text

    def _expansion(self, text: str, at: int) -> tuple[list[str], int]:
        """The words that the `$…` or `` `…` `` at `at` stands for, and the index behind it."""
        opening = text[at + 1 : at + 2]
        if text[at] == "`":
            end = found(text, "`", at + 1)
            return self._output(text[at + 1 : end]), end + 1
        if opening in ("(", "{"):
            end = closing(text, at + 1)
            if text.startswith("$((", at):
                value = self.arithmetic(text[at + 3 : end - 1])
                return ["" if value is None else str(value)], end + 1
            return (self._output if opening == "(" else self._parameter)(text[at + 2 : end]), end + 1
        match = _NAMED.match(text, at + 1)
        return (["$"], at + 1) if match is None else (self.variables.get(match[0], []), match.end())

    def _output(self, command: str) -> list[str]:
        """The output of a command; nothing where it is not known."""
        output = self.outcome(command)
        self.num_unknown += output is None
        return [] if output is None else [output]

    def _parameter(self, inner: str) -> list[str]:
        """The words that `${inner}` stands for."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return []
        values = self.variables.get(match["name"], [])
        if match["mark"] == "!":
            values = self.variables.get(values[0], []) if values else []
        index = (match["index"] or "").strip("[]")
        if match["mark"] == "#":
            return [str(len(values) if index in ("@", "*") else len(" ".join(values)))]
        if index not in ("", "@", "*"):
            number = self.arithmetic(index)
            values = [values[number]] if number is not None and -len(values) <= number < len(values) else []
        operation, rest = match["operation"] or "", match["rest"]
        if operation.endswith(("-", "=")) and not any(values):
            values = self._default(rest)
            if operation.endswith("=") and match["name"].isidentifier():
                self.variables[match["name"]] = values
        if operation.endswith(("-", "=")):
            return values
        if operation.endswith("+"):
            return self._default(rest) if any(values) else []
        return [self._changed(value, operation, rest) for value in values] if operation else values

    def _default(self, rest: str) -> list[str]:
        """The words behind `:-`, spaces among them."""
        return self.quoted(rest.strip('"')) if '"' in rest or " " in rest else self.expand(rest)

    def _changed(self, value: str, operation: str, rest: str) -> str:
        """A value with a beginning or an end cut off, a part replaced, or its case changed."""
        if operation[0] in ",^":
            return value.lower() if operation[0] == "," else value.upper()
        if operation == ":":
            numbers = [self.arithmetic(part) for part in rest.split(":")]
            start = numbers[0] or 0
            return value[start:] if len(numbers) < 2 or numbers[1] is None else value[start : start + numbers[1]]
        if operation[0] == "/":
            pattern, _, new = rest.partition("/")
            old, put = self.text(pattern), self.text(new)
            if not old:
                return value
            self.spend(value.count(old) * len(put))
            return value.replace(old, put, -1 if operation == "//" else 1)
        if operation[0] not in "#%":
            return value
        pattern, from_start = self.text(rest), operation[0] == "#"
        self.spend(len(value) ** 2 * (1 + len(pattern)) // 64)  # every cut is held against the pattern
        cuts = range(len(value) + 1)
        fits = [cut for cut in cuts if fnmatch.fnmatchcase(value[:cut] if from_start else value[cut:], pattern)]
        if not fits:
            return value
        cut = (max if from_start == (len(operation) == 2) else min)(fits)
        return value[cut:] if from_start else value[:cut]


def _add(fields: list[str], words: list[str]) -> None:
    """Put words behind others: the first goes on the last one."""
    first, *others = words or [""]
    fields[-1] += first
    fields += others


def _integer(node: ast.expr) -> int:
    """The value of an integer expression; ValueError for anything else."""
    value = node.value if isinstance(node, ast.Constant) else computed(node, _integer)
    if not isinstance(value, int) or abs(value) > _MAX_INTEGER:
        raise ValueError(ast.dump(node))
    return bool(value) if isinstance(node, ast.BoolOp) else int(value)


_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_REPEATS, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")
_SET = re.compile(r"(?<!\\)\[\^?\]?(?:\[:\w+:\]|[^\]])*")
_CLASSES = {
    "[:digit:]": "0-9", "[:alpha:]": "A-Za-z", "[:alnum:]": "0-9A-Za-z", "[:upper:]": "A-Z", "[:lower:]": "a-z",
    "[:space:]": r"\s",
}  # fmt: skip
"""Classes of characters in a shell's patterns, as Python writes them."""
_MOST_WORDS = 200
_RANK = re.compile(r"\$\{?(\w*RANK|SLURM_(NODEID|PROCID)|\w*(TASK|COMPLETION)_INDEX)\b")
"""A variable that says which node, or which process, a script runs on."""
_UNKNOWN = ("-f", "-d", "-e", "-x", "-r", "-w", "-s", "-L", "-t", "-nt", "-ot")
"""Tests of files and terminals."""


def holds(raw: list[str], words: Words) -> bool | None:
    """True or false as the test holds; None where only a machine knows."""
    if raw[0] == "((":
        value = words.counted(" ".join(raw[1:]))
        return None if value is None else bool(value)
    inner = [word for word in raw[1:] if word not in ("]", "]]")]
    if len(inner) > _MOST_WORDS:
        return None
    for marks, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
        place = next((index for index, word in enumerate(inner) if word in marks), None)
        if place is not None:
            sides = [holds(["[[", *part], words) for part in (inner[:place], inner[place + 1 :])]
            return decides if decides in sides else None if None in sides else not decides
    inner = [word for word in inner if word not in ("(", ")")]
    if inner[:1] == ["!"]:
        status = holds(["[[", *inner[1:]], words)
        return None if status is None else not status
    if inner[:1] and inner[0] in _UNKNOWN:
        return None
    if len(inner) == 2 and inner[0] in ("-z", "-n", "-v"):
        text = words.text(f"${{{inner[1]}}}" if inner[0] == "-v" else inner[1])
        return bool(text) != (inner[0] == "-z")
    if len(inner) == 1:
        return bool(words.text(inner[0]))
    if len(inner) < 3:
        return None if inner else False
    left, right = inner[0], " ".join(inner[2:])
    # what the first node does is what is followed
    first = "0" if _RANK.search(left) else ""
    return _compared(words.text(left) or first, inner[1], words.text(right), words)


def _compared(left: str, comparison: str, right: str, words: Words) -> bool | None:
    if comparison in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) != (comparison == "!=")
    if comparison in _COMPARISONS:
        value = words.arithmetic(f"({left or 0}) {_COMPARISONS[comparison]} ({right or 0})")
        return None if value is None else bool(value)
    if comparison == "=~":
        return _matches(right, left, words)
    return None


def _matches(pattern: str, text: str, words: Words) -> bool | None:
    """True or false as a regular expression is found; None for one that may take long, such as `(a+)+$`."""
    repeats = len(_REPEATS.findall(pattern))
    if len(pattern) > 200 or len(text) > 100 or repeats > 3 or _REPEATED_GROUP.search(pattern):
        return None
    words.spend((1 + len(text)) ** repeats // 8)
    try:
        return re.search(_SET.sub(_as_python, pattern), text) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def _as_python(found: re.Match[str]) -> str:
    """A set of characters with its classes as Python's, and what else would begin another set there escaped."""
    inner = re.sub(r"\[:\w+:\]|[\[&|~]", lambda one: _CLASSES.get(one[0], "\\" + one[0]), found[0][1:])
    return f"[{inner}"
