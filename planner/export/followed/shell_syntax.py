"""The grammar of bash scripts, as far as launch scripts use it: a text becomes a tree of statements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import SpecError
from planner.specs.reading import SHELL

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


Connector = Literal["", "&&", "||", "|"]
_SEPARATORS = (";", "\n", "&", ";;")
_REDIRECTIONS = ("&>", ">>", "<<<", ">&", "<&", ">|", "<", ">")
_MAX_DEPTH = SHELL.depth


@dataclass(slots=True)
class Simple:
    """A command: its words as they are written, with quotes and variables, and what is fed to it."""

    words: list[str] = field(default_factory=list)
    here: str | None = None
    """The document or string that it reads."""
    here_is_literal: bool = False
    output: str | None = None
    """The file that it writes, as it is written."""


@dataclass(slots=True)
class ShellBlock:
    """Statements, each with what joins it to the one before."""

    statements: list[tuple[Connector, Statement]] = field(default_factory=list)


@dataclass(slots=True)
class IfStatement:
    branches: list[tuple[ShellBlock, ShellBlock]]
    otherwise: ShellBlock


@dataclass(slots=True)
class ForStatement:
    name: str
    """The variable; empty for a loop that counts."""
    words: list[str]
    """Its values; of `for ((a; b; c))` the three expressions."""
    body: ShellBlock


@dataclass(slots=True)
class WhileStatement:
    condition: ShellBlock
    body: ShellBlock
    until: bool


@dataclass(slots=True)
class CaseStatement:
    word: str
    branches: list[tuple[list[str], ShellBlock]]


@dataclass(slots=True)
class ShellFunction:
    name: str
    body: ShellBlock


Statement = Simple | ShellBlock | IfStatement | ForStatement | WhileStatement | CaseStatement | ShellFunction


def parse_shell(text: str) -> ShellBlock:
    """The statements of a script; what never ends, ends with the text. SpecError for blocks nested too deeply."""
    return _Parser(tokens_of(text)).block(())


class _Parser:
    """A recursive descent over tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def block(self, ends: tuple[str, ...]) -> ShellBlock:
        """Statements up to a word of `ends`, which is taken, or the end of the text."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise SpecError(f"the script nests more than {_MAX_DEPTH} blocks", "give a simpler launch script")
        block, connector = ShellBlock(), ""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.text in ends:
                break
            self.at += 1
            if token.is_operator and token.text in ("&&", "||", "|", "|&"):
                connector = "|" if token.text == "|&" else token.text
            elif token.is_operator and token.text in (*_SEPARATORS, ")"):
                connector = "" if token.text != "\n" or not connector else connector
            else:
                block.statements.append((connector, self._statement(token)))  # type: ignore[arg-type]
                connector = ""
        self.depth -= 1
        return block

    def _until(self, *ends: str) -> tuple[ShellBlock, str]:
        """A block and the word that ended it."""
        block = self.block(ends)
        end = self.tokens[self.at].text if self.at < len(self.tokens) else ""
        self.at += 1
        return block, end

    def _statement(self, token: Token) -> Statement:
        if token.is_operator:
            if token.text == "(":
                if self._next("("):
                    return self._arithmetic()
                return self._until(")")[0]
            return self._simple([], token)
        match token.text:
            case "{":
                return self._until("}")[0]
            case "if":
                return self._if()
            case "for":
                return self._for()
            case "while" | "until":
                condition, _ = self._until("do")
                return WhileStatement(condition, self._until("done")[0], token.text == "until")
            case "case":
                return self._case()
            case "function":
                name = self._word()
                self._skip("(", ")", "\n")
                return ShellFunction(name, self._body())
        if self._next("(") and self._next(")", 1) and re.fullmatch(r"[\w.:-]+", token.text):
            self.at += 2
            self._skip("\n")
            return ShellFunction(token.text, self._body())
        return self._simple([token.text], None)

    def _body(self) -> ShellBlock:
        """The body of a function."""
        if self.at >= len(self.tokens):
            return ShellBlock()
        self.at += 1
        statement = self._statement(self.tokens[self.at - 1])
        return statement if isinstance(statement, ShellBlock) else ShellBlock([("", statement)])

    def _arithmetic(self) -> Simple:
        """`(( … ))` as a command of its own."""
        words, depth = ["(("], 0
        self.at += 1
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            depth += (token.text == "(") - (token.text == ")")
            if depth < 0:
                self._skip(")")
                break
            words.append(token.text)
        return Simple(words)

    def _if(self) -> IfStatement:
        branches: list[tuple[ShellBlock, ShellBlock]] = []
        while True:
            condition, _ = self._until("then")
            body, end = self._until("elif", "else", "fi")
            branches.append((condition, body))
            if end != "elif":
                return IfStatement(branches, self._until("fi")[0] if end == "else" else ShellBlock())

    def _for(self) -> ForStatement:
        name = self._word()
        words: list[str] = []
        if name == "(" and self._next("("):
            words, name = self._arithmetic().words[1:], ""
        self._skip("\n")
        if self._next("in"):
            self.at += 1
            while self.at < len(self.tokens) and not self.tokens[self.at].is_operator:
                words.append(self._word())
        while self.at < len(self.tokens) and self.tokens[self.at].text != "do":
            self.at += 1
        self.at += 1
        return ForStatement(name, words, self._until("done")[0])

    def _case(self) -> CaseStatement:
        word, branches = self._word(), list[tuple[list[str], ShellBlock]]()
        self._skip("\n")
        self._skip("in")
        while self.at < len(self.tokens):
            self._skip("\n", "(", ";;", ";")
            if self._next("esac"):
                self.at += 1
                break
            patterns: list[str] = []
            while self.at < len(self.tokens) and not self._next(")"):
                patterns += [] if self.tokens[self.at].text == "|" else [self.tokens[self.at].text]
                self.at += 1
            self.at += 1
            branches.append((patterns, self.block((";;", "esac"))))
        return CaseStatement(word, branches)

    def _simple(self, words: list[str], first: Token | None) -> Simple:
        """A command's words up to a separator, with its redirections."""
        command = Simple(words)
        if first is not None:
            self.at -= 1
        in_test = words == ["[["]
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.is_operator and in_test and token.text in ("&&", "||", "(", ")", "<", ">", "\n"):
                command.words += [token.text] if token.text != "\n" else []
            elif token.is_operator and token.text in ("<<", "<<-"):
                command.here, command.here_is_literal = token.here, not token.here
                self.at += 1
                delimiter = self.tokens[self.at].text if self.at < len(self.tokens) else ""
                command.here_is_literal = bool(re.search(r"['\"\\]", delimiter))
            elif token.is_operator and token.text in _REDIRECTIONS:
                self.at += 1
                target = self.tokens[self.at].text if self.at < len(self.tokens) else ""
                if token.text == "<<<":
                    command.here = target
                elif token.text in (">", ">>", ">|", "&>"):
                    command.output = target
                if command.words and re.fullmatch(r"\d", command.words[-1]) and token.text in (">", ">&", ">>"):
                    command.words.pop()
            elif token.is_operator:
                break
            else:
                command.words.append(token.text)
                in_test = in_test and token.text != "]]"
            self.at += 1
        return command

    def _word(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1].text if self.at <= len(self.tokens) else ""

    def _next(self, text: str, ahead: int = 0) -> bool:
        return self.at + ahead < len(self.tokens) and self.tokens[self.at + ahead].text == text

    def _skip(self, *texts: str) -> None:
        while self.at < len(self.tokens) and self.tokens[self.at].text in texts:
            self.at += 1
