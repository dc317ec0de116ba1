"""Logs made for machines: MLPerf's, whose Llama and GPT runs are NeMo's; NeMo's DLLogger file; CSV and JSON lines.

MLPerf training 3.0 to 5.1 (mlcommons/training_results_v*). Columns of tables are found by their names, units by the
ends of those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planner.errors import SpecError
from planner.observe.line_formats import Grammar, line_row, moment, number, text_of, whole
from planner.observe.record import MAX_NAMES, RunRecord
from planner.specs.reading import parse_json, row_of
from planner.specs.units import GB, GIB, KIB, MIB, is_count

_TIMES = ("train_step_time", "train_step_timing in s", "train_step_timing")
_FACTS: dict[str, tuple[str, Any]] = {
    "global_batch_size": ("global_batch_size", whole), "max_sequence_length": ("seq_length", whole),
    "lora_rank": ("lora_rank", whole), "submission_benchmark": ("model", text_of),
    "submission_platform": ("hardware", text_of),
}  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    try:
        data = parse_json(text, "", keeps_last=True)
    except SpecError:
        return {}
    return data if isinstance(data, dict) else {}


def _value(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else number(str(value))


def _mllog(record: RunRecord, match: re.Match[str]) -> None:
    data = _object(match[1])
    key, value, said = data.get("key"), data.get("value"), data.get("metadata")
    at_s, metadata = _value(data.get("time_ms")) / 1e3, said if isinstance(said, dict) else {}
    if not isinstance(key, str) or not math.isfinite(at_s):
        record.note("some lines of MLPerf's log are cut off and were left out")
        return
    kind, _, side = key.rpartition("_")
    if key == "init_start":
        record.facts["num_gpus"] = int(record.facts.get("num_gpus", 0)) + 1
        record.time(at_s)
    elif kind in ("eval", "run", "block") and side == "start":
        record.state[kind] = str(at_s)
        record.state["tokens of a block"] = str(metadata.get("epoch_count", record.state.get("tokens of a block", "")))
        if kind == "eval":
            # all of 3.1 to 5.1 count here what was trained until then; at a block's ends they count different things
            trained = _value(metadata.get("samples_count", metadata.get("epoch_num")))
            record.state["trained"] = f"{record.state.get('trained', '')} {trained:.0f}"
    elif side == "stop" and kind in record.state:
        record.activity({"eval": "evaluation"}.get(kind, kind), float(record.state.pop(kind)), at_s)
        if kind == "eval":
            record.mark("evaluation")
    elif key in _FACTS:
        name, convert = _FACTS[key]
        record.facts |= {name: known} if (known := convert(str(value))) else {}
    elif key == "tracked_stats" and isinstance(value, dict):
        _tracked(record, value, metadata, at_s)


def _tracked(record: RunRecord, value: dict[str, Any], metadata: dict[str, Any], at_s: float) -> None:
    """A step's seconds, or the mean of a block of steps, which is no step: counted, it makes totals 2 to 3% too high.

    A block says its throughput (5.0), or only the samples and no step (5.1). `step` counts tokens in 4.1, samples in
    5.0 and steps in 5.1, which has `samples_count` beside.
    """
    if (name := next((name for name in value if name.startswith("validation_step_tim")), None)) is not None:
        record.state.setdefault("eval", str(at_s - _value(value[name])))  # some runs print no eval_start
    if "max_memory_usage" in value:
        record.bytes_of(None, max_allocated_bytes=_value(value["max_memory_usage"]) * GIB)
    name, counted = next((name for name in value if name in _TIMES), None), _value(metadata.get("step"))
    if name is None or not math.isfinite(counted):
        return
    if "throughput" in value:
        if counted > 0 and len(record.means) < MAX_NAMES:
            record.means.append((counted, _value(value[name]), at_s))
        return
    if "samples_count" in metadata:
        counted += 1  # the first step is 0
    elif (batch := int(record.facts.get("global_batch_size", 0))) > 0:
        counted /= batch * (int(record.facts.get("seq_length", 1)) if name == _TIMES[1] else 1)
    record.step(round(counted), _value(value[name]), end_s=at_s, covers=1 if not record.numbers else 0)


def _finish_mlperf(record: RunRecord) -> None:
    """Take means of stretches where no step is recorded: those that are recorded, or the time between evaluations."""
    if not record.numbers:
        ends = _in_steps(record, [counted for counted, _, _ in record.means])
        before = 0
        for step, (_, seconds, at_s) in zip(ends, record.means, strict=False):
            if step > before:
                record.step(step, seconds, end_s=at_s, covers=step - before)
            before = step
        if record.numbers:
            record.note("no step is recorded: seconds are the means that the log has of stretches of steps")
    if not record.numbers:
        stretches = _stretches(record)
        ends = _ends_of_stretches(record, len(stretches))
        for before, step, (begin, end) in zip((0, *ends), ends, stretches, strict=False):
            if step > before:
                record.step(step, (end - begin) / (step - before), end_s=end, covers=step - before)
        if record.numbers:
            record.note("no step is recorded: seconds are means of the blocks between evaluations")
    if record.facts.get("num_gpus") in (0, 1):
        record.facts.pop("num_gpus")


def _stretches(record: RunRecord) -> list[tuple[float, float]]:
    """Begin and end of what was trained without a break: blocks, cut at the evaluations that are inside of them."""
    evaluations = sorted((begin, end) for kind, begin, end in record.activities if kind == "evaluation")
    found = []
    for begin, end in ((begin, end) for kind, begin, end in record.activities if kind == "block"):
        inside = [(start, stop) for start, stop in evaluations if begin < start and stop <= end]
        for start, stop in inside:  # what follows the last one is no whole stretch
            found.append((begin, start))
            begin = stop
        found += [] if inside else [(begin, end)]
    return sorted(found)


def _ends_of_stretches(record: RunRecord, count: int) -> list[int]:
    """The last step of each stretch; none where that is not stated."""
    per_step = int(record.facts.get("global_batch_size", 0)) * int(record.facts.get("seq_length", 0))
    tokens = number(record.state.get("tokens of a block"))
    if per_step and tokens >= per_step and tokens % per_step == 0:
        return [round(tokens / per_step) * block for block in range(1, count + 1)]
    trained = [float(text) for text in record.state.get("trained", "").split() if is_count(text)]
    return _in_steps(record, trained) if len(trained) == count else []


def _in_steps(record: RunRecord, counts: list[float]) -> list[int]:
    """Counts of tokens, else of samples, as steps; none where they are of no whole steps."""
    batch = int(record.facts.get("global_batch_size", 0))
    for per_step in (batch * int(record.facts.get("seq_length", 0)), batch):
        if per_step and counts and all(count % per_step == 0 for count in counts):
            return [round(count / per_step) for count in counts]
    return []


MLPERF = Grammar("mlperf", "nemo", (line_row(":::MLLOG", r":::MLLOG (\{.*)", _mllog),), rank=-1, finish=_finish_mlperf)

TABLE = "table"
_UNIT = r"(?:[_ .-]?(?:in)?[_ .(\[-]*(?P<{}>ms|msec|milliseconds|us|s|sec|seconds)[)\]]*)?"
_COLUMNS = {
    "seconds": r"(?:(?:train|training|global|optimizer)[_ .-]?)?(?:step|iter|iteration|batch)s?[_ .-]?"
    rf"(?:time|timing|duration|seconds|secs){_UNIT.format('unit')}"
    r"|(?:elapsed|time|duration|seconds|secs|latency)(?:[_ .-]?per[_ .-]?(?:step|iter|iteration))?"
    rf"{_UNIT.format('other')}|(?:time_metrics/)?end_to_end\((?P<titan>s)\)|timing_s/step|perf/(?:time_per_step|step_time)",
    "step": r"(?:global[_ .-]?|train(?:er)?[/_ .-])?(?:step|iter|iteration)s?|_step|consumed[_ ]steps",
    "moment": r"_?timestamp|datetime|date|wall[_ ]?time|time[_ ]?stamp",
    "tokens_per_s": r"tokens[_ /.-]?(?:per[_ .-]?)?(?:s|sec|second)|tps",
    "tokens_of_step": r"(?:num_)?tokens_per_step",
    "data": r"(?:time_metrics/)?(?:data|batch|input)[_ .-]?(?:load(?:er|ing)?|wait|fetch|generator)?"
    r"(?:[_ .-]?(?:time|wait))?(?:[_ .(\[-]*(?P<unit>ms|msec|milliseconds|us|s|sec|seconds)[)\]]*)",
    "retries": r"(?:memory/)?num_alloc_retries",
    "watts_per_gpu": r"(?:gpu[_ .-]?)?power(?:[_ .-]?draw)?(?:[_ .-]?per[_ .-]?gpu)?[_ .(\[-]*w(?:atts?)?[)\]]?",
    "clock_mhz": r"(?:gpu[_ .-]?|sm[_ .-]?|graphics[_ .-]?)?clock[_ .(\[-]*mhz[)\]]?",
}
"""Patterns of the names of columns, by what they hold; of several the first that says a unit counts, else the first."""
_COLUMN_PATTERNS = {quantity: re.compile(pattern) for quantity, pattern in _COLUMNS.items()}
_MEMORY = re.compile(r".{0,60}mem.{0,60}?[_ .(\[/-]*(?P<unit>bytes|[kmg]i?b|megabytes|gigabytes)[)\]]?")
_NO_BYTES = re.compile("percent|ratio|free|total|bandwidth|cpu|host|ram\\b|count")
_BYTES = {
    "bytes": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "megabytes": 10**6, "gb": GB,
    "gigabytes": GB,
}  # fmt: skip
_SCALES = {"ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "us": 1e-6}
_HEAD = 1 << 15
_MOST_COLUMNS = 2_000


class TableColumns:
    """The columns of a table that are read, found by name; exports of trackers put the run's name before it."""

    def __init__(self, names: Sequence[str]) -> None:
        plain = {name: name.rpartition(" - ")[2].strip().strip('"').lower() for name in names[:_MOST_COLUMNS]}
        self.found: dict[str, tuple[str, str | None]] = {}
        """Name and unit of the column of each quantity."""
        for quantity, pattern in _COLUMN_PATTERNS.items():
            hits = {name: hit for name, short in plain.items() if (hit := pattern.fullmatch(short)) is not None}
            units = {name: next(filter(None, hit.groupdict().values()), None) for name, hit in hits.items()}
            if units:
                name = next((name for name, unit in units.items() if unit), next(iter(units)))
                self.found[quantity] = (name, units[name])
        self.memory = {
            _memory_kind(short): (name, _BYTES[hit["unit"]])
            for name, short in plain.items()
            if (hit := _MEMORY.fullmatch(short)) is not None and not _NO_BYTES.search(short)
        }
        self.gigabytes = [text_of(name) for name, size in self.memory.values() if size in (10**3, 10**6, GB)]
        if "tokens_of_step" in self.found and "mem" in names:  # NeMo Automodel's, of torch's peak in GiB
            self.memory["max_allocated_bytes"] = ("mem", GIB)

    @property
    def time(self) -> str | None:
        """The column of step times."""
        return self.found.get("seconds", (None, None))[0]

    @property
    def tells_time(self) -> bool:
        """True where a column has step times, or where the tokens of a step and their rate say them."""
        return "seconds" in self.found or self.found.keys() >= {"tokens_per_s", "tokens_of_step"}

    def notes(self) -> Iterator[str]:
        """Sentences on what the names leave open."""
        if "seconds" not in self.found:
            names = [self.found[each][0] for each in ("tokens_of_step", "tokens_per_s")]
            yield f"seconds are {text_of(names[0])} over {text_of(names[1])}: no column has step times"
        elif self.found["seconds"][1] is None and not re.search(r"(seconds|secs|_s/step)$", (self.time or "").lower()):
            yield f"{text_of(self.time or '')} states no unit: taken as seconds"
        if self.gigabytes:
            yield f"{', '.join(self.gigabytes)}: a GB is taken as 10^9 bytes, not as 1024^3"

    def values(self, row: dict[str, Any]) -> dict[str, float]:
        """The numbers of a row by quantity, times in seconds."""
        return {
            quantity: _moment(str(row.get(name, "")))
            if quantity == "moment"
            else number(str(row.get(name, ""))) * _SCALES.get(unit or "", 1.0)
            for quantity, (name, unit) in self.found.items()
        }


def _memory_kind(text: str) -> str:
    """The kind of memory that a column's name says: reserved, allocated, or in use on the device."""
    if "reserved" in text or "cached" in text:
        return "max_reserved_bytes"
    peak = "max_" if re.search("max|peak", text) else ""
    return f"{peak}allocated_bytes" if re.search("alloc|active|peak|max", text) else "device_bytes"


def recognises(first: bytes) -> bool:
    """True if a file whose first line is this one begins as a table of step times."""
    line = first.decode("utf-8-sig", errors="replace")
    return TableColumns(_names(line[:_HEAD])).tells_time or _is_number(line)


def _names(line: str) -> list[str]:
    if line.lstrip().startswith("{"):
        return [name for name, value in _object(line).items() if isinstance(value, (int, float, str))]
    return [cell.strip() for cell in row_of(line, _delimiter(line))]


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _is_number(line: str) -> bool:
    return re.fullmatch(r"\s*\d{1,9}(\.\d{1,12})?\s*", line) is not None


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
                self._take(dict(zip(names, row_of(text, self._delimiter), strict=False)) if names else _object(text))

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

    def _take(self, row: dict[str, Any]) -> None:
        """Take a row; those without a time, as trackers export them, are passed over."""
        record, values = self.record, self._columns.values(row)
        seconds, speed = values.get("seconds", math.nan), values.get("tokens_per_s", math.nan)
        if "seconds" not in values and speed > 0:
            seconds = values["tokens_of_step"] / speed
        if not seconds > 0:
            self._untimed += 1
            return
        step, count = values.get("step", math.nan), (record.numbers[-1] if record.numbers else 0) + 1
        known = math.isfinite(step) and 0 <= step < 2**53
        record.step(int(step) if known else count, seconds, end_s=values.get("moment", math.nan), covers=1)
        for name in ("tokens_per_s", "watts_per_gpu", "clock_mhz"):
            record.prints(name, values.get(name))
        record.bytes_of(
            None, **{k: number(str(row.get(name, ""))) * unit for k, (name, unit) in self._columns.memory.items()}
        )
        if "data" in values:
            record.timer("data_loading", values["data"])
        if (retries := values.get("retries", math.nan)) >= 0:
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
