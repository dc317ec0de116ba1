"""Measurements as they come in, kept in a file beside the profile so that an interrupted run can go on."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from planner.errors import SpecError
from planner.files import write_text
from planner.probe.device_state import DeviceState
from planner.probe.repeats import SURE_FRACTION
from planner.probe.run import Device
from planner.probe.verdict.evidence import conditions_of_states, load_in_words
from planner.saved import as_saved, with_digest
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.specs.checking import checked
from planner.specs.reading import parse_mapping, read_text
from planner.specs.units import MICRO


class MeasuredTable:
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

    def where(self, keep: npt.NDArray[np.bool_]) -> MeasuredTable:
        """The rows for which `keep` is true."""
        table = MeasuredTable([])
        table.num_rows = int(keep.sum())
        table._cells = {name: [c for c, k in zip(cells, keep, strict=True) if k] for name, cells in self._cells.items()}
        return table


_log = logging.getLogger(__name__)
MeasuredRow = dict[str, float | int | str | None]
"""Columns of one measurement; null where the device could not do it."""
SAVE_EVERY_S = 2.0
MAX_BYTES = 2**24


class Machine(Spec):
    """The machine that was measured."""

    device: Device
    name: str
    """Name of the device according to the driver or the operating system."""
    software: str
    architecture: str
    memory_bytes: int
    num_sms: int
    num_devices: int
    """Number of devices in this machine; on a CPU, of processes."""
    context_bytes: int
    """Device memory in use before anything was allocated."""


class Measurements(Spec):
    """Tables of rows by name."""

    machine: Machine
    quick: bool
    date: str
    tables: dict[str, list[MeasuredRow]] = Field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    """Unusual conditions while rows were measured."""
    under_load: str = ""
    """Clocks, power and temperature under the load of products, in words; empty where the driver does not say."""


class MeasurementRecord:
    """Measurements so far, and the file that keeps them until the profile is written."""

    def __init__(self, machine: Machine, quick: bool, date: str, path: Path | None) -> None:
        """Continue with the measurements in the file `path` if they are of the same machine. Without a path nothing is
        kept."""
        self.path, self.saved_s = path, time.monotonic()
        self.measured = Measurements(machine=machine, quick=quick, date=date)
        kept = _read(path)
        if kept is not None and kept.quick == quick and _same(kept.machine, machine):
            self.measured = kept
        self.num_kept = sum(map(len, self.measured.tables.values()))

    def has(self, table: str, key: MeasuredRow) -> bool:
        """True if the record has the measurement that `key` names."""
        return any(key.items() <= row.items() for row in self.measured.tables.get(table, ()))

    def add(self, table: str, row: MeasuredRow) -> None:
        """Add a row. The file is written every few seconds."""
        self.measured.tables.setdefault(table, []).append(row)
        if time.monotonic() - self.saved_s > SAVE_EVERY_S:
            self.save()

    def note(self, states: Sequence[DeviceState]) -> None:
        """Keep the conditions under which rows were measured, each once."""
        conditions = dict.fromkeys((*self.measured.conditions, *(c.text for c in conditions_of_states(states))))
        under_load = next((load_in_words(state) for state in states if state.when == "within"), "")
        changes = {"conditions": tuple(conditions), "under_load": under_load or self.measured.under_load}
        self.measured = self.measured.model_copy(update=changes)

    def how_sure(self) -> str:
        """How sure the medians of the rows are, in words; empty where the rows do not say."""
        spreads = {
            f"{table} {' '.join(str(value) for value in list(row.values())[:3])}": spread
            for table, rows in self.measured.tables.items()
            for row in rows
            if isinstance(spread := row.get("spread_fraction"), float)
        }
        if not spreads:
            return ""
        unsure = sum(spread > SURE_FRACTION for spread in spreads.values())
        worst = max(spreads, key=lambda name: spreads[name])
        also = f"; the worst to {spreads[worst]:.0%} ({worst})" if unsure else ""
        return f"{len(spreads) - unsure} of {len(spreads)} rows are sure to {SURE_FRACTION:.0%}{also}"

    def save(self) -> None:
        """Write the whole file."""
        if self.path is not None and self.measured.tables:
            write_text(self.path, json.dumps(with_digest(self.measured.model_dump(mode="json"))), force=True)
        self.saved_s = time.monotonic()

    def discard(self) -> None:
        """Remove the file, once the profile is written."""
        if self.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def table(self, name: str, *needed: str) -> MeasuredTable:
        """The rows of a table that have all of `needed`."""
        rows = [
            row for row in self.measured.tables.get(name, ()) if all(row.get(column) is not None for column in needed)
        ]
        return MeasuredTable([{key: "" if value is None else str(value) for key, value in row.items()} for row in rows])


def _same(first: Machine, second: Machine) -> bool:
    """True if two machines are equal but for the memory that a process holds at its start, which always differs."""
    return first.model_copy(update={"context_bytes": second.context_bytes}) == second


def sidecar(output: str, quick: bool) -> Path:
    """The file that keeps measurements until the profile `output` is written. A quick run has a file of its own."""
    return Path(f"{output}{'.quick' if quick else ''}.partial.json")


def _read(path: Path | None) -> Measurements | None:
    """The measurements that an interrupted run left; None where there are none, or somebody edited them."""
    if path is None or not path.is_file():
        return None
    try:
        data = parse_mapping(read_text(path, MAX_BYTES), f"{path}")
        return checked(Measurements, as_saved(data, f"{path}", ""), f"{path}")
    except SpecError as error:
        _log.warning("%s; all is measured again", error.message)
        return None
