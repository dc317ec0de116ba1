"""The grammar of bash scripts, as far as launch scripts use it: a text becomes a tree of statements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import SpecError
from planner.specs.reading import SHELL

_BLANK = re.compile(r"[ \t\r]+|\\\r?\n|#[^\n]*|(?<!&)\d(?=[<>])")
"""Blanks between words, and the number of a stream, which stands at its arrow: `8 > log` has a word before it."""
_OPERATOR = re.compile(r"&&|\|\||;;|&>|>>|<<<|<<-|<<|>&|<&|>\||\|&|[;|&()<>\n]")
_ARRAY = re.compile(r"(^|[\s;&|(])[A-Za-z_]\w*\+?=$")
_ENDS = " \t\r\n;&|()<>"


@dataclass(slots=True)
class Token:
    text: str
    is_operator: bool = False
    here: str | None = None


def tokens_of(text: str) -> list[Token]:
    """Words as they are written and operators; the documents that commands read go with their operators."""
    tokens, waiting, at = list[Token](), list[int](), 0
    while at < len(text):
        if blank := _BLANK.match(text, at):
            at = blank.end()
        elif operator := _OPERATOR.match(text, at):
            tokens.append(Token(operator[0], is_operator=True))
            at = operator.end()
            if operator[0] in ("<<", "<<-"):
                # its document begins on the next line
                waiting.append(len(tokens) - 1)
            elif operator[0] == "\n":
                at, waiting = _documents(text, at, tokens, waiting), []
        else:
            start, at = at, _word_end(text, at)
            tokens.append(Token(text[start:at]))
    return tokens


def _documents(text: str, at: int, tokens: list[Token], waiting: list[int]) -> int:
    """Give each waiting `<<` the lines up to its delimiter; the index behind them."""
    for index in waiting:
        delimiter = re.sub(r"['\"\\]", "", tokens[index + 1].text) if index + 1 < len(tokens) else ""
        match = re.compile(rf"^[\t ]*{re.escape(delimiter)}[ \t\r]*$", re.MULTILINE).search(text, at)
        start, end, at = at, *(match.span() if match else (len(text), len(text)))
        tokens[index].here = text[start:end]
    return at


def found(text: str, mark: str, start: int) -> int:
    """The index of a mark from `start` on, or the end of the text."""
    index = text.find(mark, start)
    return len(text) if index < 0 else index


def _behind(text: str, at: int, quotes: str = "'\"`") -> int:
    """The index behind what begins at `at`: a quoted text, an expansion, an escaped sign, or one sign."""
    char = text[at]
    if char == "$" and text[at + 1 : at + 2] in ("(", "{"):
        return closing(text, at + 1) + 1
    if char not in quotes:
        return at + 1 + (char == "\\")
    return double_end(text, at) if char == '"' else found(text, char, at + 1) + 1


def _word_end(text: str, at: int) -> int:
    """The index behind the word that begins at `at`; quotes, expansions and an array's parentheses belong to it."""
    while at < len(text):
        if text[at] == "(" and _ARRAY.search(text[max(0, at - 80) : at]):
            at = closing(text, at) + 1
        elif text[at] in _ENDS:
            break
        else:
            at = _behind(text, at)
    return min(at, len(text))


def double_end(text: str, at: int) -> int:
    """The index behind the double-quoted text that begins at `at`."""
    at += 1
    while at < len(text) and text[at] != '"':
        at = _behind(text, at, "")
    return at + 1


def closing(text: str, start: int) -> int:
    """The index at which the bracket at `start` closes, or the end of the text; quoted brackets do not count."""
    opening, depth, at = text[start], 0, start
    in_command = opening == "("
    while at < len(text):
        char = text[at]
        if char in ("\\", '"') or (char == "'" and in_command):
            at = _behind(text, at)
        elif char == "#" and in_command and text[at - 1] in " \t\n" and not text.startswith("((", start):
            at = found(text, "\n", at)
        else:
            depth += (char == opening) - (char == (")" if in_command else "}"))
            if not depth:
                return at
            at += 1
    return len(text)


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

    statements: list[tuple[str, Statement]] = field(default_factory=list)


@dataclass(slots=True)
class Compound:
    """A condition, a loop, a choice or a function."""

    kind: Literal["if", "for", "count", "while", "until", "case", "function"]
    words: list[str]
    """The variable and the values of a loop, or the three expressions of one that counts; the word that is chosen by;
    the function's name."""
    bodies: list[ShellBlock]
    """The last one of a condition is what follows where none holds."""
    conditions: list[ShellBlock] = field(default_factory=list)
    patterns: list[list[str]] = field(default_factory=list)
    """Those of each body of a choice."""


Statement = Simple | ShellBlock | Compound


def parse_shell(text: str) -> ShellBlock:
    """The statements of a script; what never ends, ends with the text. SpecError for blocks nested too deeply."""
    return _Parser(tokens_of(text)).block()


_END = Token("", is_operator=True)


class _Parser:
    """A recursive descent over tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def block(self, *ends: str) -> ShellBlock:
        """Statements up to a word of `ends`, or the end of the text."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise SpecError(f"the script nests more than {_MAX_DEPTH} blocks", "give a simpler launch script")
        block, connector = ShellBlock(), ""
        while (token := self._peek()) is not _END and token.text not in ends:
            self.at += 1
            if token.is_operator and token.text in ("&&", "||", "|", "|&"):
                connector = token.text
            elif token.is_operator and token.text in (*_SEPARATORS, ")"):
                connector = connector if token.text == "\n" else ""
            else:
                block.statements.append((connector, self._statement(token)))
                connector = ""
        self.depth -= 1
        return block

    def _until(self, *ends: str) -> tuple[ShellBlock, str]:
        """A block and the word that ended it."""
        return self.block(*ends), self._word()

    def _statement(self, token: Token) -> Statement:
        if token.is_operator:
            if token.text != "(":
                self.at -= 1
                return self._simple([])
            return self._arithmetic() if self._next("(") else self._until(")")[0]
        match token.text:
            case "{":
                return self._until("}")[0]
            case "if":
                return self._if()
            case "for":
                return self._for()
            case "while" | "until":
                conditions = [self._until("do")[0]]
                return Compound("until" if token.text == "until" else "while", [], [self._until("done")[0]], conditions)
            case "case":
                return self._case()
            case "function":
                return self._function(self._word(), "(", ")", "\n")
        if self._next("(") and self._next(")", 1) and re.fullmatch(r"[\w.:-]+", token.text):
            self.at += 2
            return self._function(token.text, "\n")
        return self._simple([token.text])

    def _function(self, name: str, *before: str) -> Compound:
        self._skip(*before)
        statement = self._statement(self._take())
        return Compound(
            "function", [name], [statement if isinstance(statement, ShellBlock) else ShellBlock([("", statement)])]
        )

    def _arithmetic(self) -> Simple:
        """`(( … ))` as a command of its own."""
        words, depth = ["(("], 0
        self.at += 1
        while (token := self._take()) is not _END:
            depth += (token.text == "(") - (token.text == ")")
            if depth < 0:
                self._skip(")")
                break
            words.append(token.text)
        return Simple(words)

    def _if(self) -> Compound:
        found, end = Compound("if", [], []), "elif"
        while end == "elif":
            found.conditions.append(self._until("then")[0])
            body, end = self._until("elif", "else", "fi")
            found.bodies.append(body)
        found.bodies.append(self._until("fi")[0] if end == "else" else ShellBlock())
        return found

    def _for(self) -> Compound:
        words = [self._word()]
        is_counting = words == ["("] and self._next("(")
        if is_counting:
            words = self._arithmetic().words[1:]
        self._skip("\n")
        if self._next("in"):
            self.at += 1
            while not self._peek().is_operator:
                words.append(self._word())
        while (token := self._take()) is not _END and token.text != "do":
            pass
        return Compound("count" if is_counting else "for", words, [self._until("done")[0]])

    def _case(self) -> Compound:
        found = Compound("case", [self._word()], [])
        self._skip("\n")
        self._skip("in")
        while self._peek() is not _END:
            self._skip("\n", "(", ";;", ";")
            if self._next("esac"):
                self.at += 1
                break
            patterns: list[str] = []
            while (token := self._take()) is not _END and token.text != ")":
                patterns += [] if token.text == "|" else [token.text]
            found.patterns.append(patterns)
            found.bodies.append(self.block(";;", "esac"))
        return found

    def _simple(self, words: list[str]) -> Simple:
        """A command's words up to a separator, with its redirections."""
        command, in_test = Simple(words), words == ["[["]
        while (token := self._peek()) is not _END:
            if not token.is_operator:
                command.words.append(token.text)
                in_test = in_test and token.text != "]]"
            elif in_test and token.text in ("&&", "||", "(", ")", "<", ">", "\n"):
                command.words += [token.text] if token.text != "\n" else []
            elif token.text in ("<<", "<<-", *_REDIRECTIONS):
                self.at += 1
                target = self._peek().text
                if token.text in ("<<", "<<-"):
                    command.here, command.here_is_literal = token.here, bool(re.search(r"['\"\\]", target))
                elif token.text == "<<<":
                    command.here, command.here_is_literal = target.strip("\"'"), target.startswith("'")
                elif token.text in (">", ">>", ">|", "&>"):
                    command.output = target
            else:
                break
            self.at += 1
        return command

    def _peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else _END

    def _take(self) -> Token:
        self.at += 1
        return self._peek(-1)

    def _word(self) -> str:
        return self._take().text

    def _next(self, text: str, ahead: int = 0) -> bool:
        return self._peek(ahead).text == text

    def _skip(self, *texts: str) -> None:
        while self._peek().text in texts:
            self.at += 1
