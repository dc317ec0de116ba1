"""CSV that a user gave."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from planner.errors import SpecError
from planner.specs.reading.limits import CSV, Limits
from planner.specs.reading.text import printable, refuse_longer, refuse_signs


def parse_rows(text: str, problem: str, hint: str, limits: Limits = CSV) -> Iterator[list[str]]:
    """Rows of cells. Raises SpecError, which begins with `problem`, for what is no CSV and beyond the limits."""

    def refused(reason: str) -> SpecError:
        return SpecError(f"{problem}: {reason}", hint)

    refuse_longer(text, limits.num_bytes, refused)
    refuse_signs(text, ",\n", limits.num_items, refused)
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
