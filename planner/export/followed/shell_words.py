"""Words of bash scripts with quotes taken off and variables put in, and conditions. No command is run."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.errors import SpecError
from planner.export.followed.shell_syntax import closing, double_end
from planner.specs.reading import SHELL, InputLimits, parse_expression

Environment = dict[str, list[str]]
"""Variables; an array has several words."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = re.compile(r"['\"\\$`]")
_PARAMETER = re.compile(
    r"(?P<mark>[!#]?)(?P<name>[A-Za-z_]\w*|[0-9@*#?$!])(?P<index>\[[^\]]*\])?"
    r"(?P<operation>:?[-=+?]|##?|%%?|,,?|\^\^?|//?|:)?(?P<rest>.*)",
    re.DOTALL,
)
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Gt: operator.gt, ast.Lt: operator.lt,
    ast.GtE: operator.ge, ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
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
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self.depth -= 1
            return []
        fields, current, is_quoted, at = list[str](), "", False, 0
        while at < len(raw):
            char = raw[at]
            if char == "'" or raw.startswith("$'", at):
                start = at + 1 + (char == "$")
                end = raw.find("'", start)
                end = len(raw) if end < 0 else end
                current, is_quoted, at = current + raw[start:end], True, end + 1
            elif char == '"':
                end = double_end(raw, at)
                parts = self.quoted(raw[at + 1 : end - 1 if raw[end - 1 : end] == '"' else end])
                is_quoted, at = is_quoted or bool(parts), end
                if parts:
                    current += parts[0]
                if len(parts) > 1:
                    fields += [current, *parts[1:-1]]
                    current = parts[-1]
            elif char == "\\":
                current, at = current + raw[at + 1 : at + 2].replace("\n", ""), at + 2
            elif char in "$`":
                values, at = self._expansion(raw, at)
                pieces = " ".join(values).split() if split else [" ".join(values)]
                if len(pieces) > 1:
                    fields += [current + pieces[0], *pieces[1:-1]]
                    current = pieces[-1]
                else:
                    current += "".join(pieces)
            else:
                end = _end_of_plain(raw, at)
                current, at = current + raw[at:end], end
        self.depth -= 1
        self.spend(EACH + sum(map(len, fields)) + len(current))
        return [*fields, *([current] if current or is_quoted else [])]

    def text(self, raw: str) -> str:
        """A word as one text."""
        return " ".join(self.expand(raw, split=False))

    def quoted(self, inner: str) -> list[str]:
        """The words that a double-quoted text stands for: `"${A[@]}"` makes several, or none."""
        fields, current, at, is_list = list[str](), "", 0, False
        while at < len(inner):
            char = inner[at]
            if char == "\\" and inner[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                current, at = current + inner[at + 1 : at + 2].replace("\n", ""), at + 2
            elif char in "$`":
                start = at
                values, at = self._expansion(inner, at)
                if re.match(r"\$(\{[A-Za-z_]\w*\[\*\]\}|\*)", inner[start:at]):
                    values = [self.joined_by().join(values)]
                elif re.match(r"\$(\{[A-Za-z_]\w*\[@\]|@)", inner[start:at]):
                    is_list = True
                    if len(values) > 1:
                        fields += [current + values[0], *values[1:-1]]
                        current = values[-1]
                        continue
                current += " ".join(values)
            else:
                end = _end_of_plain(inner, at)
                current, at = current + inner[at:end], end
        self.spend(EACH + sum(map(len, fields)) + len(current))
        return [] if is_list and not current and not fields else [*fields, current]

    def joined_by(self) -> str:
        """The character between the words of `"${A[*]}"`: the first of IFS."""
        return "".join(self.variables.get("IFS", [" "]))[:1]

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
        named = re.sub(r"\b0+(?=\d)", "", named).replace("&&", " and ").replace("||", " or ").strip()
        try:
            return _evaluate(parse_expression(named, _ARITHMETIC))
        except (ValueError, ZeroDivisionError, RecursionError):
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
        if text[at] == "`":
            end = text.find("`", at + 1)
            end = len(text) if end < 0 else end
            return self._output(text[at + 1 : end]), end + 1
        if text.startswith("$((", at):
            end = closing(text, at + 1)
            value = self.arithmetic(text[at + 3 : end - 1])
            return ["" if value is None else str(value)], end + 1
        if text.startswith("$(", at):
            end = closing(text, at + 1)
            return self._output(text[at + 2 : end]), end + 1
        if text.startswith("${", at):
            end = closing(text, at + 1)
            return self._parameter(text[at + 2 : end]), end + 1
        match = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]").match(text, at + 1)
        if match is None:
            return ["$"], at + 1
        return self.variables.get(match[0], []), match.end()

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
        if operation.strip(":") in ("-", "=") and operation.strip(":"):
            return values if any(values) else self._default(rest)
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
        pattern, longest = self.text(rest), len(operation) == 2
        self.spend(len(value) ** 2 * (1 + len(pattern)) // 64)  # every cut is held against the pattern
        cuts = range(len(value) + 1)
        if operation[0] == "#":
            ends = [cut for cut in cuts if fnmatch.fnmatchcase(value[:cut], pattern)]
            return value[(max(ends) if longest else min(ends)) :] if ends else value
        starts = [cut for cut in cuts if fnmatch.fnmatchcase(value[cut:], pattern)]
        return value[: min(starts) if longest else max(starts)] if starts else value


def _end_of_plain(text: str, at: int) -> int:
    """The index of the next character that may mean something else than itself, behind the one at `at`."""
    special = _SPECIAL.search(text, at + 1)
    return special.start() if special else len(text)


def _evaluate(node: ast.expr) -> int:
    """The value of an integer expression; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else int(not value)
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluate(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.IfExp):
        return _evaluate(node.body if _evaluate(node.test) else node.orelse)
    pair: tuple[ast.AST, ast.expr, ast.expr] | None = None
    if isinstance(node, ast.BinOp):
        pair = (node.op, node.left, node.right)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        pair = (node.ops[0], node.left, node.comparators[0])
    if pair is not None and type(pair[0]) in _OPERATORS:
        value = int(_OPERATORS[type(pair[0])](_evaluate(pair[1]), _evaluate(pair[2])))
        if abs(value) <= _MAX_INTEGER:
            return value
    raise ValueError(ast.dump(node))


_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_REPEATS, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")
_MOST_WORDS = 200
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
    for mark, combine in ((("||", "-o"), _either), (("&&", "-a"), _both)):
        places = [index for index, word in enumerate(inner) if word in mark]
        if places:
            head, tail = inner[: places[0]], inner[places[0] + 1 :]
            return combine(holds(["[[", *head], words), holds(["[[", *tail], words))
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
    return _compared(words.text(inner[0]), inner[1], words.text(" ".join(inner[2:])), words)


def _compared(left: str, comparison: str, right: str, words: Words) -> bool | None:
    if comparison in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if comparison == "!=":
        return not fnmatch.fnmatchcase(left, right)
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
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return True if left and right else None


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return False if left is False and right is False else None
