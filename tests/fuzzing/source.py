"""Changes the syntax tree of a Python file: names, numbers, calls, loops and functions that call themselves."""

from __future__ import annotations

import ast
import copy
import random
from typing import Any

from fuzzing.values import NUMBERS, WORDS

_EXPRESSIONS = (
    "[0] * 9999999999", "'a' * 9999999999", "9 ** 9 ** 9", "1 << 9999999999", "1 / 0", "1 % 0",
    "[x for x in range(10**9)]",
    "(lambda f: f(f))(lambda f: f(f))", "open('/etc/passwd').read()", "__import__('os').system('id')", "eval('1')",
    "{}['a']", "[][1]", "'%s' % ()", "f'{1:>99999999}'", "'{0.__class__}'.format(1)", "list(range(10**9))",
    "[[0] * 1000] * 1000", "int('1' * 5000)", "str(10**5000)", "float('nan')", "-inf", "None + 1",
    "a.b.c.d", "x[0:10**9]",
    "sorted([1, 'a'])", "max()", "min([])", "dict(a=1)['b']", "(yield)", "getattr(1, 'real')", "super().x", "~'a'",
    "'\\x1b[2J'", "[*[*[]]]", "{**{}}", "not ...", "1 if [] else {}",
)  # fmt: skip
_STATEMENTS = (
    "while True:\n    pass", "for i in range(10**9):\n    x = i", "def f(n):\n    return f(n)\nx = f(1)",
    "x = []\nfor i in range(10**6):\n    x = x + [x]", "x = 'a'\nfor i in range(99):\n    x = x + x",
    "import os", "from . import x", "from .... import y", "x = x", "x += x", "del x", "raise ValueError",
    "assert False",
    "class A(A):\n    pass", "class A:\n    a = A()", "return 1", "a, *b = 1", "x = [1]\nx.append(x)", "global x",
    "try:\n    pass\nexcept Exception:\n    x = 1", "with a as b:\n    pass", "x: int = 1", "d = {}\nd['d'] = d",
    "async def g():\n    await g()", "match 1:\n    case x:\n        pass",
)  # fmt: skip


def changed_source(data: bytes, chance: random.Random) -> bytes:
    """The file with some parts of its syntax tree changed; the file itself where it is no Python."""
    try:
        tree = ast.parse(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            _change(tree, chance)
        return ast.unparse(tree).encode(errors="replace")
    except (SyntaxError, ValueError, RecursionError, AttributeError, TypeError, MemoryError):
        return data


def _change(tree: ast.Module, chance: random.Random) -> None:
    """Change one expression or one block somewhere in the tree."""
    blocks, slots = _places(tree)
    if chance.random() < 0.3 and blocks:
        block = chance.choice(blocks)
        at = chance.randrange(len(block))
        match chance.randrange(4):
            case 0 if len(block) > 1:
                del block[at]
            case 1:
                block.insert(at, copy.deepcopy(chance.choice(chance.choice(blocks))))  # a copy: no tree holds itself
            case _:
                block[at:at] = ast.parse(chance.choice(_STATEMENTS)).body
    elif slots:
        node, field, index = chance.choice(slots)
        other_node, other_field, other_index = chance.choice(slots)
        old, other = _get(node, field, index), copy.deepcopy(_get(other_node, other_field, other_index))
        _set(node, field, index, _new(old, other, chance))


def _new(old: ast.expr, other: ast.expr, chance: random.Random) -> ast.expr:
    match chance.randrange(6):
        case 0:
            return ast.Constant(chance.choice([*(n for n in NUMBERS if n == n), *WORDS]))
        case 1:
            return other
        case 2:
            return ast.parse(chance.choice(_EXPRESSIONS), mode="eval").body
        case 3:
            operator = chance.choice((ast.Mult(), ast.Pow(), ast.LShift(), ast.Add(), ast.Mod(), ast.FloorDiv()))
            return ast.BinOp(old, operator, ast.Constant(chance.choice((0, 2, 10**9, -1, "a"))))
        case 4:
            for _ in range(chance.choice((1, 3, 120))):
                old = ast.Call(chance.choice((ast.Name("f"), other)), [old], [])
            return old
        case _:
            for _ in range(chance.choice((1, 3, 120))):
                old = chance.choice(
                    (ast.List([old, old] if chance.random() < 0.05 else [old]), ast.UnaryOp(ast.USub(), old))
                )
            return old


def _places(tree: ast.Module) -> tuple[list[list[ast.stmt]], list[tuple[ast.AST, str, int | None]]]:
    """The blocks of statements, and the fields that hold expressions which are read."""
    blocks: list[list[ast.stmt]] = []
    slots: list[tuple[ast.AST, str, int | None]] = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and isinstance(getattr(value, "ctx", ast.Load()), ast.Load):
                slots.append((node, field, None))
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                blocks.append(value)
            elif isinstance(value, list):
                slots += [(node, field, at) for at, item in enumerate(value) if isinstance(item, ast.expr)]
    return blocks, slots


def _get(node: ast.AST, field: str, index: int | None) -> Any:
    value = getattr(node, field)
    return value if index is None else value[index]


def _set(node: ast.AST, field: str, index: int | None, new: ast.expr) -> None:
    if index is None:
        setattr(node, field, new)
    else:
        getattr(node, field)[index] = new
