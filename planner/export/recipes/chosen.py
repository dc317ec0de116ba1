"""The function of a Python file that is meant: the one that the user names, or the only one that makes a recipe."""

from __future__ import annotations

from planner.errors import SpecError
from planner.export.recipes.evaluator import Evaluator
from planner.export.recipes.values import Record
from planner.specs.problems import nearest


def chosen_recipe(evaluator: Evaluator, recipe: str | None, marks: tuple[str, ...]) -> Record | None:
    """The record that the chosen function returns; None for a file without functions that make one.

    `marks` are fields that a recipe's record has. Raises SpecError with all names where several make one.
    """
    known = evaluator.functions()
    if recipe is not None:
        if recipe not in known:
            own = evaluator.own_functions()
            close = nearest(recipe, known).removeprefix("; ")
            raise SpecError(
                f"--recipe: the file has no function {recipe[:80]!r}", close or f"one of {', '.join(own[:40])}"
            )
        record = evaluator.call(recipe)
        if not isinstance(record, Record):
            raise SpecError(
                f"--recipe: {recipe[:80]} returns no configuration that can be followed", "name another one"
            )
        return record
    names = [
        name
        for name in evaluator.own_functions() or known
        if not name.startswith("_") and not evaluator.parameters(name)
    ]
    annotated = [name for name in names if "Config" in evaluator.returns(name) or "Partial" in evaluator.returns(name)]
    found: dict[str, Record] = {}
    for name in annotated or names:
        record = evaluator.call(name)
        if isinstance(record, Record) and any(record.get(mark) is not None for mark in marks):
            found[name] = record
    if len(found) > 1:
        listed = ", ".join(list(found)[:60])
        raise SpecError(f"the file holds {len(found)} recipes", f"add --recipe NAME: one of {listed}")
    return next(iter(found.values()), None)
