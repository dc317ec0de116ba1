"""Configurations written in Python, worked out without running them: what a function of settings returns.

Assignments, calls of the file's own functions, conditions and loops over known values are followed. A call of anything
else is a record of its name and arguments, whose fields may be set and read.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.recipes.expressions import (
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_STEPS,
    Class,
    Expressions,
    Function,
    Import,
    Module,
    Scope,
)
from planner.export.recipes.values import (
    BUILTINS,
    Record,
    Unknown,
    built_in,
    field_value,
    has_field,
    method_value,
    told,
    truth,
)
from planner.specs.reading.limits import PYTHON
from planner.specs.reading.python_text import num_signs, parse_python

_MAX_MODULES = 60


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _StopError(Exception):
    """A loop is left."""


class Evaluator(Expressions):
    """Works out what functions of a file return; the files that it imports are read if they lie in the same tree."""

    def __init__(self, config: ConfigFile, never_followed: frozenset[str] = frozenset()) -> None:
        self.steps, self.depth, self.never_followed = 0, 0, never_followed
        self.num_signs = 0
        self.modules: dict[str, Module] = {}
        self.module = self._load(config)

    def functions(self) -> list[str]:
        """Names of the functions that the file defines, or imports from a file beside it."""
        return [name for name in self.module.names if isinstance(self.resolved(self.module.names[name]), Function)]

    def own_functions(self) -> list[str]:
        """Names of the functions that the file itself defines, in their order."""
        names = self.module.names
        return [name for name, value in names.items() if isinstance(value, Function) and value.module is self.module]

    def call(self, name: str) -> Any:
        """The value that a function returns if it is called without arguments."""
        function = self.resolved(self.module.names[name])
        return self._call(function, [], {}) if isinstance(function, Function) else None

    def parameters(self, name: str) -> list[str]:
        """Names of a function's parameters that have no default."""
        arguments = self.module.names[name].node.args
        return [argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]]

    def returns(self, name: str) -> str:
        """The text of a function's annotation, or nothing."""
        node = self.module.names[name].node
        return ast.unparse(node.returns) if node.returns is not None else ""

    def _load(self, config: ConfigFile) -> Module:
        tree = parse_python(config.text, "", "give the recipe's file")
        self.num_signs += num_signs(config.text)
        module = Module(config)
        self.modules[str(config.path)] = module
        scope = Scope(module, module.names)
        with suppress(_StopError, _ReturnError):  # a `raise` or `break` of the file itself: nothing behind it is read
            self._run(tree.body, scope)
        return module

    def _import(self, node: ast.ImportFrom, scope: Scope) -> None:
        name = node.module or ""
        found = scope.module.config.module(name, node.level)
        for alias in node.names:
            bound = alias.asname or alias.name
            is_closed = found is None or alias.name in self.never_followed
            scope.names[bound] = Record(alias.name) if is_closed or found is None else Import(found, alias.name)

    def resolved(self, value: Any) -> Any:
        """A name's value, read from the file that defines it."""
        for _ in range(MAX_DEPTH):
            if not isinstance(value, Import):
                break
            path = str(value.config.path)
            if path not in self.modules and not self._has_room(value.config):
                return Record(value.name)
            module = self.modules.get(path) or self._load(value.config)
            value = module.names.get(value.name, Record(value.name))
        return value

    def _has_room(self, config: ConfigFile) -> bool:
        """True if one more file may be read; the limits of Python hold for all files together."""
        return len(self.modules) < _MAX_MODULES and self.num_signs + num_signs(config.text) <= PYTHON.num_items

    def _run(self, body: list[ast.stmt], scope: Scope) -> None:
        for node in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise SpecError(f"the file takes more than {MAX_STEPS:,} steps to follow", "give a simpler recipe")
            self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self.assign(target, value, scope)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value, scope), scope)
            case ast.AugAssign():
                load = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
                self.assign(node.target, self.value(load, scope), scope)
            case ast.Expr():
                self.value(node.value, scope)
            case ast.FunctionDef():
                scope.names[node.name] = Function(node, scope.module)
            case ast.ClassDef():
                scope.names[node.name] = Class(node, scope.module)
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

    def _for(self, node: ast.For, scope: Scope) -> None:
        items = self.value(node.iter, scope)
        if isinstance(items, dict):
            items = list(items)
        for item in items[:MAX_ITEMS] if isinstance(items, (list, tuple)) else []:
            self.assign(node.target, item, scope)
            try:
                self._run(node.body, scope)
            except _StopError:
                continue

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.names[target.id] = value
            case ast.Tuple() | ast.List():
                items = value if isinstance(value, (list, tuple)) and len(value) == len(target.elts) else None
                for index, element in enumerate(target.elts):
                    self.assign(element, items[index] if items else Unknown(target), scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, Unknown) and isinstance(target.value, ast.Name):
                    owner = scope.names[target.value.id] = Record(target.value.id)
                elif isinstance(owner, Unknown) and isinstance(target.value, ast.Attribute):
                    owner = Record(told(target.value))
                    self.assign(target.value, owner, scope)
                if isinstance(owner, Record):
                    owner.fields[target.attr] = value
            case ast.Subscript():
                owner, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(owner, dict) and isinstance(key, (str, int)):
                    owner[key] = value
                elif isinstance(owner, Record) and isinstance(key, str):
                    owner.fields[key] = value

    def called(self, node: ast.Call, scope: Scope) -> Any:
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
            handled, value = method_value(owner, node.func.attr, arguments, keywords)
            if handled:
                return value
        name = told(node.func)
        if isinstance(node.func, ast.Name) and isinstance(scope.get(name), Unknown):
            if name == "range" and all(isinstance(bound, int) for bound in arguments):
                return list(range(*arguments)[:MAX_ITEMS])
            if name in BUILTINS:
                return built_in(name, arguments, keywords)
            if name in ("hasattr", "isinstance"):
                return Unknown(node) if name == "isinstance" else has_field(*arguments)
            if name in ("getattr", "setattr"):
                return field_value(name, arguments)
            if name == "cast" and len(arguments) == 2:
                return arguments[1]
        return self._of_function(self.value(node.func, scope), name, arguments, keywords)

    def _of_function(self, function: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if isinstance(function, Function):
            return self._call(function, arguments, keywords)
        if isinstance(function, Class):
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
            kind = (
                target.kind
                if isinstance(target, Record)
                else getattr(getattr(target, "node", None), "name", str(target))
            )
            return Record(kind, arguments[1:], keywords, self._defaults(target) if isinstance(target, Class) else {})
        if name == "cast" and len(arguments) == 2:
            return arguments[1]
        return Record(name, arguments, keywords)

    def class_names(self, cls: Class) -> dict[str, Any]:
        """The names that the body of a class defines."""
        scope = Scope(cls.module, {}, Scope(cls.module, cls.module.names))
        body = [node for node in cls.node.body if not isinstance(node, (ast.Expr, ast.FunctionDef))]
        self._run(body, scope)
        return scope.names

    def _defaults(self, cls: Class, depth: int = 0) -> dict[str, Any]:
        """Values of the fields of a class and of those that it inherits from."""
        defaults: dict[str, Any] = {}
        if depth < MAX_DEPTH // 4:
            for base in reversed(cls.node.bases):
                inherited = self.value(base, Scope(cls.module, cls.module.names))
                defaults |= self._defaults(inherited, depth + 1) if isinstance(inherited, Class) else {}
            defaults |= self.class_names(cls)
        return {name: value for name, value in defaults.items() if not isinstance(value, (Class, Function, Import))}

    def _call(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        parameters = function.node.args
        names = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]
        scope = Scope(function.module, {})
        outer = Scope(function.module, function.module.names)
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
            if self.depth < MAX_DEPTH:
                self._run(function.node.body, scope)
        except _ReturnError as returned:
            return returned.value
        except _StopError:
            pass
        finally:
            self.depth -= 1
        return None
