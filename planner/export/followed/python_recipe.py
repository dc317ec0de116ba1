"""Configurations written in Python, worked out without running them: what a function of settings returns."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_values import (
    BUILTINS,
    MAX_CHARACTERS,
    MAX_ITEMS,
    CallRecord,
    PythonClass,
    PythonFunction,
    PythonImport,
    Scope,
    Unknown,
    as_key,
    built_in,
    computed,
    method_value,
    told,
    truth,
)
from planner.export.imported_run import ConfigFile
from planner.specs.base import Fields, Said, Texts
from planner.specs.problems import nearest
from planner.specs.reading import PYTHON, num_signs, parse_python

MAX_STEPS, MAX_DEPTH, MAX_BITS = 200_000, 60, 256
ITEMS_A_STEP = 16
"""Making a list or a text costs a step for so many items or characters: what all steps make is bounded."""


def _as_function(node: ast.Lambda) -> ast.FunctionDef:
    body: list[ast.stmt] = [ast.Return(node.body)]
    return ast.FunctionDef("lambda", node.args, body, [], lineno=node.lineno, col_offset=0)


_MAX_MODULES = 60


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _StopError(Exception):
    """A loop is left."""


class Evaluator:
    """Works out what functions of a file return; the files that it imports are read if they lie in the same tree."""

    def __init__(
        self,
        config: ConfigFile,
        never_followed: frozenset[str] = frozenset(),
        known: Callable[[CallRecord], Said] = lambda record: {},
    ) -> None:
        self.steps, self.depth, self.never_followed, self.known = 0, 0, never_followed, known
        self.num_signs = 0
        self.unfollowed: list[CallRecord] = []
        """Calls with arguments of functions that no file beside this one defines, in their order."""
        self.modules: dict[str, Scope] = {}
        self.module = self._load(config)

    def functions(self) -> dict[str, PythonFunction]:
        """The functions that the file defines, or imports from a file beside it."""
        found = {name: self.resolved(value) for name, value in [*self.module.names.items()]}
        return {name: value for name, value in found.items() if isinstance(value, PythonFunction)}

    def own_functions(self) -> dict[str, PythonFunction]:
        """The functions that the file itself defines, in their order."""
        return {name: function for name, function in self.functions().items() if function.module is self.module}

    def call(self, name: str) -> Any:
        """The value that a function returns if it is called without arguments."""
        function = self.resolved(self.module.names[name])
        return self._call(function, [], {}) if isinstance(function, PythonFunction) else None

    def _load(self, config: ConfigFile) -> Scope:
        tree = parse_python(config.text, "", "give the recipe's file")
        self.num_signs += num_signs(config.text)
        module = Scope(config, {})
        self.modules[str(config.path)] = module
        with suppress(_StopError, _ReturnError):  # a `raise` or `break` of the file itself: nothing behind it is read
            self._run(tree.body, module)
        return module

    def _import(self, node: ast.ImportFrom, scope: Scope) -> None:
        name = node.module or ""
        found = scope.config.module(name, node.level)
        for alias in node.names:
            bound = alias.asname or alias.name
            is_closed = found is None or alias.name in self.never_followed
            scope.names[bound] = (
                CallRecord(alias.name) if is_closed or found is None else PythonImport(found, alias.name)
            )

    def resolved(self, value: Any) -> Any:
        """A name's value, read from the file that defines it."""
        for _ in range(MAX_DEPTH):
            if not isinstance(value, PythonImport):
                break
            path = str(value.config.path)
            if path not in self.modules and not self._has_room(value.config):
                return CallRecord(value.name)
            module = self.modules.get(path) or self._load(value.config)
            value = module.names.get(value.name, CallRecord(value.name))
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
                scope.names[node.name] = PythonFunction(node, scope.module)
            case ast.ClassDef():
                scope.names[node.name] = PythonClass(node, scope.module)
            case ast.ImportFrom():
                self._import(node, scope)
            case ast.Import():
                for alias in node.names:
                    scope.names[alias.asname or alias.name.partition(".")[0]] = CallRecord(alias.name)
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
                    owner = scope.names[target.value.id] = CallRecord(target.value.id)
                elif isinstance(owner, Unknown) and isinstance(target.value, ast.Attribute):
                    owner = CallRecord(told(target.value))
                    self.assign(target.value, owner, scope)
                if isinstance(owner, CallRecord):
                    owner.fields[target.attr] = value
            case ast.Subscript():
                owner, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(owner, dict) and isinstance(key, (str, int)):
                    owner[key] = value
                elif isinstance(owner, CallRecord) and isinstance(key, str):
                    owner.fields[key] = value

    def called(self, node: ast.Call, scope: Scope) -> Any:
        arguments = [item for argument in node.args for item in self._items(argument, scope)]
        keywords: Fields = {}
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
                if isinstance(value, CallRecord):
                    value.fields |= self.known(value)
                return value
        name = told(node.func)
        if isinstance(node.func, ast.Name) and name in BUILTINS and isinstance(scope.get(name), Unknown):
            return built_in(name, arguments, keywords)
        value = self._of_function(self.value(node.func, scope), name, arguments, keywords)
        if isinstance(value, CallRecord) and not value.line and len(self.unfollowed) < MAX_ITEMS:
            value.line = node.lineno
            self.unfollowed += [value] if keywords or arguments else []
        return value

    def _of_function(self, function: Any, name: str, arguments: list[Any], keywords: Fields) -> Any:
        if isinstance(function, PythonFunction):
            return self._call(function, arguments, keywords)
        if isinstance(function, CallRecord) and function.kind.endswith("partial") and function.arguments:
            target, *first = function.arguments
            return self._of_function(target, name, [*first, *arguments], function.fields | keywords)
        if isinstance(function, PythonClass):
            return CallRecord(name, arguments, keywords, self._defaults(function))
        if name == "field" and not arguments:
            factory = keywords.get("default_factory")
            return self._of_function(factory, "", [], {}) if factory is not None else keywords.get("default")
        if (
            name.rpartition(".")[2] in ("replace", "deepcopy", "copy")
            and arguments
            and isinstance(arguments[0], CallRecord)
        ):
            changed = arguments[0].copied()
            changed.fields |= keywords
            return changed
        if name in ("run.Config", "run.Partial") and arguments:
            target = arguments[0]
            defaults = self._defaults(target) if isinstance(target, PythonClass) else {}
            return CallRecord(getattr(target, "kind", str(target)), arguments[1:], keywords, defaults)
        if name == "cast" and len(arguments) == 2:
            return arguments[1]
        return CallRecord(name, arguments, keywords)

    def class_names(self, cls: PythonClass) -> Fields:
        """The names that the body of a class defines."""
        scope = cls.module.inside({})
        body = [node for node in cls.node.body if not isinstance(node, (ast.Expr, ast.FunctionDef))]
        self._run(body, scope)
        return scope.names

    def _defaults(self, cls: PythonClass, depth: int = 0) -> Fields:
        """Values of the fields of a class and of those that it inherits from."""
        defaults: Fields = {}
        if depth < MAX_DEPTH // 4:
            for base in reversed(cls.node.bases):
                inherited = self.value(base, cls.module)
                defaults |= self._defaults(inherited, depth + 1) if isinstance(inherited, PythonClass) else {}
            defaults |= self.class_names(cls)
        return {
            name: value
            for name, value in defaults.items()
            if not isinstance(value, (PythonClass, PythonFunction, PythonImport))
        }

    def _call(self, function: PythonFunction, arguments: list[Any], keywords: Fields) -> Any:
        parameters, outer = function.node.args, function.module
        names = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]
        named_alone = [argument.arg for argument in parameters.kwonlyargs]
        unsaid = zip(names[len(names) - len(parameters.defaults) :], parameters.defaults, strict=True)
        defaults = (*unsaid, *zip(named_alone, parameters.kw_defaults, strict=True))
        scope = outer.inside({name: self.value(default, outer) for name, default in defaults if default is not None})
        scope.names |= dict(zip(names, arguments, strict=False)) | keywords
        if parameters.kwarg is not None:
            rest = {name: value for name, value in keywords.items() if name not in (*names, *named_alone)}
            scope.names[parameters.kwarg.arg] = rest
        self.depth += 1
        try:
            if self.depth < MAX_DEPTH:
                self._run(function.node.body, scope)
        except _ReturnError as returned:
            return returned.value
        except _StopError:
            return Unknown(f"{function.kind}, which raises")
        finally:
            self.depth -= 1
        return None

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression; Unknown where only a run knows it."""
        self.steps += 1
        if self.steps > MAX_STEPS or self.depth > MAX_DEPTH:
            return Unknown("…")
        self.depth += 1
        try:
            value = self._value(node, scope)
            if isinstance(value, (list, dict, tuple, str)):
                self.steps += len(value) // ITEMS_A_STEP
            is_long = isinstance(value, int) and value.bit_length() > MAX_BITS
            return Unknown(node) if is_long else value
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, AttributeError, MemoryError):
            return Unknown(node)
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.resolved(scope.get(node.id))
            case ast.Lambda():
                return PythonFunction(_as_function(node), scope.module)
            case ast.Attribute():
                return self._attribute(self.value(node.value, scope), node)
            case ast.Call():
                return self.called(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return [item for element in node.elts for item in self._items(element, scope)]
            case ast.Dict():
                return self._dict(node, scope)
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp():
                return computed(node, lambda part: self.value(part, scope))
            case ast.JoinedStr():
                parts = [
                    self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope)
                    for part in node.values
                ]
                known = all(isinstance(part, (str, int, float)) for part in parts)
                text = "".join(map(str, parts)) if known else ""
                return text if known and len(text) <= MAX_CHARACTERS else Unknown(node)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, scope)
            case ast.Subscript():
                owner, key = self.value(node.value, scope), self.value(node.slice, scope)
                if isinstance(owner, CallRecord):
                    return owner.fields.get(str(key), Unknown(node))
                return owner[as_key(key)]
        return Unknown(node)

    def _attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, PythonClass):
            inner = self.class_names(owner).get(node.attr)
            return inner if isinstance(inner, PythonClass) else CallRecord(told(node)) if inner is None else inner
        if isinstance(owner, CallRecord):
            if node.attr not in owner.fields and node.attr in owner.defaults:
                return owner.defaults[node.attr]
            if node.attr not in owner.fields:
                # read before it is set: whoever sets a field on it, sets it in the owner
                owner.fields[node.attr] = CallRecord(f"{owner.kind}.{node.attr}")
            return owner.fields[node.attr]
        return Unknown(node)

    def _items(self, element: ast.expr, scope: Scope) -> list[Any]:
        if not isinstance(element, ast.Starred):
            return [self.value(element, scope)]
        items = self.value(element.value, scope)
        return list(items) if isinstance(items, (list, tuple)) else [Unknown(element)]

    def _dict(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if key is None:
                result |= value if isinstance(value, dict) else {}
            elif isinstance(name := as_key(self.value(key, scope)), (str, int, tuple)):
                result[name] = value
        return result

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope) -> Any:
        result: list[Any] = []
        return result if self._generated(node, 0, scope.inside({}), result) else Unknown(node)

    def _generated(self, node: Any, depth: int, scope: Scope, result: list[Any]) -> bool:
        """Add the items of a comprehension from its `depth`-th loop on; False where one is not known."""
        if depth == len(node.generators):
            result.append(self.value(node.elt, scope))
            return len(result) <= MAX_ITEMS
        generator = node.generators[depth]
        items = self.value(generator.iter, scope)
        if not isinstance(items, (list, tuple)):
            return False
        for item in items[:MAX_ITEMS]:
            self.assign(generator.target, item, scope)
            if all(truth(self.value(test, scope)) for test in generator.ifs) and not self._generated(
                node, depth + 1, scope, result
            ):
                return False
        return True


def chosen_recipe(evaluator: Evaluator, recipe: str | None, marks: Texts) -> CallRecord | None:
    """The record that the chosen function returns; None for a file without functions that make one.

    `marks` are fields that a recipe's record has. Raises SpecError with all names where several make one.
    """
    known, own = evaluator.functions(), evaluator.own_functions()
    if recipe is not None:
        if recipe not in known:
            close = nearest(recipe, known).removeprefix("; ")
            raise SpecError(
                f"--recipe: the file has no function {recipe[:80]!r}", close or f"one of {', '.join([*own][:40])}"
            )
        record = evaluator.call(recipe)
        if not isinstance(record, CallRecord):
            raise SpecError(
                f"--recipe: {recipe[:80]} returns no configuration that can be followed", "name another one"
            )
        return record
    free = {name: f for name, f in (own or known).items() if name[0] != "_" and not f.has_parameters}
    annotated = {name: f for name, f in free.items() if re.search("Config|Partial", f.returns)}
    records = {name: evaluator.call(name) for name in annotated or free}
    found = {name: record for name, record in records.items() if _is_recipe(record, marks)}
    if len(found) > 1:
        listed = ", ".join([*found][:60])
        raise SpecError(f"the file holds {len(found)} recipes", f"add --recipe NAME: one of {listed}")
    # what a function hands on, as to `pretrain` or `run.run`, where it returns nothing
    handed = (value for call in evaluator.unfollowed for value in (*call.arguments, *call.fields.values()))
    started = {id(value): value for value in handed if _is_recipe(value, marks)}
    return next(iter((found or (started if len(started) == 1 else {})).values()), None)


def _is_recipe(value: Any, marks: Texts) -> bool:
    return isinstance(value, CallRecord) and any(value.get(mark) is not None for mark in marks)
