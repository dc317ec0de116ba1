"""Reads the files of a run: each log line by line, by the grammar that most of its steps are of; several as one run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from planner.errors import SpecError
from planner.observe.describe import described
from planner.observe.lines import Tally, cleaned, lines
from planner.observe.logs import table
from planner.observe.logs.deepspeed import DEEPSPEED
from planner.observe.logs.grammar import COMMON_ROWS
from planner.observe.logs.megatron import BRIDGE, MEGATRON
from planner.observe.logs.nemo import DLLOGGER, MLPERF, NEMO
from planner.observe.logs.one_line import MAXTEXT, NANOTRON, VERL
from planner.observe.logs.progress_bar import PROGRESS_BAR
from planner.observe.logs.torchtitan import TORCHTITAN
from planner.observe.observation import Observation, SourceFile
from planner.observe.record import RunRecord
from planner.specs.reading import label

GRAMMARS = (
    MEGATRON, BRIDGE, TORCHTITAN, DEEPSPEED, NANOTRON, MAXTEXT, VERL, MLPERF, DLLOGGER, NEMO, PROGRESS_BAR,
)  # fmt: skip
"""Every grammar; adding one is a row here and a module in `logs`."""
_ROWS = tuple((index, row) for index, grammar in enumerate(GRAMMARS) for row in (*grammar.rows, *COMMON_ROWS))
_NEEDLES = re.compile(b"|".join(sorted({re.escape(row.needle.encode()) for _, row in _ROWS} - {b":", b"rank"})))
"""Words that lines worth a look hold; those of the timers of all ranks are everywhere, and asked for among them."""
_LEAST_MIXED = 10
"""Steps of two trainers, each at least so many, make a file a mixture."""
_LEAST_MIXED_FRACTION = 0.2
_KIN = ({"megatron", "megatron-bridge"}, {"mlperf", "nemo", "dllogger"}, {"deepspeed", "megatron"})
"""Grammars that one program prints side by side."""
_TIMER_LINES = re.compile(rb"^ {2,4}[A-Za-z][\w/-]*:\s*$")


def trainer_of(grammar: str) -> str:
    """The trainer whose lines a grammar has; empty for a table."""
    return next((known.trainer for known in GRAMMARS if known.name == grammar), "")


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
        """One for each grammar, every line given to the rows whose words it holds."""
        self.num_matched = 0
        """Lines that said something, each counted once for every row that it is of."""
        self._table: table.StepTable | None = None
        self._begun = False

    def feed(self, lines: Iterable[bytes]) -> None:
        """Take lines. Raises SpecError for a table without a column of step times."""
        stream = iter(lines)
        if not self._begun:
            first = next((line for line in stream if line.strip()), None)
            if first is None:
                return
            self._begun = True
            self._table = table.StepTable(self.where) if table.recognises(first) else None
            stream = chain((first,), stream)
        if self._table is not None:
            self._table.feed(stream)
            self.num_matched += 1
        else:
            self._take(stream)

    def _take(self, stream: Iterable[bytes]) -> None:
        records, search = self.records, _NEEDLES.search
        for line in stream:
            if search(line) is None and not _in_timers(records[0], line):
                continue
            text, rank = cleaned(line)
            for index, row in _ROWS:
                if row.needle not in text:
                    continue
                match = row.pattern.search(text)
                if match is None:
                    continue
                record = records[index]
                if rank is None:
                    record.state.pop("rank", None)
                else:
                    record.state["rank"] = str(rank)
                record.words[row.says] += 1
                self.num_matched += 1
                row.take(record, match)

    def leading(self) -> RunRecord:
        """The record that has most steps so far, unfinished: it grows with the lines that follow."""
        return self._table.record if self._table is not None else _ranked(self.records)[0]

    def all_records(self) -> list[RunRecord]:
        """Every record that grows."""
        return self.records if self._table is None else [self._table.record]

    def record(self) -> RunRecord:
        """The record of all lines, finished: no line can be given any more. SpecError for a log of two trainers."""
        if self._table is not None:
            return self._table.finished()
        for grammar, record in zip(GRAMMARS, self.records, strict=True):
            grammar.finish(record)
        return _chosen(self.records, self.where)


def _in_timers(record: RunRecord, line: bytes) -> bool:
    """True for the lines of Megatron-LM's timers of all ranks, whose only words are the timers' own."""
    return record.state.get("timers") == "all" and (b"rank" in line or _TIMER_LINES.match(line) is not None)


_RANKS = {grammar.name: grammar.rank for grammar in GRAMMARS}


def _ranked(records: list[RunRecord]) -> list[RunRecord]:
    """Records, the one that read most first; a bar's whole seconds count where nothing else says a step."""

    def size(record: RunRecord) -> float:
        return len(record.numbers) if record.grammar != PROGRESS_BAR.name else 0.5 * bool(record.numbers)

    return sorted(records, key=lambda record: (-size(record), _RANKS[record.grammar], -len(record.words)))


def _chosen(records: list[RunRecord], where: str) -> RunRecord:
    """The record of the grammar that read most; SpecError where two trainers wrote into one file."""
    first, *others = _ranked(records)
    for other in others:
        steps = 0 if other.grammar == PROGRESS_BAR.name else len(other.numbers)
        mixed = steps >= _LEAST_MIXED and steps >= _LEAST_MIXED_FRACTION * len(first.numbers)
        if mixed and not any({first.grammar, other.grammar} <= kin for kin in _KIN):
            raise SpecError(
                f"{where}: holds steps of {first.grammar} ({len(first.numbers):,}) and of {other.grammar} ({steps:,})",
                "give each run's log by itself",
            )
        if first.grammar == "megatron" and other.grammar == "deepspeed" and other.numbers:
            first.facts.setdefault("trainer", "megatron-deepspeed")
            first.links |= other.links
        if not first.numbers and other.memory and not first.memory:
            first = other
    return first


def observe(paths: Sequence[str], advance: Callable[[], None] = lambda: None) -> Observation:
    """The run that files show; several are the ranks of one job, or its parts one after the other.

        from planner.observe.read import observe

        observation = observe(["train.log"])
        print(observation.step_s, observation.tokens_per_s)

    Raises SpecError for a file that cannot be read, or that has no steps of a trainer that is known.
    """
    if not paths:
        raise SpecError("plan observe: no file", "name a training log")
    read = [_read_file(path, advance) for path in paths]
    best = max(range(len(read)), key=lambda index: len(read[index][0].numbers))
    grammar = read[best][0].grammar
    record = _joined([record for record, _ in read], best)
    return described(record, trainer_of(grammar), tuple(source for _, source in read))


def _read_file(path: str, advance: Callable[[], None]) -> tuple[RunRecord, SourceFile]:
    """The record of one file, and what it is."""
    tally, where = Tally(), label(path)
    reader = LogReader(where)
    reader.feed(lines(path, tally, advance))
    record = reader.record()
    broken = record.failed_allocations or record.hung_collectives
    if not record.numbers and not record.memory and not record.timers:
        if not broken:
            raise SpecError(f"{where}: has no lines of steps that are known", _HINT)
        record.grammar = "errors"
    if tally.num_cut:
        record.note(f"{tally.num_cut:,} lines were longer than 64 KiB and were cut")
    if record.left_steps:
        tally.partial = (
            tally.partial or f"{record.left_steps:,} steps after the first {len(record.numbers):,} were left"
        )
    source = SourceFile(
        path=where, format=record.grammar, num_lines=tally.num_lines, num_bytes=tally.num_bytes, partial=tally.partial
    )
    return record, source


_HINT = (
    "name the output of Megatron-LM, Bridge, NeMo, MLPerf, torchtitan, DeepSpeed, nanotron, Primus, MaxText or verl, "
    "with a Trainer's or torchtune's progress bar, or a CSV with a column step_time_s"
)


def _joined(records: list[RunRecord], best: int) -> RunRecord:
    """One record of several files: parts of a run after one another, ranks of it beside each other."""
    base = records[best]
    parts = [base]
    for index, record in enumerate(records):
        if index == best:
            continue
        if record.grammar == base.grammar and record.numbers and base.numbers and _is_apart(record, base):
            parts.append(record)
        else:
            _add_beside(base, record)
    if len(parts) > 1:
        parts.sort(key=lambda part: (part.first_s if math.isfinite(part.first_s) else 0.0, part.numbers[0]))
        for later in parts[1:]:
            _append(parts[0], later)
    return parts[0]


def _is_apart(one: RunRecord, other: RunRecord) -> bool:
    """True if two files are of different times, or without times of different steps."""
    times = (one.first_s, one.last_s, other.first_s, other.last_s)
    if all(map(math.isfinite, times)):
        return one.first_s >= other.last_s or other.first_s >= one.last_s
    return one.numbers[0] > other.numbers[-1] or other.numbers[0] > one.numbers[-1]


def _add_beside(base: RunRecord, record: RunRecord) -> None:
    """Take what another rank's file has beside the steps: memory, timers of ranks, links, arguments."""
    for rank, kinds in record.memory.items():
        key = rank if rank is not None or None not in base.memory else record.rank
        base.highest(key, **kinds)
    for (rank, kind), series in record.memory_series.items():
        key = rank if rank is not None or not base.numbers or record.rank is None else record.rank
        if (key, kind) in base.memory_series:
            base.memory_series[key, kind].extend(series)
        else:
            base.memory_series[key, kind] = series
    base.counts.update(record.counts)
    for name, spread in record.spreads.items():
        base.spreads.setdefault(name, spread)
    for name, ranks in record.rank_timers.items():
        for rank, values in ranks.items():
            for seconds in values:
                base.rank_timer(name, rank, seconds)
    for name, value in record.arguments.items():
        base.arguments.setdefault(name, value)
    for name, fact in record.facts.items():
        base.facts.setdefault(name, fact)
    base.links |= record.links


def _append(base: RunRecord, later: RunRecord) -> None:
    """Add the steps of a later part of the same run."""
    _add_beside(base, later)
    shift = len(base.numbers)
    base.restart()
    for row, (number, seconds) in enumerate(zip(later.numbers, later.seconds, strict=True)):
        base.step(number, seconds, end_s=later.ends[row], covers=later.covers[row])
    base.state.pop("restarted", None)
    for row, kinds in later.marks.items():
        base.marks.setdefault(row + shift, set()).update(kinds)
    for kind, seconds_of in later.mark_s.items():
        base.mark_s.setdefault(kind, {}).update({row + shift: value for row, value in seconds_of.items()})
    base.activities += later.activities
    for name, (lows, highs) in later.timers.items():
        for low, high in zip(lows, highs, strict=True):
            base.timer(name, low, high)
    for name, values in later.printed.items():
        for value in values:
            base.prints(name, value)
    base.time(later.first_s)
    base.time(later.last_s)
    base.notes |= later.notes
