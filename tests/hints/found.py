"""Finds the hints of the planner: the second argument of its errors, in the source's own words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PLANNER = Path(__file__).parents[2] / "planner"
ERRORS = (
    "PlannerError", "SpecError", "LayoutError", "Unsupported", "Infeasible", "SolverError", "ProbeError",
    "OutOfBand",
)  # fmt: skip
_NAMES = re.compile(r"--[a-z]|nearest\(|close\b|\bone of \{|['\" ]of \{|\{option\}|\{name\}|\{field\}|\d")
"""An option, a name to type, a value of a list, or a number."""


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint: the file that it stands in, below planner/, and its expression as Python writes it."""

    home: str
    text: str
    line: int

    @property
    def names_something(self) -> bool:
        """True where the hint names an option, a number, or a name that can be typed."""
        return bool(_NAMES.search(self.text))


@cache
def hints() -> tuple[Hint, ...]:
    """Every hint that is given to an error where it is raised."""
    return tuple(_hints())


def _hints() -> Iterator[Hint]:
    for path in sorted(PLANNER.rglob("*.py")):
        home = str(path.relative_to(PLANNER))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (hint := _hint(node)) is not None:
                yield Hint(home, ast.unparse(hint), node.lineno)


def _hint(call: ast.Call) -> ast.expr | None:
    named = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if named not in ERRORS:
        return None
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "hint"), None)
    return given or (call.args[1] if len(call.args) > 1 else None)
