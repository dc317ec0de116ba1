"""Measured tables that come with the package: CSV files whose comment lines name their source."""

from __future__ import annotations

import csv
from importlib import resources

import numpy as np
import numpy.typing as npt

from planner.physics.shape import FloatArray
from planner.specs.units import MICRO


class Table:
    """Columns of one CSV file; numbers become float arrays (empty cells NaN), text string arrays."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.num_rows = len(rows)
        self._cells = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def number(self, column: str) -> FloatArray:
        return np.array([float(cell) if cell else np.nan for cell in self._cells[column]])

    def text(self, column: str) -> npt.NDArray[np.str_]:
        return np.array(self._cells[column])

    def seconds(self, column: str) -> FloatArray:
        """A column of microseconds, in seconds."""
        return self.number(column) * MICRO

    def where(self, keep: npt.NDArray[np.bool_]) -> Table:
        """The rows for which `keep` is true."""
        table = Table([])
        table.num_rows = int(keep.sum())
        table._cells = {name: [c for c, k in zip(cells, keep, strict=True) if k] for name, cells in self._cells.items()}
        return table


def read_table(gpu: str, name: str) -> Table:
    """`data/<gpu>/<name>.csv` of this package."""
    text = (resources.files(__package__) / "data" / gpu / f"{name}.csv").read_text(encoding="utf-8")
    return Table(list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))))
