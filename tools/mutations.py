"""The small changes of a Python file that its tests should notice, each found in the syntax tree.

Comparison and arithmetic operators are swapped, terms dropped, constants moved by one or doubled, conditions negated,
`and` and `or`, `min` and `max` and their like exchanged, returned numbers and truths changed. Text is left alone:
docstrings, annotations, what an error or a log line says, and decorators.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_PAIRS = ("min max", "any all", "ceil floor", "minimum maximum", "argmin argmax", "cumsum cumprod")
CALLED = {a: b for pair in _PAIRS for a, b in (pair.split(), pair.split()[::-1])}
TOLD = {"log", "logger", "logging", "warnings", "print", "TypeVar", "cast"}
"""Names whose calls only tell something."""
UNCHANGED_KEYWORDS = {"strict", "description", "title", "doc"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: the source between two offsets is replaced."""

    operator: str
    line: int
    end_line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def shown(self, source: str) -> tuple[str, str]:
        """The lines around the change, before and after, as one line each."""
        first = source.rfind("\n", 0, self.start) + 1
        last = source.find("\n", self.end)
        last = len(source) if last < 0 else last
        after = source[first : self.start] + self.text + source[self.end : last]
        return " ".join(source[first:last].split()), " ".join(after.split())


def mutations(source: str) -> list[Mutation]:
    """Every change of a file, in the order of its lines."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def offset(line: int, column: int) -> int:
        # the tree counts bytes, a string characters
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node, returned in _changeable(tree):
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        for operator, new in _changes(node, returned):
            text = ast.unparse(new)
            text = text if isinstance(new, ast.stmt | ast.Constant) else f"({text})"
            if text != source[start:end]:
                found.append(Mutation(operator, node.lineno, node.end_lineno, start, end, text))
    return sorted(dict.fromkeys(found), key=lambda mutation: (mutation.start, mutation.end, mutation.text))


def _changeable(tree: ast.AST, returns: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Nodes that may be changed; what a function returns, with the type that it is said to have."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or _is_text(node):
                continue
            if isinstance(node, ast.FunctionDef):
                yield from _changeable(node, ast.unparse(node.returns) if node.returns else "")
                continue
            if isinstance(node, ast.expr | ast.AugAssign) and hasattr(node, "lineno"):
                yield node, returns if isinstance(tree, ast.Return) else ""
            if isinstance(tree, ast.If | ast.IfExp | ast.comprehension) and name in ("test", "ifs"):
                yield ast.copy_location(ast.UnaryOp(ast.Not(), node), node), "condition"
            yield from _changeable(node, returns)


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=name) if name in UNCHANGED_KEYWORDS:
            return True
        case ast.Call(func=function):
            name = ast.unparse(function)
            return name.split(".")[0] in TOLD or name.split(".")[-1].endswith(("Error", "Infeasible"))
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name[:1].isupper()  # a type
        case ast.BinOp(op=ast.BitOr(), right=ast.Name(id=name) | ast.Constant(value=name)):
            return name is None or str(name)[:1].isupper()  # likewise
    return False


def _changes(node: ast.AST, returned: str) -> Iterator[tuple[str, ast.AST]]:
    """Kinds of change with the node that stands there instead."""
    if returned == "condition":
        yield "negate", node
        return
    if returned == "bool":
        yield "return", ast.UnaryOp(ast.Not(), node)
    elif returned == "int":
        yield "return", ast.BinOp(node, ast.Add(), ast.Constant(1))
    elif returned in ("float", "Number", "FloatArray"):
        yield "return", ast.BinOp(node, ast.Mult(), ast.Constant(2))
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in COMPARED.get(type(op), ()):
                    yield "compare", _with(node, ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BinOp(left=ast.Constant(value=str())) | ast.BinOp(right=ast.Constant(value=str()) | ast.JoinedStr()):
            pass
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in COMPUTED:
                yield "compute", _with(node, op=COMPUTED[type(op)]())
            if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv):
                yield "drop", left
            if isinstance(op, ast.Add | ast.Mult):
                yield "drop", right
        case ast.AugAssign(op=op) if type(op) in COMPUTED:
            yield "compute", _with(node, op=COMPUTED[type(op)]())
        case ast.BoolOp(op=op, values=values):
            yield "and or", _with(node, op=ast.And() if isinstance(op, ast.Or) else ast.Or())
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield "drop", rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "unary", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (("constant", ast.Constant(other)) for other in (value + 1, value - 1) if other >= 0)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(2 * value or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            yield "call", _with(node, func=ast.Name(CALLED[name]))
        case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in CALLED:
            yield "call", _with(node, func=ast.Attribute(value, CALLED[name]))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
