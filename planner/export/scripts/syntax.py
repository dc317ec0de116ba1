"""The grammar of bash scripts, as far as launch scripts use it: a text becomes a tree of statements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import SpecError
from planner.export.scripts.tokens import Token, tokens_of
from planner.specs.reading.limits import SHELL

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
class Block:
    """Statements, each with what joins it to the one before."""

    statements: list[tuple[Connector, Statement]] = field(default_factory=list)


@dataclass(slots=True)
class If:
    branches: list[tuple[Block, Block]]
    otherwise: Block


@dataclass(slots=True)
class For:
    name: str
    words: list[str]
    body: Block


@dataclass(slots=True)
class While:
    condition: Block
    body: Block
    until: bool


@dataclass(slots=True)
class Case:
    word: str
    branches: list[tuple[list[str], Block]]


@dataclass(slots=True)
class Function:
    name: str
    body: Block


Statement = Simple | Block | If | For | While | Case | Function


def parse_shell(text: str) -> Block:
    """The statements of a script; what never ends, ends with the text. SpecError for blocks nested too deeply."""
    return _Parser(tokens_of(text)).block(())


class _Parser:
    """A recursive descent over tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def block(self, ends: tuple[str, ...]) -> Block:
        """Statements up to a word of `ends`, which is taken, or the end of the text."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise SpecError(f"the script nests more than {_MAX_DEPTH} blocks", "give a simpler launch script")
        block, connector = Block(), ""
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

    def _until(self, *ends: str) -> tuple[Block, str]:
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
                return While(condition, self._until("done")[0], token.text == "until")
            case "case":
                return self._case()
            case "function":
                name = self._word()
                self._skip("(", ")", "\n")
                return Function(name, self._body())
        if self._next("(") and self._next(")", 1) and re.fullmatch(r"[\w.:-]+", token.text):
            self.at += 2
            self._skip("\n")
            return Function(token.text, self._body())
        return self._simple([token.text], None)

    def _body(self) -> Block:
        """The body of a function."""
        if self.at >= len(self.tokens):
            return Block()
        self.at += 1
        statement = self._statement(self.tokens[self.at - 1])
        return statement if isinstance(statement, Block) else Block([("", statement)])

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

    def _if(self) -> If:
        branches: list[tuple[Block, Block]] = []
        while True:
            condition, _ = self._until("then")
            body, end = self._until("elif", "else", "fi")
            branches.append((condition, body))
            if end != "elif":
                return If(branches, self._until("fi")[0] if end == "else" else Block())

    def _for(self) -> For:
        name = self._word()
        words: list[str] = []
        self._skip("\n")
        if self._next("in"):
            self.at += 1
            while self.at < len(self.tokens) and not self.tokens[self.at].is_operator:
                words.append(self._word())
        while self.at < len(self.tokens) and self.tokens[self.at].text != "do":
            self.at += 1
        self.at += 1
        return For(name, words, self._until("done")[0])

    def _case(self) -> Case:
        word, branches = self._word(), list[tuple[list[str], Block]]()
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
        return Case(word, branches)

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
