"""JSON that a user gave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from planner.errors import SpecError
from planner.specs.reading.limits import JSON, Limits
from planner.specs.reading.text import printable, refuse_longer, refuse_signs, whole_number


class NotJsonError(Exception):
    """A text breaks JSON's grammar, so that it may be of another language: what is wrong, and where."""

    def __init__(self, problem: str, line: int, column: int) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column = problem, line, column


def parse_json(
    text: str | bytes, where: str, hint: str = "", limits: Limits = JSON, *, keeps_last: bool = False
) -> Any:
    """The value that a text holds. Raises SpecError, which names `where`, for anything else and beyond the limits.

    Two equal keys in one object are refused, unless `keeps_last` says that the last one counts.
    """
    try:
        return json_value(text, where, hint, limits, keeps_last)
    except NotJsonError as error:
        message = f"{where}: line {error.line}: not JSON: {error.problem}".removeprefix(": ")
        raise SpecError(message, hint or f"mend line {error.line}, column {error.column}") from None


def json_value(text: str | bytes, where: str, hint: str, limits: Limits = JSON, keeps_last: bool = False) -> Any:
    """The value that a text holds, as `parse_json`; raises NotJsonError where the text is none of JSON's."""

    def refused(problem: str) -> SpecError:
        return SpecError(f"{where}: not JSON: {problem}".removeprefix(": "), hint or "give a smaller file")

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
