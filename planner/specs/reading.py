"""The one home of reading what users' files hold: bytes, nesting, values and digits have limits, and nothing is run.

Text, JSON, YAML, TOML, CSV and Python give plain data and nothing else. Every parse ends because what it is given ends:
no clock and no signal is needed. The limits are such that the worst file that we know within them takes less than two
seconds and 300 MB on one core, those that the planner wrote itself less than five and 500 MB (`tools/worst_files`,
docs/reliability.md). In YAML every alias is counted as often as it is repeated.
"""

from __future__ import annotations

import ast
import codecs
import csv
import io
import json
import os
import re
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from planner.errors import SpecError, shortened
from planner.record import record


@record
class InputLimits:
    """The most that is read of one text."""

    num_bytes: int
    """Bytes of a file, characters of a text that was read before."""
    num_items: int
    """Keys and values, those that an alias repeats counted each time; of Python: words and signs."""
    depth: int
    """Mappings and lists inside each other."""


MAX_DIGITS = 308
"""Digits of a whole number: one of more digits is no float either."""
YAML = InputLimits(2**20, 50_000, 100)
"""A spec is a page of text; the longest that ships has 6 kB and 250 values."""
JSON = InputLimits(2**20, 2**20, 100)
CHECKPOINT = InputLimits(2**23, 2**20, 100)
"""A checkpoint's config.json: that of a quantized one may list every module, 3 MB in MiniMax-M3's."""
SAVED = InputLimits(2**28, 2**23, 100)
"""JSON that the planner wrote itself: probes and observations, with a number for each of a million steps."""
DUMP = InputLimits(300 * 10**6, 2**24, 100)
"""A flight recorder's dump as JSON; torch's pickles of it have the limits of `planner/observe/traces/source.py`."""
TOML = InputLimits(2**20, 20_000, 100)
PYTHON = InputLimits(2**20, 100_000, 100)
"""A recipe and the files that it imports, all together."""
SHELL = InputLimits(2**18, 4_000_000, 40)
"""A launch script; its values are the characters that its words and variables make, its depth that of blocks."""
EXPRESSION = InputLimits(40_000, 40_000, 100)
"""One expression in Python's spelling: a list of layers, a value of an option."""
CSV = InputLimits(2**24, 2**20, 1)
CONFIGURATION = InputLimits(2**20, 100_000, 100)
"""A file of any language that is imported; that of its language holds too."""

STDIN = "-"
MAX_BYTES = YAML.num_bytes


def label(path: str | Path) -> str:
    """A file as messages name it."""
    return "stdin" if str(path) == STDIN else printable(str(path))


def printable(text: str, limit: int = 200) -> str:
    """`text` as it is where it is short and of printable characters, else shortened or escaped."""
    short = shortened(text, limit)
    return short if short.isprintable() else repr(short)


def kind_of(value: object) -> str:
    """The type of `value` in a user's words."""
    names = {type(None): "nothing", bool: "true or false", int: "an integer", float: "a number", str: "text",
             list: "a list", tuple: "a list", dict: "a mapping"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def whole_number(digits: str) -> int | float:
    """The number that JSON writes so; one of more digits than any count has is a float, on which no sum breaks.

    Raises ValueError for one that no float has.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits) if len(digits) < 20 else float(digits)


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a small file; SpecError when it is missing, a directory, locked, huge or binary."""
    refused = refusing(label(path), "name a YAML or JSON file")
    data = _of_text(path, max_bytes, refused)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(f"is not UTF-8 text (byte {error.start})") from None


def _of_text(path: str | Path, max_bytes: int, refused: Callable[[str], SpecError]) -> bytes:
    """The bytes of a file that may be a text of so many bytes."""
    data = _read(path, max_bytes)
    if len(data) > max_bytes:
        raise refused(f"is larger than {max_bytes:,} bytes, too large for a spec")
    if b"\0" in data:
        raise refused("is a binary file")
    return data


def read_configuration_text(path: str | Path) -> str:
    """The text of a trainer's configuration; characters that are no UTF-8 are replaced."""
    refused = refusing(f"{label(path)}: is no configuration", "give a script, YAML, Python, TOML or JSON file")
    return _of_text(path, CONFIGURATION.num_bytes, refused).decode("utf-8-sig", errors="replace")


def text_beside(path: Path) -> str | None:
    """The text of a file that a configuration names; None where there is none, or none that could be one."""
    try:
        if not path.is_file() or path.stat().st_size > CONFIGURATION.num_bytes:
            return None
        return _as_utf8(path.read_bytes()).decode("utf-8-sig", errors="replace")
    except (OSError, ValueError):  # the latter of a NUL in the name
        return None


def refusing(what: str, hint: str) -> Callable[[str], SpecError]:
    """The error of a problem in a text, which begins with `what`."""
    return lambda problem: SpecError(f"{what}: {problem}".removeprefix(": "), hint)


def refuse_longer(text: str, max_characters: int, refused: Callable[[str], SpecError]) -> None:
    """Raise for a text that is longer than a file of its kind may be."""
    if len(text) > max_characters:
        raise refused(f"{len(text):,} characters, where {max_characters:,} are the most that is read")


def refuse_signs(text: str, signs: str | re.Pattern[str], most: int, refused: Callable[[str], SpecError]) -> None:
    """Raise for a text that may have more values than `most`, by the signs that stand between values."""
    count = sum(map(text.count, signs)) if isinstance(signs, str) else sum(1 for _ in signs.finditer(text))
    if count > most:
        raise refused(f"more than {most:,} values")


def _read(path: str | Path, max_bytes: int) -> bytes:
    """At most max_bytes + 1 bytes of a file, or of stdin."""
    where = label(path)
    try:
        return _as_utf8(sys.stdin.buffer.read(max_bytes + 1) if str(path) == STDIN else _read_bytes(path, max_bytes))
    except FileNotFoundError:
        raise SpecError(f"{where}: no such file", "check the path") from None
    except IsADirectoryError:
        raise SpecError(f"{where}: is a directory", "name a file in it") from None
    except PermissionError:
        raise SpecError(f"{where}: no permission to read it", "make it readable for this user") from None
    except (OSError, ValueError) as error:  # name too long, loop of links, a NUL in the name …
        raise SpecError(
            f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}", "check the path"
        ) from None


def _as_utf8(data: bytes) -> bytes:
    """The data; those of a text in UTF-16, as PowerShell's `>` writes it, in UTF-8."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16", errors="replace").encode() if is_utf16 else data


def _read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """At most max_bytes + 1 bytes; a file known to be larger is not read at all."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return b"\n" * (max_bytes + 1) if size > max_bytes else file.read(max_bytes + 1)


class NotJsonError(Exception):
    """A text breaks JSON's grammar, so that it may be of another language: what is wrong, and where."""

    def __init__(self, problem: str, line: int, column: int) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column = problem, line, column


def parse_json(
    text: str | bytes, where: str, hint: str = "", limits: InputLimits = JSON, *, keeps_last: bool = False
) -> Any:
    """The value that a text holds. Raises SpecError, which names `where`, for anything else and beyond the limits.

    Two equal keys in one object are refused, unless `keeps_last` says that the last one counts.
    """
    try:
        return json_value(text, where, hint, limits, keeps_last)
    except NotJsonError as error:
        message = f"{where}: line {error.line}: not JSON: {error.problem}".removeprefix(": ")
        raise SpecError(message, hint or f"mend line {error.line}, column {error.column}") from None


def json_value(text: str | bytes, where: str, hint: str, limits: InputLimits = JSON, keeps_last: bool = False) -> Any:
    """The value that a text holds, as `parse_json`; raises NotJsonError where the text is none of JSON's."""
    refused = refusing(f"{where}: not JSON", hint or "give a smaller file")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        refuse_longer(text, limits.num_bytes, refused)
        refuse_signs(text, ",[{", limits.num_items, refused)
        hook = None if keeps_last else lambda pairs: _unique(pairs, where)
        data = json.loads(text, object_pairs_hook=hook, parse_int=whole_number)
    except json.JSONDecodeError as error:
        raise NotJsonError(error.msg, error.lineno, error.colno) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, bytes that are no UTF-8
        raise refused(printable(str(error))) from None
    if text.count("[") + text.count("{") > limits.depth:
        refuse_depth(data, limits.depth, refused)
    return data


def refuse_depth(data: Any, most: int, refused: Callable[[str], SpecError]) -> None:
    """Raise for data whose mappings and lists lie deeper inside each other than `most`."""
    level = _holders([data])
    for _ in range(most):
        level = [inner for value in level for inner in _holders(value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise refused(f"nested more than {most:,} deep")


def _holders(values: Iterable[Any]) -> list[dict[Any, Any] | list[Any]]:
    return [value for value in values if isinstance(value, (dict, list))]


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise SpecError(f"{where}: {printable(twice, 60)}: given twice".removeprefix(": "), "keep one of them")
    return result


try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML built without libyaml: the same language, ten times slower
    from yaml import SafeLoader  # type: ignore[assignment]

_MAX_TAGS = 16
"""Directives that name tags: libyaml compares each with all before it."""
_TELLING = re.compile(rf"[*!]|\S{{{MAX_DIGITS}}}")
"""An alias, a tag or a long word: without one there is nothing to count."""
_TOO_DEEP = "exceeded maximum nesting depth"
"""The problem of a thousand brackets to libyaml 0.2.6 (PyYAML 6.0.4), which reads all before the first event."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(SafeLoader):
    """YAML 1.1 as PyYAML has it, except that `1e9` is a number, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str, hint: str = "", limits: InputLimits = YAML, *, keeps_last: bool = False) -> Any:
    """The value that a text holds. Raises SpecError, which names `where`, for anything else and beyond the limits.

    Two equal keys in one mapping are refused with their lines, unless `keeps_last` says that the last one counts.
    """

    def refused(problem: str, line: int | None = None) -> SpecError:
        place = "" if line is None else f"line {line}: "
        fallback = "name a YAML or JSON file" if line is None else "mend that line"
        return SpecError(f"{where}: {place}not YAML: {problem}".removeprefix(": "), hint or fallback)

    refuse_longer(text, limits.num_bytes, refused)
    if text.count("%TAG") > _MAX_TAGS:
        raise refused(f"more than {_MAX_TAGS} %TAG lines")
    loader = _Loader(text)
    try:
        if _may_exceed(text, limits):
            _refuse_events(text, limits, refused)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_nodes(node, text, limits, refused)
        if not keeps_last:
            _refuse_duplicates(node, where)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        if error.problem == _TOO_DEEP:
            raise refused(f"nested more than {limits.depth:,} deep") from None
        mark = error.problem_mark or error.context_mark
        raise refused(printable(str(error.problem or error.context)), mark.line + 1 if mark else None) from None
    # what PyYAML's constructors let through for tagged or impossible scalars (2024-13-45, !!bool x, 5,000 digits)
    except (
        yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, IndexError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise refused(printable(str(error).partition("\n")[0])) from None
    finally:
        loader.dispose()


def _may_exceed(text: str, limits: InputLimits) -> bool:
    """False for a text of too few characters and brackets, dashes and blanks to go beyond the limits."""
    openings = sum(map(text.count, ("[", "{", "- ", "-\n", "-\t", "-\r", "? ", "?\n", "?\t", "?\r")))
    return len(text) > limits.num_items or openings > limits.depth or "\n" + " " * limits.depth in text


def _refuse_events(text: str, limits: InputLimits, refused: Callable[[str], SpecError]) -> None:
    """Raise for more values, or values nested deeper, than the limits say, as soon as they show."""
    depth = num_items = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        num_items += isinstance(event, yaml.NodeEvent)
        if depth > limits.depth:
            raise refused(f"nested more than {limits.depth:,} deep")
        if num_items > limits.num_items:
            raise refused(f"more than {limits.num_items:,} values")


def _refuse_nodes(root: Node, text: str, limits: InputLimits, refused: Callable[..., SpecError]) -> None:
    """Raise for aliases that make too many values, or a value inside itself, and for numbers of too many digits."""
    if not _TELLING.search(text):
        return
    num_items: dict[int, int] = {}
    todo = [(root, False)]
    while todo:
        node, is_after = todo.pop()
        if is_after:
            num_items[id(node)] = size = 1 + sum(num_items[id(inner)] for inner in _inside(node))
            if size > limits.num_items:
                raise refused(f"its aliases make more than {limits.num_items:,} values")
        elif id(node) not in num_items:
            num_items[id(node)] = 0  # until all inside it is counted
            todo += [(node, True), *((inner, False) for inner in _inside(node))]
        elif not num_items[id(node)]:
            raise refused("a value holds itself", node.start_mark.line + 1)
        if isinstance(node, ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise refused(f"a number of {len(node.value):,} digits", node.start_mark.line + 1)


def _inside(node: Node) -> list[Node]:
    if isinstance(node, SequenceNode):
        return list(node.value)
    return [inner for pair in node.value for inner in pair] if isinstance(node, MappingNode) else []


def _refuse_duplicates(root: Node, where: str) -> None:
    """YAML keeps the last of two equal keys; here they are an error, with the line."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        todo += _inside(node)
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, MappingNode) else ():
            if not isinstance(key, ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                name, first = printable(key.value, 60), lines[key.value]
                problem = f"line {line}: {name}: given twice, first on line {first}"
                raise SpecError(f"{where}: {problem}".removeprefix(": "), "keep one of them")
            lines[key.value] = line


@cache
def shipped_table(name: str) -> dict[str, Any]:
    """A YAML of the package, by its path below planner/, read once and without the checks of a user's."""
    text = (Path(__file__).resolve().parents[1] / name).read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, Loader=SafeLoader)
    return table


def load_yaml(path: str | Path, limits: InputLimits = JSON) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; `-` is stdin. Raises SpecError for whatever is not one."""
    return parse_mapping(read_text(path, limits.num_bytes), label(path), limits)


def read_saved(path: str | Path) -> tuple[dict[str, Any], str]:
    """The mapping in a file that a command saved, and the file as messages name it."""
    return load_yaml(path, SAVED), label(path)


def parse_mapping(text: str, where: str, limits: InputLimits = JSON) -> dict[str, Any]:
    """The mapping that `text` holds, as JSON where it looks like it and else as YAML; the limits are those of JSON."""
    if where.endswith(".json") and text.strip():
        data = parse_json(text, where, limits=limits)
    elif text.lstrip().startswith("{"):
        try:
            data = json_value(text, where, "", limits)
        except NotJsonError:  # a YAML flow mapping also starts with a brace
            data = parse_yaml(text, where)
    else:
        data = parse_yaml(text, where)
    if data is None:
        raise SpecError(f"{where}: is empty", "write `key: value` lines")
    if not isinstance(data, dict):
        raise SpecError(f"{where}: holds {kind_of(data)}, not a mapping", "write `key: value` lines")
    return data


def parse_rows(text: str, problem: str, hint: str) -> Iterator[list[str]]:
    """Rows of cells. Raises SpecError, which begins with `problem`, for what is no CSV and beyond the limits of one."""
    refused = refusing(problem, hint)
    refuse_longer(text, CSV.num_bytes, refused)
    refuse_signs(text, ",\n", CSV.num_items, refused)
    try:
        yield from csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise refused(printable(str(error))) from None


def row_of(line: str, delimiter: str) -> list[str]:
    """The cells of one line; none where it is no row."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


_MAX_DOTS = 50
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{_MAX_DOTS}}}")
"""A key of so many parts: tomllib keeps every beginning of it, and thousands of parts fill gigabytes."""


def parse_toml(text: str, where: str, hint: str) -> dict[str, Any]:
    """The tables of a text. Raises SpecError, which names `where`, for anything else and beyond the limits of one."""
    refused = refusing(f"{where}: not TOML", hint)
    refuse_longer(text, TOML.num_bytes, refused)
    refuse_signs(text, ",=[{.", TOML.num_items, refused)
    if _DOTTED.search(text):
        raise refused(f"a key of more than {_MAX_DOTS} parts")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise refused(f"nested more than {TOML.depth:,} deep") from None
    except ValueError as error:  # a TOMLDecodeError is one, and an integer of thousands of digits is another
        raise refused(printable(str(error))) from None
    refuse_depth(data, TOML.depth, refused)
    return data


_SIGN = re.compile(r"\w+|[^\w\s]")
_FAILURES = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""Failures of `ast`: a NUL, nesting, an integer of thousands of digits, a key that cannot be hashed."""


def num_signs(text: str) -> int:
    """Words and signs of a text: there are no more nodes in its tree than about twice as many."""
    return sum(1 for _ in _SIGN.finditer(text))


def parse_python(text: str, where: str, hint: str) -> ast.Module:
    """The tree of a file. Raises SpecError, which names `where`, for anything else and beyond the limits of one."""
    refused = refusing(f"{where}: not Python", hint)
    refuse_longer(text, PYTHON.num_bytes, refused)
    if num_signs(text) > PYTHON.num_items:
        raise refused(f"more than {PYTHON.num_items:,} words and signs")
    try:
        tree: ast.Module = _quiet(text, "exec")
        return tree
    except SyntaxError as error:
        raise refused(f"line {error.lineno}: {printable(error.msg)}") from None
    except _FAILURES:
        raise refused("nested too deeply, or with characters that no text has") from None


def parse_expression(text: str, limits: InputLimits = EXPRESSION) -> ast.expr:
    """The tree of one expression. Raises ValueError for anything else and beyond the limits."""
    if len(text) > limits.num_bytes:
        raise ValueError(f"{len(text):,} characters")
    try:
        tree: ast.expr = _quiet(text.strip(), "eval").body
    except _FAILURES as error:
        raise ValueError(f"no expression: {error}") from None
    return tree


def literal(text: str | ast.expr) -> Any:
    """The value of a literal such as `[1, None]`, as text or as a tree. Raises ValueError for anything else."""
    tree = parse_expression(text) if isinstance(text, str) else text
    try:
        return ast.literal_eval(tree)
    except _FAILURES as error:
        raise ValueError(f"no literal: {error}") from None


def _quiet(text: str, mode: str) -> Any:
    with warnings.catch_warnings():  # of `"\d"` and `1if x`, which are the file's own affair
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)
