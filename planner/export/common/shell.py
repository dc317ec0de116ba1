"""A reader of bash scripts that runs nothing: it follows variables, arrays and arithmetic, and no commands.

Both branches of a condition are read; of two assignments the later wins.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_PARAMETER = re.compile(r"(!?)([A-Za-z_]\w*|[0-9@*#?])(\[[@*\d]*\])?(?::?([-=+])(.*))?", re.DOTALL)
_BREAKS = "\n;&|()<>"
_KEYWORDS = frozenset({"export", "declare", "readonly", "local", "then", "do", "else", "if", "elif", "env", "{"})
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_CHARACTERS = 4_000_000


@dataclass(slots=True)
class Script:
    """The words, variables and Slurm directives of a script."""

    words: list[str] = field(default_factory=list)
    """Words of all commands, in order, with variables put in."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Every variable at the end of the script; an array has several words."""
    directives: dict[str, str] = field(default_factory=dict)
    """`#SBATCH --nodes=4` as nodes: 4."""


def read_shell(text: str) -> Script:
    """Read `text`; unknown variables are empty, and commands in `$(…)` give nothing."""
    script = Script(directives=_directives(text))
    _Reader(text[:_MAX_CHARACTERS], script).commands()
    script.words = [part for word in script.words for part in _inner(word, script)]
    return script


def _inner(word: str, script: Script) -> list[str]:
    """A word that is a command line itself (`bash -c "torchrun …"`, `"--fp8-format hybrid"`) as its words."""
    if " " not in word or not re.search(r"\btorchrun\b|\bpython|^\s*--", word):
        return [word]
    inner = Script(variables=dict(script.variables))
    _Reader(word, inner).commands()
    return inner.words


def _directives(text: str) -> dict[str, str]:
    """Options of the lines that begin with #SBATCH."""
    directives: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH[ \t]+(.+?)[ \t]*(?:#.*)?$", text, re.MULTILINE):
        for name, value in re.findall(r"--?([A-Za-z][\w-]*)(?:[=\s]+([^\s-]\S*))?", line):
            directives[name] = value
    return directives


class _Reader:
    """Walks through a text once, from `at` on, and puts what it reads into a script."""

    def __init__(self, text: str, script: Script) -> None:
        self.text, self.at, self.script = text, 0, script

    def commands(self) -> None:
        """Read everything; assignments where a command may begin are kept, all other words collected."""
        begins = True
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BREAKS:
                self.at += 1
                begins = True
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                self.at = self._find("\n", self.at)
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif begins and self._assigns():
                continue
            else:
                words = self._word()
                begins = begins and bool(words) and words[0] in _KEYWORDS
                self.script.words += words

    def _assigns(self) -> bool:
        """Read an assignment and keep it; False where none begins here."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        value = self._array() if self.text[self.at : self.at + 1] == "(" else [" ".join(self._word(split=False))]
        before = self.script.variables.get(match[1], [])
        if match[2] and self.text[match.end() : match.end() + 1] == "(":
            value = [*before, *value]
        elif match[2]:
            value = [" ".join(before) + value[0]]
        self.script.variables[match[1]] = value
        return True

    def _array(self) -> list[str]:
        """The words in the parentheses that begin here."""
        self.at += 1
        words: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                break
            if char == "#":
                self.at = self._find("\n", self.at)
            elif char in " \t\r\n":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            else:
                words += self._word(inside="(")
        return words

    def _word(self, split: bool = True, inside: str = "") -> list[str]:
        """One word, or several where an unquoted variable holds several."""
        fields, current, quoted = list[str](), "", False
        breaks = ")" if inside else _BREAKS
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r\n" or char in breaks:
                break
            if char == "'":
                end = self._find("'", self.at + 1)
                current, quoted, self.at = current + self.text[self.at + 1 : end], True, end + 1
            elif char == '"':
                parts = self._double()
                current, quoted = current + parts[0], True
                if len(parts) > 1:
                    fields += [current, *parts[1:-1]]
                    current = parts[-1]
            elif char == "\\":
                current, self.at = current + self.text[self.at + 1 : self.at + 2].replace("\n", ""), self.at + 2
            elif char in "$`":
                values = self._expansion()
                pieces = " ".join(values).split() if split else [" ".join(values)]
                if len(pieces) > 1:
                    fields += [current + pieces[0], *pieces[1:-1]]
                    current = pieces[-1]
                else:
                    current += "".join(pieces)
            else:
                current, self.at = current + char, self.at + 1
        return [*fields, *([current] if current or quoted else [])]

    def _double(self) -> list[str]:
        """A double-quoted text; `"${A[@]}"` inside makes several."""
        self.at += 1
        fields, current = list[str](), ""
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                current, self.at = current + self.text[self.at + 1 : self.at + 2].replace("\n", ""), self.at + 2
            elif char in "$`":
                parameter = self.text[self.at : self.at + 80].split("}", 1)[0]
                values = self._expansion()
                if "[@]" in parameter and len(values) > 1:
                    fields += [current + values[0], *values[1:-1]]
                    current = values[-1]
                else:
                    current += " ".join(values)
            else:
                current, self.at = current + char, self.at + 1
        self.at += 1
        return [*fields, current]

    def _expansion(self) -> list[str]:
        """The words that a `$…` or a `` `…` `` stands for."""
        rest = self.text[self.at : self.at + 3]
        if rest.startswith("`"):
            self.at = self._find("`", self.at + 1) + 1
            return []
        if rest.startswith("$(("):
            end = self._closing("(", ")", self.at + 1)
            inner, self.at = self.text[self.at + 3 : end - 1], end + 1
            return [self._arithmetic(inner)]
        if rest.startswith("$("):
            self.at = self._closing("(", ")", self.at + 1) + 1
            return []
        if rest.startswith("${"):
            end = self._closing("{", "}", self.at + 1)
            inner, self.at = self.text[self.at + 2 : end], end + 1
            return self._parameter(inner)
        match = re.compile(r"[A-Za-z_]\w*|[0-9@*#?]").match(self.text, self.at + 1)
        if match is None:
            self.at += 1
            return ["$"]
        self.at = match.end()
        return self.script.variables.get(match[0], [])

    def _parameter(self, inner: str) -> list[str]:
        """The words that `${inner}` stands for."""
        match = _PARAMETER.match(inner)
        if match is None:
            return []
        values = self.script.variables.get(match[2], [])
        if match[4] in ("-", "=") and not any(values):
            return _Reader(match[5], self.script)._all_words()
        if match[4] == "+":
            return _Reader(match[5], self.script)._all_words() if any(values) else []
        return values

    def _all_words(self) -> list[str]:
        """All words that are left, whatever commands they belong to."""
        words: list[str] = []
        while self.at < len(self.text):
            if self.text[self.at] in _BREAKS + " \t\r":
                self.at += 1
            else:
                words += self._word()
        return words

    def _arithmetic(self, text: str) -> str:
        """The value of `$((text))`; nothing where it is no integer arithmetic."""
        expanded = " ".join(_Reader(text.replace("(", " ( ").replace(")", " ) "), self.script)._words_of_arithmetic())
        names = _NAME.sub(lambda m: " ".join(self.script.variables.get(m[0], ["0"])) or "0", expanded)
        try:
            return str(_evaluate(ast.parse(names, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return ""

    def _words_of_arithmetic(self) -> list[str]:
        """All words that are left, operators and parentheses among them."""
        words: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "()":
                words.append(char)
                self.at += 1
            elif char in " \t\r\n":
                self.at += 1
            else:
                before = self.at
                words += self._word()
                self.at += before == self.at
        return words

    def _find(self, mark: str, start: int) -> int:
        """The index at which `mark` is next, or the end of the text."""
        index = self.text.find(mark, start)
        return len(self.text) if index < 0 else index

    def _closing(self, opening: str, closing: str, start: int) -> int:
        """The index at which the bracket at `start` closes, or the end of the text."""
        depth = 0
        for index in range(start, len(self.text)):
            depth += (self.text[index] == opening) - (self.text[index] == closing)
            if not depth:
                return index
        return len(self.text)


def _evaluate(node: ast.expr) -> int:
    """The value of an integer expression; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(ast.dump(node))
