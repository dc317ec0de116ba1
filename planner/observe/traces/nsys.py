"""Exports of Nsight Systems (`nsys export --type sqlite`) as the columns that torch's traces become.

The file is opened read-only. Which tables it has depends on what was recorded and on the version, so they are looked
up first; no text of the file becomes part of a query.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

from planner.errors import SpecError
from planner.observe.traces.detect import SQLITE
from planner.observe.traces.source import Source
from planner.observe.traces.trace import NO_EVENTS, Columns, Names, RankTrace, rank_in_name
from planner.specs.reading import printable

KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES, FILLS, RANGES = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "NVTX_EVENTS"
PUSH_POP, START_END = 59, 60
"""`eventType` of NVTX ranges."""
_HINT = "export the report again: nsys export --type sqlite"
_LATEST_NS = 2**62


def read_nsys(path: str | Path) -> tuple[RankTrace, ...]:
    """One trace a GPU of an export; kernels of collectives have no sizes and no groups there."""
    with Source(path) as source:
        where = source.where
        if source.read(len(SQLITE)) != SQLITE:
            raise source.broken("is no SQLite database", _HINT)
    try:
        # a colon, a question mark or a percent sign in the name is part of the name
        with closing(sqlite3.connect(f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA query_only = 1")
            database.execute("PRAGMA trusted_schema = 0")
            database.text_factory = lambda data: data.decode("utf-8", "replace")
            return _Export(database, where).traces()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # the last in names of a damaged schema
        raise SpecError(f"{where}: cannot be read as a database: {printable(str(error), 80)}", _HINT) from None


class _Export:
    """Reads one database."""

    def __init__(self, database: sqlite3.Connection, where: str) -> None:
        self.database, self.where = database, where
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        known = (
            KERNELS,
            RUNTIME,
            COPIES,
            FILLS,
            RANGES,
            "StringIds",
            "TARGET_INFO_GPU",
            "TARGET_INFO_SESSION_START_TIME",
        )
        present = {name for (name,) in tables}
        self.columns = {
            table: {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
            for table in known
            if table in present
        }
        if KERNELS not in self.columns and RANGES not in self.columns:
            raise SpecError(f"{where}: holds neither kernels nor NVTX ranges of Nsight Systems", _HINT)
        self.names, self.lanes = Names(), {}  # type: tuple[Names, dict[tuple[int | str, int | str], int]]
        self.texts: dict[int, str] = {}
        if self.columns.get("StringIds", set()) >= {"id", "value"}:
            rows = self._rows("StringIds", ("id", "value"))
            self.texts = {key: str(value) for key, value in rows if isinstance(key, int)}

    def _rows(self, table: str, columns: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        """Rows of a table and of columns that are named in this file; NULL stands for a column that is absent."""
        present = self.columns.get(table)
        if present is None:
            return iter(())
        chosen = ", ".join(column if column in present else "NULL" for column in columns)
        return iter(self.database.execute(f"SELECT {chosen} FROM {table}"))  # names above, none of the file's

    def _times(self, start: object, end: object, table: str) -> tuple[int, int] | None:
        """Start and end of a row; None for a range that never ended."""
        if end is None and table == RANGES:
            return None
        for value in (start, end):
            if not isinstance(value, int) or not 0 <= value < _LATEST_NS:
                raise SpecError(f"{self.where}: {table}: {printable(repr(value)[:60], 40)} is no time", _HINT)
        assert isinstance(start, int)
        assert isinstance(end, int)
        return (start, end) if end >= start else None

    def _name(self, *candidates: object) -> int:
        for value in candidates:
            text = self.texts.get(value) if isinstance(value, int) else value
            if isinstance(text, str) and text:
                return self.names(text)
        return self.names("(no name)")

    def _lane(self, device: object, stream: object) -> int:
        place = (device if isinstance(device, int) else 0, stream if isinstance(stream, int) else str(stream)[:40])
        return self.lanes.setdefault(place, len(self.lanes))

    def _gpu(self) -> tuple[Columns, list[bool]]:
        gpu, copies = Columns(), []
        common = ("start", "end", "deviceId", "streamId", "correlationId")
        for table, extra in ((KERNELS, ("demangledName", "shortName")), (COPIES, ("copyKind",)), (FILLS, ())):
            for start, end, device, stream, link, *names in self._rows(table, (*common, *extra)):
                times = self._times(start, end, table)
                if times is None:
                    continue
                name = self._name(*names) if table == KERNELS else self.names(table.rpartition("_")[2])
                gpu.add(*times, self._lane(device, stream), name, link if isinstance(link, int) else -1)
                copies.append(table != KERNELS)
        return gpu, copies

    def _host(self) -> tuple[Columns, Columns]:
        """Runtime calls and NVTX ranges."""
        calls, ranges = Columns(), Columns()
        for start, end, name, link, thread in self._rows(
            RUNTIME, ("start", "end", "nameId", "correlationId", "globalTid")
        ):
            times = self._times(start, end, RUNTIME)
            if times:
                calls.add(*times, self._lane("host", thread), self._name(name), link if isinstance(link, int) else -1)
        columns = ("start", "end", "text", "textId", "eventType", "globalTid")
        for start, end, text, text_id, kind, thread in self._rows(RANGES, columns):
            times = self._times(start, end, RANGES) if kind in (PUSH_POP, START_END, None) else None
            if times:
                ranges.add(*times, self._lane("host", thread), self._name(text, text_id))
        return calls, ranges

    def traces(self) -> tuple[RankTrace, ...]:
        """One trace a device."""
        (gpu_columns, copies), (calls, ranges) = self._gpu(), self._host()
        (gpu, order), (launches, _), (marks, _) = gpu_columns.events(), calls.events(), ranges.events()
        if not len(gpu):
            raise SpecError(f"{self.where}: holds no kernel", "record with `nsys profile --trace=cuda,nvtx`")
        lanes = tuple(self.lanes)
        device_of = np.array([place if isinstance(place, int) else -1 for place, _ in lanes], np.int64)
        devices = sorted(set(device_of[gpu.lane].tolist()))
        names = {d: str(n) for d, n in self._rows("TARGET_INFO_GPU", ("id", "name")) if isinstance(d, int)}
        start = next(
            (int(t) for (t,) in self._rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)) if isinstance(t, int)), 0
        )
        is_copy = np.array(copies, bool)[order]
        return tuple(
            RankTrace(
                where=self.where, rank=rank_in_name(self.where) if len(devices) == 1 else None, world_size=None,
                device=printable(names.get(device, "GPU")[:80], 80),
                origin_ns=start, names=tuple(self.names.texts), groups={}, calls=(),
                gpu=gpu.where(mine := device_of[gpu.lane] == device), copies=is_copy[mine], launches=launches,
                operators=NO_EVENTS, marks=marks, lanes=lanes,
                warnings=("Nsight Systems says neither groups nor bytes of collectives",),
            )
            for device in devices
        )  # fmt: skip
