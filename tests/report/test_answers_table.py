"""The table of answers' words: expressions that nothing checks until an answer has the case they are for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner
from planner.report.format import ANSWERS, WORDS
from planner.specs.expressions import _ALWAYS, as_expression
from planner.specs.reading import shipped_table

ITEMS: dict[str, Any] = shipped_table(ANSWERS)
KNOWN = {*WORDS, *_ALWAYS, *_ALWAYS["__builtins__"], "it", "text"}


def read_by(expression: str) -> set[str]:
    """Names that an expression reads and does not bind itself."""
    names = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return {name.id for name in names} - bound


def expressions(rows: Any) -> Iterator[str]:
    """Those of an item: cells of columns, or sentences and when they are said."""
    for row in rows:
        if isinstance(row, dict) and "says" not in row:
            yield from row.values()
            continue
        says = row["says"] if isinstance(row, dict) else row
        yield from (as_expression(cell) for cell in ([says] if isinstance(says, str) else says))
        yield row.get("if", "True") if isinstance(row, dict) else "True"


def given() -> dict[str, list[set[str]]]:
    """The names that each call in report/ and above gives an item; a call that passes on a mapping gives any."""
    found: dict[str, list[set[str]]] = {}
    for path in (Path(planner.__file__).parent / "report").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            named = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if isinstance(named, ast.Constant) and named.value in ITEMS and all(key.arg for key in call.keywords):
                found.setdefault(str(named.value), []).append({str(key.arg) for key in call.keywords})
    return found


def test_every_word_of_an_answer_is_known_where_it_is_said() -> None:
    calls = given()
    assert len(calls) > 0.8 * len(ITEMS)
    read = {item: {name for one in expressions(rows) for name in read_by(one)} - KNOWN for item, rows in ITEMS.items()}
    assert {item: read[item] - names for item, each in calls.items() for names in each if read[item] - names} == {}
