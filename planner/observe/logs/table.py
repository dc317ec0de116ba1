"""Step times as CSV or as JSON lines; columns are found by their names, units by the ends of those."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from planner.errors import SpecError
from planner.observe.logs.grammar import moment, number, text_of
from planner.observe.record import RunRecord
from planner.specs.reading import parse_json
from planner.specs.reading.csv_text import row_of
from planner.specs.units import GB, GIB, KIB, MIB

NAME = "table"
_TIME = re.compile(
    r"(?:(?:train|training|global|optimizer)[_ .-]?)?(?:step|iter|iteration|batch)s?[_ .-]?"
    r"(?:time|timing|duration|seconds|secs)"
    r"(?:[_ .-]?(?:in)?[_ .(\[-]*(?P<unit>ms|msec|milliseconds|us|s|sec|seconds)[)\]]*)?"
    r"|(?:elapsed|time|duration|seconds|secs|latency)(?:[_ .-]?per[_ .-]?(?:step|iter|iteration))?"
    r"(?:[_ .(\[-]*(?P<other>ms|msec|milliseconds|us|s|sec|seconds)[)\]]*)?"
    r"|(?:time_metrics/)?end_to_end\((?P<titan>s)\)"
)
_STEP = re.compile(r"(?:global[_ .-]?|train(?:er)?[/_ .-])?(?:step|iter|iteration)s?|_step|consumed[_ ]steps")
_MOMENT = re.compile(r"_?timestamp|datetime|date|wall[_ ]?time|time[_ ]?stamp")
_TOKENS = re.compile(r"tokens[_ /.-]?(?:per[_ .-]?)?(?:s|sec|second)|tps")
_TOKENS_OF_STEP = re.compile(r"(?:num_)?tokens_per_step")
_DATA = re.compile(
    r"(?:time_metrics/)?(?:data|batch|input)[_ .-]?(?:load(?:er|ing)?|wait|fetch|generator)?(?:[_ .-]?(?:time|wait))?"
    r"(?:[_ .(\[-]*(?P<unit>ms|msec|milliseconds|us|s|sec|seconds)[)\]]*)"
)
_MEMORY = re.compile(r".{0,60}mem.{0,60}?[_ .(\[/-]*(?P<unit>bytes|[kmg]i?b|megabytes|gigabytes)[)\]]?")
_NO_BYTES = re.compile("percent|ratio|free|total|bandwidth|cpu|host|ram\\b|count")
_BYTES = {
    "bytes": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "megabytes": 10**6, "gb": GB,
    "gigabytes": GB,
}  # fmt: skip
_DECIMAL = (10**3, 10**6, GB)
_RETRIES = re.compile(r"(?:memory/)?num_alloc_retries")
_GAUGES = {
    "watts_per_gpu": re.compile(
        r"(?:gpu[_ .-]?)?power(?:[_ .-]?draw)?(?:[_ .-]?per[_ .-]?gpu)?[_ .(\[-]*w(?:atts?)?[)\]]?"
    ),
    "clock_mhz": re.compile(r"(?:gpu[_ .-]?|sm[_ .-]?|graphics[_ .-]?)?clock[_ .(\[-]*mhz[)\]]?"),
}
"""Columns of what the GPU itself says."""
_UNITS = {"ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "us": 1e-6}
_HEAD = 1 << 15
_MOST_COLUMNS = 2_000


class TableColumns:
    """The columns of a table that are read, found by name."""

    def __init__(self, names: Sequence[str]) -> None:
        plain = [_plain(name) for name in names[:_MOST_COLUMNS]]
        matches = [(name, _TIME.fullmatch(short)) for name, short in zip(names, plain, strict=False)]
        timed = [
            (name, match["unit"] or match["other"] or match["titan"]) for name, match in matches if match is not None
        ]
        nothing: tuple[str | None, str | None] = (None, None)
        self.time: str | None
        self.time, unit = max(timed, key=lambda pair: pair[1] is not None, default=nothing)
        self.unit = _UNITS.get(unit or "s", 1.0)
        self.says_unit = unit is not None or (self.time or "").lower().endswith(("seconds", "secs"))
        self.step = _first(names, plain, _STEP)
        self.moment = _first(names, plain, _MOMENT)
        self.tokens = _first(names, plain, _TOKENS)
        self.tokens_of_step = _first(names, plain, _TOKENS_OF_STEP)
        self.retries = _first(names, plain, _RETRIES)
        self.data = self._with_unit(names, plain, _DATA, _UNITS, 1.0)
        self.memory = {
            _memory_kind(match): (name, _BYTES[match["unit"]])
            for name, short in zip(names, plain, strict=False)
            if (match := _MEMORY.fullmatch(short)) is not None and not _NO_BYTES.search(short)
        }
        self.gigabytes = [text_of(name) for name, unit in self.memory.values() if unit in _DECIMAL]
        if self.tokens_of_step is not None and "mem" in names:  # NeMo Automodel's, of torch's peak in GiB
            self.memory["max_allocated_bytes"] = ("mem", GIB)
        self.gauges = {ours: _first(names, plain, pattern) for ours, pattern in _GAUGES.items()}

    @property
    def tells_time(self) -> bool:
        """True where a column has step times, or where the tokens of a step and their rate say them."""
        return self.time is not None or (self.tokens is not None and self.tokens_of_step is not None)

    @staticmethod
    def _with_unit(
        names: Sequence[str], plain: Sequence[str], pattern: re.Pattern[str], units: dict[str, float], default: float
    ) -> tuple[str, float] | None:
        """The first column that a pattern matches, and what its unit is in ours."""
        for name, short in zip(names, plain, strict=False):
            if (match := pattern.fullmatch(short)) is not None:
                return name, units.get(match["unit"] or "", default)
        return None


def _memory_kind(match: re.Match[str]) -> str:
    """The kind of memory that a column's name says: reserved, allocated, or in use on the device."""
    text, peak = match[0], "max_" if re.search("max|peak", match[0]) else ""
    if "reserved" in text or "cached" in text:
        return "max_reserved_bytes"
    return f"{peak}allocated_bytes" if re.search("alloc|active|peak|max", text) else "device_bytes"


def _plain(name: str) -> str:
    """A column's own name: exports of experiment trackers put the run's name before it."""
    return name.rpartition(" - ")[2].strip().strip('"').lower()


def _first(names: Sequence[str], plain: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    return next((name for name, short in zip(names, plain, strict=False) if pattern.fullmatch(short)), None)


def recognises(first: bytes) -> bool:
    """True if a file whose first line is this one begins as a table of step times."""
    line = first.decode("utf-8-sig", errors="replace")
    return bool(_names(line[:_HEAD]) and TableColumns(_names(line[:_HEAD])).tells_time) or _is_number(line)


def _names(line: str) -> list[str]:
    if line.lstrip().startswith("{"):
        data = _json(line)
        return [name for name in data if isinstance(data[name], (int, float, str))]
    return [cell.strip() for cell in row_of(line, _delimiter(line))]


def _json(line: str) -> dict[str, Any]:
    try:
        data = parse_json(line, "", keeps_last=True)
    except SpecError:
        return {}
    return data if isinstance(data, dict) else {}


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _is_number(line: str) -> bool:
    return re.fullmatch(r"\s*\d{1,9}(\.\d{1,12})?\s*", line) is not None


class StepTable:
    """The steps of a table so far, of the lines that were given."""

    def __init__(self, where: str) -> None:
        self.record = RunRecord(NAME)
        self._where = where
        self._names: list[str] | None = None
        """The names of the columns; empty where each line is an object that names its own."""
        self._columns = TableColumns(["seconds"])
        self._delimiter = ","
        self._untimed = 0

    def feed(self, lines: Iterable[bytes]) -> None:
        """Take lines, of which the first that is not blank is the head. SpecError where it names no step times."""
        for line in lines:
            text = line.decode("utf-8-sig", errors="replace").strip()
            if not text:
                continue
            if self._names is None:
                is_head = self._begin(text)
                if is_head:
                    continue
            self._take(self._row(text))

    def _begin(self, first: str) -> bool:
        """Find the columns; true if the first line is a head and no row."""
        if _is_number(first):
            self.record.note("numbers without a head are taken as seconds of one step after the other")
            self._names = ["seconds"]
            return False
        self._columns = columns = TableColumns(_names(first))
        if not columns.tells_time:
            raise SpecError(f"{self._where}: no column has step times", "name one step_time_s or step_time_ms")
        if columns.time is None:
            self.record.note(f"seconds are {columns.tokens_of_step} over {columns.tokens}: no column has step times")
        self.record.state["column"] = text_of(columns.time or columns.tokens or "")
        if columns.gigabytes:
            self.record.note(f"{', '.join(columns.gigabytes)}: a GB is taken as 10^9 bytes, not as 1024^3")
        if columns.time is not None and not columns.says_unit:
            self.record.note(f"{text_of(columns.time)} states no unit: taken as seconds")
        self._delimiter = _delimiter(first)
        is_head = not first.startswith("{")
        self._names = _names(first) if is_head else []
        return is_head

    def _row(self, text: str) -> dict[str, Any]:
        if not self._names:
            return _json(text)
        return dict(zip(self._names, row_of(text, self._delimiter), strict=False))

    def _take(self, row: dict[str, Any]) -> None:
        """Take a row; those without a time, as trackers export them, are passed over."""
        record, columns = self.record, self._columns
        seconds = number(str(row.get(columns.time or "", ""))) * columns.unit
        if columns.time is None and (speed := number(str(row.get(columns.tokens or "", "")))) > 0:
            seconds = number(str(row.get(columns.tokens_of_step or "", ""))) / speed
        if not seconds > 0:
            self._untimed += 1
            return
        count = (record.numbers[-1] if record.numbers else 0) + 1
        step = number(str(row.get(columns.step, ""))) if columns.step else math.nan
        end_s = _moment(str(row.get(columns.moment, ""))) if columns.moment else math.nan
        known = math.isfinite(step) and 0 <= step < 2**53
        record.step(int(step) if known else count, seconds, end_s=end_s, covers=1)
        record.prints("tokens_per_s", number(str(row.get(columns.tokens, ""))) if columns.tokens else None)
        _take_beside(record, row, columns)

    def finished(self) -> RunRecord:
        """The record of all rows: no other can be given any more."""
        if self._untimed:
            self.record.note(f"{self._untimed:,} rows without a time were left out")
        return self.record


def _take_beside(record: RunRecord, row: dict[str, Any], columns: TableColumns) -> None:
    """Take what a row has beside the step: memory, waits for data, retries, power and clocks."""

    def value(name: str | None) -> float:
        return number(str(row.get(name, ""))) if name else math.nan

    record.bytes_of(None, **{kind: value(name) * unit for kind, (name, unit) in columns.memory.items()})
    if columns.data is not None:
        seconds = value(columns.data[0]) * columns.data[1]
        record.timer("data_loading", seconds, seconds)
    if (retries := value(columns.retries)) >= 0:
        record.counts["num_alloc_retries"] = max(record.counts["num_alloc_retries"], int(retries))
    for ours, name in columns.gauges.items():
        record.prints(ours, value(name))


def _moment(text: str) -> float:
    """A date and time, or seconds or milliseconds since 1970."""
    at_s = moment(text)
    if math.isnan(at_s) and not re.search(r"[^\d.eE+]", text.strip()):
        at_s = number(text)
        at_s = at_s / 1e3 if at_s > 1e11 else at_s
    return at_s
