"""Tokens of bash scripts: words as they are written, operators, and the documents that commands read."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPERATORS = (
    "&&",
    "||",
    ";;",
    "&>",
    ">>",
    "<<<",
    "<<-",
    "<<",
    ">&",
    "<&",
    ">|",
    "|&",
    ";",
    "|",
    "&",
    "(",
    ")",
    "<",
    ">",
    "\n",
)
_FIRST = frozenset(operator[0] for operator in _OPERATORS)


@dataclass(slots=True)
class Token:
    text: str
    is_operator: bool = False
    here: str | None = None


def tokens_of(text: str) -> list[Token]:
    """Words as they are written and operators; the documents that commands read go with their operators."""
    tokens: list[Token] = []
    waiting: list[int] = []
    """Places of the `<<` whose documents begin on the next line."""
    at = 0
    while at < len(text):
        char = text[at]
        if char in " \t\r":
            at += 1
        elif text.startswith("\\\n", at) or text.startswith("\\\r\n", at):
            at = text.index("\n", at) + 1
        elif char == "#":
            at = _find(text, "\n", at)
        elif (operator := _operator(text, at)) is not None:
            tokens.append(Token(operator, is_operator=True))
            at += len(operator)
            if operator in ("<<", "<<-"):
                waiting.append(len(tokens) - 1)
            elif operator == "\n" and waiting:
                at = _documents(text, at, tokens, waiting)
                waiting = []
        else:
            end = _word_end(text, at)
            tokens.append(Token(text[at:end]))
            at = end
    return tokens


def _operator(text: str, at: int) -> str | None:
    if text[at] not in _FIRST:
        return None
    return next((operator for operator in _OPERATORS if text.startswith(operator, at)), None)


def _documents(text: str, at: int, tokens: list[Token], waiting: list[int]) -> int:
    """Give each waiting `<<` the lines up to its delimiter; the index behind them."""
    for index in waiting:
        token = tokens[index]
        delimiter = re.sub(r"['\"\\]", "", tokens[index + 1].text) if index + 1 < len(tokens) else ""
        match = re.compile(rf"^[\t ]*{re.escape(delimiter)}[ \t\r]*$", re.MULTILINE).search(text, at)
        end = match.start() if match else len(text)
        token.here = text[at:end]
        at = match.end() if match else len(text)
    return at


def _find(text: str, mark: str, start: int) -> int:
    index = text.find(mark, start)
    return len(text) if index < 0 else index


def _word_end(text: str, at: int) -> int:
    """The index behind the word that begins at `at`; quotes, expansions and an array's parentheses belong to it."""
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            at = _find(text, "'", at + 1) + 1
        elif char == '"':
            at = double_end(text, at)
        elif char == "`":
            at = _find(text, "`", at + 1) + 1
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = closing(text, at + 1) + 1
        elif char == "(" and re.search(r"(^|[\s;&|(])[A-Za-z_]\w*\+?=$", text[max(0, at - 80) : at]):
            at = closing(text, at) + 1
        elif char in " \t\r\n;&|()<>":
            break
        else:
            at += 1
    return min(at, len(text))


def double_end(text: str, at: int) -> int:
    """The index behind the double-quoted text that begins at `at`."""
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = closing(text, at + 1) + 1
        else:
            at += 1
    return at + 1


def closing(text: str, start: int) -> int:
    """The index at which the bracket at `start` closes, or the end of the text; quoted brackets do not count."""
    opening, ending = text[start], {"(": ")", "{": "}"}[text[start]]
    depth, at = 0, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opening == "(":
            at = _find(text, "'", at + 1)
        elif char == '"':
            at = double_end(text, at) - 1
        elif char == "#" and opening == "(" and text[at - 1] in " \t\n" and not text.startswith("((", start):
            at = _find(text, "\n", at) - 1
        else:
            depth += (char == opening) - (char == ending)
            if not depth:
                return at
        at += 1
    return len(text)
