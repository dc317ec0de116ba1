"""Measured tables: CSV files of the package whose comment lines name their source, or rows measured just now."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from importlib import resources

import numpy as np
import numpy.typing as npt

from planner.shape import FloatArray
from planner.specs.units import MICRO


class Table:
    """The columns of one CSV file. Numbers become float arrays (empty cells NaN), text becomes string arrays."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.num_rows = len(rows)
        self._cells = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def __contains__(self, column: str) -> bool:
        return column in self._cells

    def number(self, column: str) -> FloatArray:
        return np.array([float(cell) if cell else np.nan for cell in self._cells[column]])

    def text(self, column: str) -> npt.NDArray[np.str_]:
        return np.array(self._cells[column])

    def seconds(self, column: str) -> FloatArray:
        """A column of microseconds, in seconds."""
        return self.number(column) * MICRO

    def rows(self) -> list[dict[str, str]]:
        """All rows as text, by column."""
        return [{name: cells[row] for name, cells in self._cells.items()} for row in range(self.num_rows)]

    def where(self, keep: npt.NDArray[np.bool_]) -> Table:
        """The rows for which `keep` is true."""
        table = Table([])
        table.num_rows = int(keep.sum())
        table._cells = {name: [c for c, k in zip(cells, keep, strict=True) if k] for name, cells in self._cells.items()}
        return table


TableSource = str | Mapping[str, Table]
"""The tables of a GPU whose name is a folder of this package, or tables by name."""


def measured_gpus() -> list[str]:
    """The GPUs that this package has tables of."""
    return sorted(folder.name for folder in (resources.files(__package__) / "data").iterdir() if folder.is_dir())


def has_table(gpu: str, name: str) -> bool:
    """True if this package has that table of a GPU."""
    return (resources.files(__package__) / "data" / gpu / f"{name}.csv").is_file()


def read_table(tables: TableSource, name: str) -> Table:
    """The table `name`; for the name of a GPU, the file `data/<gpu>/<name>.csv` of this package."""
    if not isinstance(tables, str):
        return tables[name]
    text = (resources.files(__package__) / "data" / tables / f"{name}.csv").read_text(encoding="utf-8")
    return Table(list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))))
