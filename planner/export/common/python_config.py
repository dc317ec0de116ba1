"""Configurations written in Python, worked out without running them: what a function of settings returns.

Assignments, calls of the file's own functions, conditions and loops over known values are followed. A call of anything
else is a record of its name and arguments, whose fields may be set and read.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile

_MAX_STEPS, _MAX_DEPTH, _MAX_ITEMS, _MAX_MODULES = 200_000, 60, 4_096, 60
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_BUILTINS: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "min": min, "max": max, "len": len, "list": list,
    "dict": dict, "tuple": tuple, "set": list, "sum": sum, "abs": abs, "sorted": sorted, "round": round,
}  # fmt: skip


class Unknown:
    """A value that only a run knows."""

    def __init__(self, text: str) -> None:
        self.text = text[:80]

    def __repr__(self) -> str:
        return self.text


@dataclass(slots=True, eq=False)
class Record:
    """What a call of code outside the file returns: its name, its arguments, and the fields that are set on it."""

    kind: str
    arguments: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of fields that nobody set, where the class is known."""

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path of fields."""
        value: Any = self
        for name in path.split("."):
            if isinstance(value, Record):
                value = value.fields.get(name, value.defaults.get(name))
            else:
                value = value.get(name) if isinstance(value, dict) else None
            if value is None:
                return default
        return value

    def flat(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Paths and values of all fields, those of records and dictionaries inside included."""
        for name, value in self.fields.items():
            yield from _flat(f"{prefix}{name}", value)

    def copied(self) -> Record:
        """A copy whose records can be changed."""
        fields = {name: _copied(value) for name, value in self.fields.items()}
        return Record(self.kind, list(self.arguments), fields, self.defaults)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Record):
        if not value.fields:
            yield path, value
        yield from value.flat(f"{path}.")
    elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    else:
        yield path, value


def _copied(value: Any) -> Any:
    if isinstance(value, Record):
        return value.copied()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass(slots=True, eq=False)
class _Function:
    node: ast.FunctionDef
    module: Module


@dataclass(slots=True, eq=False)
class _Class:
    node: ast.ClassDef
    module: Module


@dataclass(slots=True, eq=False)
class _Import:
    """A name that another file defines; the file is read when the name is used."""

    config: ConfigFile
    name: str


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _StopError(Exception):
    """A loop is left."""


@dataclass(slots=True, eq=False)
class Module:
    """A file's names and their values."""

    config: ConfigFile
    names: dict[str, Any] = field(default_factory=dict)


class Evaluator:
    """Works out what functions of a file return; the files that it imports are read if they lie in the same tree."""

    def __init__(self, config: ConfigFile, never_followed: frozenset[str] = frozenset()) -> None:
        self.steps, self.depth, self.never_followed = 0, 0, never_followed
        self.modules: dict[str, Module] = {}
        self.module = self._load(config)

    def functions(self) -> list[str]:
        """Names of the functions that the file defines, or imports from a file beside it."""
        return [name for name in self.module.names if isinstance(self._resolved(self.module.names[name]), _Function)]

    def own_functions(self) -> list[str]:
        """Names of the functions that the file itself defines, in their order."""
        names = self.module.names
        return [name for name, value in names.items() if isinstance(value, _Function) and value.module is self.module]

    def call(self, name: str) -> Any:
        """What a function returns if it is called without arguments."""
        function = self._resolved(self.module.names[name])
        return self._call(function, [], {}) if isinstance(function, _Function) else None

    def parameters(self, name: str) -> list[str]:
        """Names of a function's parameters that have no default."""
        arguments = self.module.names[name].node.args
        return [argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]]

    def returns(self, name: str) -> str:
        """The text of a function's annotation, or nothing."""
        node = self.module.names[name].node
        return ast.unparse(node.returns) if node.returns is not None else ""

    def _load(self, config: ConfigFile) -> Module:
        try:
            tree = ast.parse(config.text)
        except SyntaxError as error:
            raise SpecError(f"not Python: line {error.lineno}: {error.msg}", "give the recipe's file") from None
        except (ValueError, MemoryError):
            raise SpecError("not Python that can be read", "give the recipe's file") from None
        module = Module(config)
        self.modules[str(config.path)] = module
        scope = _Scope(module, module.names)
        for node in tree.body:
            self._run([node], scope)
        return module

    def _import(self, node: ast.ImportFrom, scope: _Scope) -> None:
        name = node.module or ""
        found = scope.module.config.module(name, node.level)
        for alias in node.names:
            bound = alias.asname or alias.name
            is_closed = found is None or alias.name in self.never_followed
            scope.names[bound] = Record(alias.name) if is_closed or found is None else _Import(found, alias.name)

    def _resolved(self, value: Any) -> Any:
        """A name's value, read from the file that defines it."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(value, _Import):
                break
            path = str(value.config.path)
            if path not in self.modules and len(self.modules) >= _MAX_MODULES:
                return Record(value.name)
            module = self.modules.get(path) or self._load(value.config)
            value = module.names.get(value.name, Record(value.name))
        return value

    def _run(self, body: list[ast.stmt], scope: _Scope) -> None:
        for node in body:
            self.steps += 1
            if self.steps > _MAX_STEPS:
                raise SpecError(f"the file takes more than {_MAX_STEPS:,} steps to follow", "give a simpler recipe")
            self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign() if node.value is not None:
                self._assign(node.target, self.value(node.value, scope), scope)
            case ast.AugAssign():
                load = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
                self._assign(node.target, self.value(load, scope), scope)
            case ast.Expr():
                self.value(node.value, scope)
            case ast.FunctionDef():
                scope.names[node.name] = _Function(node, scope.module)
            case ast.ClassDef():
                scope.names[node.name] = _Class(node, scope.module)
            case ast.ImportFrom():
                self._import(node, scope)
            case ast.Import():
                for alias in node.names:
                    scope.names[alias.asname or alias.name.partition(".")[0]] = Record(alias.name)
            case ast.Return():
                raise _ReturnError(None if node.value is None else self.value(node.value, scope))
            case ast.If():
                self._run(node.body if truth(self.value(node.test, scope)) else node.orelse, scope)
            case ast.For():
                self._for(node, scope)
            case ast.With():
                self._run(node.body, scope)
            case ast.Try():
                self._run(node.body, scope)
            case ast.Break() | ast.Continue() | ast.Raise():
                raise _StopError

    def _for(self, node: ast.For, scope: _Scope) -> None:
        items = self.value(node.iter, scope)
        if isinstance(items, dict):
            items = list(items)
        for item in items[:_MAX_ITEMS] if isinstance(items, (list, tuple)) else []:
            self._assign(node.target, item, scope)
            try:
                self._run(node.body, scope)
            except _StopError:
                continue

    def _assign(self, target: ast.expr, value: Any, scope: _Scope) -> None:
        match target:
            case ast.Name():
                scope.names[target.id] = value
            case ast.Tuple() | ast.List():
                items = value if isinstance(value, (list, tuple)) and len(value) == len(target.elts) else None
                for index, element in enumerate(target.elts):
                    self._assign(element, items[index] if items else Unknown(ast.unparse(target)), scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, Unknown) and isinstance(target.value, ast.Name):
                    owner = scope.names[target.value.id] = Record(target.value.id)
                elif isinstance(owner, Unknown) and isinstance(target.value, ast.Attribute):
                    owner = Record(ast.unparse(target.value))
                    self._assign(target.value, owner, scope)
                if isinstance(owner, Record):
                    owner.fields[target.attr] = value
            case ast.Subscript():
                owner, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(owner, dict) and isinstance(key, (str, int)):
                    owner[key] = value
                elif isinstance(owner, Record) and isinstance(key, str):
                    owner.fields[key] = value

    def value(self, node: ast.expr, scope: _Scope) -> Any:
        """The value of an expression; Unknown where only a run knows it."""
        self.steps += 1
        if self.steps > _MAX_STEPS or self.depth > _MAX_DEPTH:
            return Unknown("…")
        self.depth += 1
        try:
            return self._value(node, scope)
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, AttributeError, MemoryError):
            return Unknown(ast.unparse(node))
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr, scope: _Scope) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._resolved(scope.get(node.id))
            case ast.Lambda():
                return _Function(_as_function(node), scope.module)
            case ast.Attribute():
                return self._attribute(self.value(node.value, scope), node)
            case ast.Call():
                return self._called(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return [item for element in node.elts for item in self._items(element, scope)]
            case ast.Dict():
                return self._dict(node, scope)
            case ast.BinOp():
                return self._binary(node, scope)
            case ast.UnaryOp():
                value = self.value(node.operand, scope)
                if isinstance(node.op, ast.Not):
                    known = truth(value)
                    return Unknown(ast.unparse(node)) if known is None else not known
                return -value if isinstance(node.op, ast.USub) else value
            case ast.BoolOp():
                return self._bool(node, scope)
            case ast.Compare():
                return self._compare(node, scope)
            case ast.IfExp():
                return self.value(node.body if truth(self.value(node.test, scope)) else node.orelse, scope)
            case ast.JoinedStr():
                parts = [
                    self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope)
                    for part in node.values
                ]
                known = all(isinstance(part, (str, int, float)) for part in parts)
                return "".join(map(str, parts)) if known else Unknown(ast.unparse(node))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, scope)
            case ast.Subscript():
                owner, key = self.value(node.value, scope), self.value(node.slice, scope)
                if isinstance(owner, Record):
                    return owner.fields.get(str(key), Unknown(ast.unparse(node)))
                return owner[key]
        return Unknown(ast.unparse(node))

    def _attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, _Class):
            inner = self._class_names(owner).get(node.attr)
            return inner if isinstance(inner, _Class) else Record(ast.unparse(node)) if inner is None else inner
        if isinstance(owner, Record):
            if node.attr not in owner.fields and node.attr in owner.defaults:
                return owner.defaults[node.attr]
            if node.attr not in owner.fields:
                # read before it is set: whoever sets a field on it, sets it in the owner
                owner.fields[node.attr] = Record(f"{owner.kind}.{node.attr}")
            return owner.fields[node.attr]
        return Unknown(ast.unparse(node))

    def _items(self, element: ast.expr, scope: _Scope) -> list[Any]:
        if not isinstance(element, ast.Starred):
            return [self.value(element, scope)]
        items = self.value(element.value, scope)
        return list(items) if isinstance(items, (list, tuple)) else [Unknown(ast.unparse(element))]

    def _dict(self, node: ast.Dict, scope: _Scope) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if key is None:
                result |= value if isinstance(value, dict) else {}
            elif isinstance(name := self.value(key, scope), (str, int)):
                result[name] = value
        return result

    def _binary(self, node: ast.BinOp, scope: _Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        is_repeat = isinstance(node.op, ast.Mult) and (isinstance(left, (list, str)) or isinstance(right, (list, str)))
        if is_repeat:
            items, times = (left, right) if isinstance(right, int) else (right, left)
            return items * times if len(items) * times <= _MAX_ITEMS else Unknown(ast.unparse(node))
        if isinstance(node.op, ast.Pow) and not (isinstance(right, (int, float)) and abs(right) <= 64):
            return Unknown(ast.unparse(node))
        if isinstance(left, (Record, Unknown)) or isinstance(right, (Record, Unknown)):
            return Unknown(ast.unparse(node))
        return _BINARY[type(node.op)](left, right)

    def _bool(self, node: ast.BoolOp, scope: _Scope) -> Any:
        value: Any = None
        for item in node.values:
            value = self.value(item, scope)
            known = truth(value)
            if known is (isinstance(node.op, ast.Or)):
                return value
        return value

    def _compare(self, node: ast.Compare, scope: _Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
        kind = type(node.ops[0])
        if kind in (ast.Is, ast.IsNot, ast.Eq, ast.NotEq) and (left is None or right is None):
            other = right if left is None else left
            if isinstance(other, Unknown) or (isinstance(other, Record) and not other.fields):
                return Unknown(ast.unparse(node))
            return (other is None) == (kind in (ast.Is, ast.Eq))
        if isinstance(left, (Record, Unknown)) or isinstance(right, (Record, Unknown)) or len(node.ops) > 1:
            return Unknown(ast.unparse(node))
        return _COMPARE[kind](left, right)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: _Scope) -> Any:
        result: list[Any] = []
        return (
            result if self._generated(node, 0, _Scope(scope.module, {}, scope), result) else Unknown(ast.unparse(node))
        )

    def _generated(self, node: Any, depth: int, scope: _Scope, result: list[Any]) -> bool:
        """Add the items of a comprehension from its `depth`-th loop on; False where one is not known."""
        if depth == len(node.generators):
            result.append(self.value(node.elt, scope))
            return len(result) <= _MAX_ITEMS
        generator = node.generators[depth]
        items = self.value(generator.iter, scope)
        if not isinstance(items, (list, tuple)):
            return False
        for item in items[:_MAX_ITEMS]:
            self._assign(generator.target, item, scope)
            if all(truth(self.value(test, scope)) for test in generator.ifs) and not self._generated(
                node, depth + 1, scope, result
            ):
                return False
        return True

    def _called(self, node: ast.Call, scope: _Scope) -> Any:
        arguments = [item for argument in node.args for item in self._items(argument, scope)]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is None:
                keywords |= value if isinstance(value, dict) else {}
            else:
                keywords[keyword.arg] = value
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            handled, value = _method(owner, node.func.attr, arguments, keywords)
            if handled:
                return value
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Name) and isinstance(scope.get(name), Unknown):
            if name == "range" and all(isinstance(bound, int) for bound in arguments):
                return list(range(*arguments))[:_MAX_ITEMS]
            if name in _BUILTINS:
                return _BUILTINS[name](*arguments, **keywords)
            if name in ("hasattr", "isinstance"):
                return Unknown(ast.unparse(node)) if name == "isinstance" else _has_field(*arguments)
            if name in ("getattr", "setattr"):
                return _field(name, arguments)
            if name == "cast" and len(arguments) == 2:
                return arguments[1]
        return self._of_function(self.value(node.func, scope), name, arguments, keywords)

    def _of_function(self, function: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if isinstance(function, _Function):
            return self._call(function, arguments, keywords)
        if isinstance(function, _Class):
            return Record(name, arguments, keywords, self._defaults(function))
        if name == "field" and not arguments:
            factory = keywords.get("default_factory")
            return self._of_function(factory, "", [], {}) if factory is not None else keywords.get("default")
        if (
            name.rpartition(".")[2] in ("replace", "deepcopy", "copy")
            and arguments
            and isinstance(arguments[0], Record)
        ):
            changed = arguments[0].copied()
            changed.fields |= keywords
            return changed
        if name in ("run.Config", "run.Partial") and arguments:
            target = arguments[0]
            kind = target.kind if isinstance(target, Record) else getattr(getattr(target, "node", None), "name", "")
            return Record(kind, arguments[1:], keywords, self._defaults(target) if isinstance(target, _Class) else {})
        if name == "cast" and len(arguments) == 2:
            return arguments[1]
        return Record(name, arguments, keywords)

    def _class_names(self, cls: _Class) -> dict[str, Any]:
        """What the body of a class defines."""
        scope = _Scope(cls.module, {}, _Scope(cls.module, cls.module.names))
        body = [node for node in cls.node.body if not isinstance(node, (ast.Expr, ast.FunctionDef))]
        self._run(body, scope)
        return scope.names

    def _defaults(self, cls: _Class, depth: int = 0) -> dict[str, Any]:
        """Values of the fields of a class and of those that it inherits from."""
        defaults: dict[str, Any] = {}
        if depth < _MAX_DEPTH // 4:
            for base in reversed(cls.node.bases):
                inherited = self.value(base, _Scope(cls.module, cls.module.names))
                defaults |= self._defaults(inherited, depth + 1) if isinstance(inherited, _Class) else {}
            defaults |= self._class_names(cls)
        return {name: value for name, value in defaults.items() if not isinstance(value, (_Class, _Function, _Import))}

    def _call(self, function: _Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        parameters = function.node.args
        names = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]
        scope = _Scope(function.module, {})
        outer = _Scope(function.module, function.module.names)
        for name, default in zip(names[len(names) - len(parameters.defaults) :], parameters.defaults, strict=True):
            scope.names[name] = self.value(default, outer)
        for argument, keyword_default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if keyword_default is not None:
                scope.names[argument.arg] = self.value(keyword_default, outer)
        scope.names |= dict(zip(names, arguments, strict=False)) | keywords
        if parameters.kwarg is not None:
            known = {*names, *(argument.arg for argument in parameters.kwonlyargs)}
            scope.names[parameters.kwarg.arg] = {name: value for name, value in keywords.items() if name not in known}
        self.depth += 1
        try:
            if self.depth < _MAX_DEPTH:
                self._run(function.node.body, scope)
        except _ReturnError as returned:
            return returned.value
        except _StopError:
            pass
        finally:
            self.depth -= 1
        return None


class _Scope:
    """The names that an expression sees."""

    def __init__(self, module: Module, names: dict[str, Any], outer: _Scope | None = None) -> None:
        self.module, self.names, self.outer = module, names, outer

    def get(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer.get(name)
        return self.module.names.get(name, Unknown(name))


def truth(value: Any) -> bool | None:
    """True or false as Python counts a value; None where it is not known."""
    if isinstance(value, (Unknown, Record)):
        return True if isinstance(value, Record) and value.fields else None
    return bool(value)


def _as_function(node: ast.Lambda) -> ast.FunctionDef:
    body: list[ast.stmt] = [ast.Return(node.body)]
    return ast.FunctionDef("lambda", node.args, body, [], lineno=node.lineno, col_offset=0)


def _has_field(owner: Any, name: str) -> bool:
    """True unless the class is known and has no such field."""
    return not (isinstance(owner, Record) and owner.defaults) or name in owner.defaults or name in owner.fields


def _loaded(target: ast.expr) -> ast.expr:
    """A target of an assignment as the expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _field(name: str, arguments: list[Any]) -> Any:
    owner, key = arguments[0], arguments[1]
    if not isinstance(owner, Record) or not isinstance(key, str):
        return Unknown(name)
    if name == "setattr":
        owner.fields[key] = arguments[2]
        return None
    return owner.fields.get(key, arguments[2] if len(arguments) > 2 else Unknown(key))


def _method(owner: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> tuple[bool, Any]:
    """(it is known what it does, the value) of a method of a value."""
    if isinstance(owner, dict):
        if name == "update":
            owner |= (arguments[0] if arguments and isinstance(arguments[0], dict) else {}) | keywords
            return True, None
        if name in ("get", "pop", "setdefault") and arguments and isinstance(arguments[0], (str, int)):
            if name == "setdefault":
                return True, owner.setdefault(arguments[0], arguments[1] if len(arguments) > 1 else None)
            found = owner.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
            if name == "pop":
                owner.pop(arguments[0], None)
            return True, found
        if name in ("items", "keys", "values"):
            return True, [list(item) if name == "items" else item for item in getattr(owner, name)()]
        if name == "copy":
            return True, dict(owner)
    if isinstance(owner, list):
        if name == "append":
            owner.append(arguments[0])
            return True, None
        if name == "extend":
            owner.extend(arguments[0] if isinstance(arguments[0], list) else [])
            return True, None
    if isinstance(owner, str) and name in (
        "lower",
        "upper",
        "strip",
        "replace",
        "split",
        "startswith",
        "endswith",
        "format",
    ):
        return True, getattr(owner, name)(*arguments)
    if isinstance(owner, Record) and owner.arguments and not isinstance(owner.fields.get(name), _Function):
        # a method of what a call returned is about the same thing, such as AutoBridge's provider of a model
        return True, Record(f"{owner.kind}.{name}", [*owner.arguments, *arguments], dict(keywords))
    return False, None
