"""Reads the files of a run: each log line by line, by the format that most of its steps are of; several as one run.

Tables of steps are CSV, TSV or JSON lines: their columns are found by names, the units by the ends of those."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from planner.errors import SpecError
from planner.observe.describe import described
from planner.observe.formats import COLUMNS, COMMON_ROWS, GRAMMARS, LOOKS_LIKE, trainer_of
from planner.observe.lines import Tally, cleaned, lines, without_launcher
from planner.observe.observation import Observation, SourceFile
from planner.observe.record import MOST, RunRecord, joined, moment, number, text_of
from planner.observe.trainer_lines import json_object
from planner.specs.base import Fields, grouped
from planner.specs.reading import label, row_of

_ROWS = (
    *(((index,), row) for index, grammar in enumerate(GRAMMARS) for row in grammar.rows),
    *((range(len(GRAMMARS)), row) for row in COMMON_ROWS),
)
"""Rows of formats, and whose records they are for."""
_BY_WORD = grouped((row.holds, at) for at, (_, row) in enumerate(_ROWS))
"""Places of rows by the word that their lines hold: a search for each of them is faster than one pattern of all."""
_OF_TRAINERS = grouped((row.holds, at) for at, (owners, row) in enumerate(_ROWS) if GRAMMARS[owners[-1]].trainer)
"""The same without the lines of people's own loops."""
_RANKS = {grammar.name: grammar.rank for grammar in GRAMMARS}
_MOST_RANK = 1
"""Formats of more than it count where no other says a step."""
_LEAST_MIXED, _LEAST_MIXED_FRACTION = 10, 0.2
"""Steps of two trainers, each at least so many, make a file a mixture."""
_KIN = ({"megatron", "megatron-bridge"}, {"mlperf", "nemo", "dllogger"}, {"deepspeed", "megatron", "progress bar"})
"""Formats that one program prints side by side."""


class LogReader:
    """Reads a log line by line, and has the record of the lines so far.

    reader = LogReader("train.log")
    reader.feed([b" iteration 1/ 100 | elapsed time per iteration (ms): 5444.9 | …"])
    print(reader.record().seconds)
    """

    def __init__(self, where: str) -> None:
        self.where = where
        """The file as messages name it."""
        self.records = [RunRecord(grammar.name) for grammar in GRAMMARS]
        """One for each format, every line given to the rows whose words it holds."""
        self.looks_like: set[int] = set()
        """Rows of `LOOKS_LIKE` that the first lines matched."""
        self._looks_left = 20_000
        self._by_word = _BY_WORD
        self._table: StepTable | None = None
        self._begun = False

    def feed(self, lines: Iterable[bytes]) -> None:
        """Take lines. Raises SpecError for a table without a column of step times."""
        stream = iter(lines)
        if not self._begun:
            first = next((line for line in stream if line.strip()), None)
            if first is None:
                return
            self._begun = True
            self._table = StepTable(self.where) if recognises(first) else None
            stream = chain((first,), stream)
        if self._table is not None:
            self._table.feed(stream)
        else:
            self._take(stream)

    def _take(self, stream: Iterable[bytes]) -> None:
        for line in stream:
            if self._looks_left:
                self._look(line)
            text = cleaned(line)
            places = [self._by_word[word] for word in self._by_word if word in text]
            text, rank = without_launcher(text) if places else ("", None)
            for at in sorted(chain.from_iterable(places)):
                owners, row = _ROWS[at]
                if (match := row.pattern.search(text)) is not None:
                    found = row.found(match, rank)
                    for index in owners:
                        self.records[index].num_words += 1
                        row.take(self.records[index], found)

    def _look(self, line: bytes) -> None:
        self._looks_left -= 1
        if (like := _LIKE.search(line[:500])) is not None:
            self.looks_like.add((like.lastindex or 1) - 1)
        if self._looks_left % 1_000 == 0 and (best := self.leading()).numbers and _RANKS[best.grammar] <= _MOST_RANK:
            self._looks_left, self._by_word = 0, _OF_TRAINERS

    def leading(self) -> RunRecord:
        """The record that has most steps so far, unfinished: it grows with the lines that follow."""
        return self._table.record if self._table is not None else _ranked(self.records)[0]

    def record(self) -> RunRecord:
        """The record of all lines, finished: no line can be given any more. SpecError for a log of two trainers."""
        if self._table is not None:
            return self._table.finished()
        for grammar, record in zip(GRAMMARS, self.records, strict=True):
            grammar.finish(record)
        return _chosen(self.records, self.where)


def _ranked(records: list[RunRecord]) -> list[RunRecord]:
    """Records, the one that read most first."""

    def size(record: RunRecord) -> float:
        rank = _RANKS[record.grammar] + 9 * ("weak" in record.state)
        return 1 / (rank + 2) if record.numbers and rank > _MOST_RANK else len(record.numbers)

    return sorted(
        records, key=lambda record: (-size(record), not record.timers, _RANKS[record.grammar], -record.num_words)
    )


def _chosen(records: list[RunRecord], where: str) -> RunRecord:
    """The record of the format that read most; SpecError where two trainers wrote into one file."""
    first, *others = _ranked(records)
    for other in others:
        steps = 0 if _RANKS[other.grammar] > _MOST_RANK else len(other.numbers)
        mixed = steps >= _LEAST_MIXED and steps >= _LEAST_MIXED_FRACTION * len(first.numbers)
        is_kin = any({first.grammar, other.grammar} <= kin for kin in _KIN)
        if mixed and not is_kin:
            raise SpecError(
                f"{where}: holds steps of {first.grammar} ({len(first.numbers):,}) and of {other.grammar} ({steps:,})",
                "give each run's log by itself",
            )
        if first.grammar == "megatron" and other.grammar == "deepspeed" and other.numbers:
            first.facts.setdefault("trainer", "megatron-deepspeed")
        if is_kin and not first.memory:
            first.memory, first.memory_series = other.memory, other.memory_series
        if is_kin and not first.timers:
            first.timers, first.early = other.timers, other.early
        if not first.numbers and (other.memory or other.printed) and not (first.memory or first.printed):
            first = other
    return first


def observe(
    paths: Sequence[str], advance: Callable[[], None] = lambda: None, said: Fields | None = None
) -> Observation:
    """The run that files show; several are the ranks of one job, or its parts one after the other.

        from planner.observe.log_reader import observe

        observation = observe(["train.log"])
        print(observation.step_s, observation.tokens_per_s)

    `said` are options of the job, for tokens per second where the files say none. Raises SpecError for a file that
    cannot be read, or that has no steps of a trainer that is known.
    """
    if not paths:
        raise SpecError("plan observe: no file", "name a training log")
    read = [_read_file(path, advance) for path in paths]
    best = max(range(len(read)), key=lambda index: len(read[index][0].numbers))
    record = joined([record for record, _ in read], best)
    return described(record, trainer_of(record.grammar), tuple(source for _, source in read), said or {})


def _read_file(path: str, advance: Callable[[], None]) -> tuple[RunRecord, SourceFile]:
    """The record of one file, and what it is."""
    tally = Tally()
    where = label(path)
    reader = LogReader(where)
    reader.feed(lines(path, tally, advance))
    record = reader.record()
    if not (record.numbers or record.memory or record.timers):
        errors = record.failed_allocations or record.hung_collectives or record.not_numbers or record.counts
        if not (errors or record.printed):
            raise _unread(where, reader.looks_like)
        record.grammar = record.grammar if record.printed else "errors"
    if tally.num_cut:
        record.note(f"{tally.num_cut:,} lines were longer than 64 KiB and were cut")
    if record.left_steps and not tally.partial:
        tally.partial = f"{record.left_steps:,} steps after the first {len(record.numbers):,} were left"
    source = SourceFile(
        path=where, format=record.grammar, num_lines=tally.num_lines, num_bytes=tally.num_bytes, partial=tally.partial
    )
    return record, source


_LIKE = re.compile(b"|".join(b"(" + pattern.encode() + b")" for pattern, _, _ in LOOKS_LIKE))


def _unread(where: str, looks_like: Iterable[int]) -> SpecError:
    """The error for a file without steps, which says what it looks like."""
    if (row := min(looks_like, default=None)) is not None:
        _, what, hint = LOOKS_LIKE[row]
        return SpecError(f"{where}: has no lines of steps that are known: it looks like {what}", hint)
    names = ", ".join(dict.fromkeys(grammar.name for grammar in GRAMMARS))
    hint = f"name the output of a trainer whose lines are known ({names}), or a CSV with a column step_time_s"
    return SpecError(f"{where}: has no lines of steps that are known", hint)


TABLE = "table"
_UNIT = r"(?:[_ .-]?(?:in)?[_ .(\[-]*(ms|msec|milliseconds|us|s|sec|seconds)[)\]]*)"
_BYTES = r"(?!.*(?:percent|ratio|free|total|bandwidth|cpu|host|ram\b|count)).{0,60}mem.{0,60}?"
_BYTES += r"[_ .(\[/-]*(bytes|[kmg]i?b|megabytes|gigabytes)[)\]]?"
_COLUMNS = {
    name: re.compile(pattern.replace("<U>", _UNIT).replace("<M>", _BYTES)) for name, pattern in COLUMNS["names"].items()
}
"""Patterns of the names of columns, by what they hold; of several the first that says a unit counts, else the first."""
_HEAD = 1 << 15
_MOST_COLUMNS = 2_000


class TableColumns:
    """The columns of a table that are read, found by name; exports of trackers put the run's name before it."""

    def __init__(self, names: Sequence[str]) -> None:
        # a tracker's own columns, which count its calls, come after the run's
        own_last = sorted(names[:_MOST_COLUMNS], key=lambda name: name.startswith("_"))
        plain = {name: name.rpartition(" - ")[2].strip().strip('"').lower() for name in own_last}
        self.found: dict[str, tuple[str, str | None]] = {}
        """Name and unit of the column of each quantity."""
        for quantity, pattern in _COLUMNS.items():
            hits = {name: hit for name, short in plain.items() if (hit := pattern.fullmatch(short)) is not None}
            units = {name: next(filter(None, hit.groups()), None) for name, hit in hits.items()}
            if units:
                name = max(units, key=lambda name: bool(units[name]))
                self.found[quantity] = (name, units[name])
        if "tokens_of_step" in self.found and "mem" in names:  # NeMo Automodel's, of torch's peak in GiB
            self.found["max_allocated_bytes"] = ("mem", "gib")

    @property
    def tells_time(self) -> bool:
        """True where a column has step times, or where the tokens of a step and their rate say them, or a clock."""
        return "seconds" in self.found or any(self.found.keys() >= each for each in ({*_RATE}, {"moment", "step"}))

    def notes(self) -> Iterator[str]:
        """Sentences on what the names leave open."""
        column, unit = self.found.get("seconds", ("", ""))
        if not column and not self.found.keys() >= {*_RATE}:
            yield "seconds are the time between rows: no column has step times"
        elif not column:
            names = [self.found[each][0] for each in _RATE]
            yield f"seconds are {text_of(names[0])} over {text_of(names[1])}: no column has step times"
        elif unit is None and not re.search(r"(seconds|secs|_s/step)$", column.lower()):
            yield f"{text_of(column)} states no unit: taken as seconds"
        sizes = {name: COLUMNS["units"].get(unit, 0) for name, unit in self.found.values() if unit}
        if gigabytes := [text_of(name) for name, size in sizes.items() if size in (10**3, 10**6, 10**9)]:
            yield f"{', '.join(gigabytes)}: a GB is taken as 10^9 bytes, not as 1024^3"

    def values(self, row: Fields) -> dict[str, float]:
        """The numbers of a row by quantity, times in seconds."""
        found = dict[str, float]()
        for quantity, (name, unit) in self.found.items():
            text = str(row.get(name))
            if quantity == "moment" or (quantity == "seconds" and math.isfinite(moment(text))):
                found["moment"] = _moment(text)
            else:
                found[quantity] = number(text) * COLUMNS["units"].get(unit or "", 1.0)
        return found


def recognises(first: bytes) -> bool:
    """True if a file whose first line is this one begins as a table of step times."""
    line = first.decode("utf-8-sig", errors="replace")
    if line.strip() == "time (ms)":  # Megatron's, before timers of which none ran
        return False
    return TableColumns(_names(line[:_HEAD])).tells_time or _is_number(line)


def _names(line: str) -> list[str]:
    if line.lstrip().startswith("{"):
        return [name for name, value in json_object(line).items() if isinstance(value, (int, float, str))]
    return [cell.strip() for cell in row_of(line, _delimiter(line))]


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _is_number(line: str) -> bool:
    return re.fullmatch(r"\s*\d{1,9}(\.\d{1,12})?\s*", line) is not None


_RATE = ("tokens_of_step", "tokens_per_s")
_OF_STEPS = ("seconds", "step", "moment", "tokens_of_step", "data", "retries")
"""Quantities that are no number beside a step."""


class StepTable:
    """The steps of a table so far, of the lines that were given."""

    def __init__(self, where: str) -> None:
        self.record = RunRecord(TABLE)
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
            if text and (self._names is not None or not self._begin(text)):
                names = self._names
                self._take(
                    dict(zip(names, row_of(text, self._delimiter), strict=False)) if names else json_object(text)
                )

    def _begin(self, first: str) -> bool:
        """Find the columns; true if the first line is a head and no row."""
        if _is_number(first):
            self.record.note("numbers without a head are taken as seconds of one step after the other")
            self._names = ["seconds"]
            return False
        names = _names(first)
        self._columns = columns = TableColumns(names)
        if not columns.tells_time:
            raise SpecError(f"{self._where}: no column has step times", "name one step_time_s or step_time_ms")
        self.record.notes |= dict.fromkeys(columns.notes())
        self._delimiter = _delimiter(first)
        is_head = not first.startswith("{")
        self._names = names if is_head else []
        return is_head

    def _take(self, row: Fields) -> None:
        """Take a row; those without a time, as trackers export them, are passed over."""
        record = self.record
        values = self._columns.values(row)
        seconds = values.get("seconds", math.nan)
        speed = values.get("tokens_per_s", math.nan)
        step, at_s = values.get("step", math.nan), values.get("moment", math.nan)
        known = 0 <= step < 2**53
        if "tokens_of_step" in values and "seconds" not in values:
            seconds = values["tokens_of_step"] / speed if speed > 0 else math.nan
        if seconds > 0:
            count = (record.numbers[-1] if record.numbers else 0) + 1
            record.step(int(step) if known else count, seconds, end_s=at_s, covers=1)
        elif values.keys() & {"seconds", "tokens_of_step"} or not (known and record.clocked_step(step, at_s)):
            self._untimed += 1
            return
        record.take({name: value for name, value in values.items() if name not in _OF_STEPS})
        if "data" in values:
            record.timer("data_loading", values["data"])
        if 0 <= (retries := values.get("retries", math.nan)) < MOST:
            record.counts["num_alloc_retries"] = max(record.counts["num_alloc_retries"], int(retries))

    def finished(self) -> RunRecord:
        """The record of all rows: no other can be given any more."""
        if self._untimed:
            self.record.note(f"{self._untimed:,} rows without a time were left out")
        return self.record


def _moment(text: str) -> float:
    """A date and time, or seconds or milliseconds since 1970."""
    at_s = moment(text)
    if math.isnan(at_s) and not re.search(r"[^\d.eE+]", text.strip()):
        at_s = number(text)
        at_s = at_s / 1e3 if at_s > 1e11 else at_s
    return at_s
