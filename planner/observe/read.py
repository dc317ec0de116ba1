"""Reads the files of a run: each log by the grammar that most of its steps are of, several as one run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from planner.errors import SpecError
from planner.observe.describe import described
from planner.observe.lines import Tally, cleaned, lines
from planner.observe.logs import common, table
from planner.observe.logs.deepspeed import DEEPSPEED
from planner.observe.logs.megatron import BRIDGE, MEGATRON
from planner.observe.logs.nanotron import NANOTRON
from planner.observe.logs.nemo import DLLOGGER, MLPERF, NEMO
from planner.observe.logs.torchtitan import TORCHTITAN
from planner.observe.observation import Observation, Source
from planner.observe.record import Record
from planner.specs.reading import label

GRAMMARS = (MEGATRON, BRIDGE, TORCHTITAN, DEEPSPEED, NANOTRON, MLPERF, DLLOGGER, NEMO)
"""Every grammar; adding one is a row here and a module in `logs`."""
_ROWS = tuple((index, row) for index, grammar in enumerate(GRAMMARS) for row in (*grammar.rows, *common.ROWS))
_NEEDLES = re.compile(b"|".join(sorted({re.escape(row.needle.encode()) for _, row in _ROWS} - {b":", b"rank"})))
"""Words that lines worth a look hold; those of the timers of all ranks are everywhere, and asked for among them."""
_LEAST_MIXED = 10
"""Steps of two trainers, each at least so many, make a file a mixture."""
_LEAST_MIXED_FRACTION = 0.2
_KIN = ({"megatron", "megatron-bridge"}, {"mlperf", "nemo", "dllogger"}, {"deepspeed", "megatron"})
"""Grammars that one program prints side by side."""
_TIMER_LINES = re.compile(rb"^ {2,4}[A-Za-z][\w/-]*:\s*$")


def observe(paths: Sequence[str], advance: Callable[[], None] = lambda: None) -> Observation:
    """The run that files show; several are the ranks of one job, or its parts one after the other.

        from planner.observe.read import observe

        observation = observe(["train.log"])
        print(observation.step_s, observation.tokens_per_s)

    Raises SpecError for a file that cannot be read, or that has no steps of a trainer that is known.
    """
    if not paths:
        raise SpecError("plan observe: no file", "name a training log")
    read = [_read(path, advance) for path in paths]
    best = max(range(len(read)), key=lambda index: len(read[index][0].numbers))
    grammar = read[best][0].grammar
    record = _joined([record for record, _ in read], best)
    trainer = next((known.trainer for known in GRAMMARS if known.name == grammar), None)
    return described(record, trainer or "", tuple(source for _, source in read))


def _read(path: str, advance: Callable[[], None]) -> tuple[Record, Source]:
    """The record of one file, and what it is."""
    tally, where = Tally(), label(path)
    stream = lines(path, tally, advance)
    head: list[bytes] = []
    for line in stream:
        head.append(line)
        if line.strip():
            break
    if table.recognises(b"\n".join(head)):
        record = table.read_table(chain(head, stream), where)
    else:
        record = _chosen(_records(chain(head, stream)), where)
    if not record.numbers and not record.memory and not record.timers:
        raise SpecError(f"{where}: has no lines of steps that are known", _HINT)
    if tally.num_cut:
        record.note(f"{tally.num_cut:,} lines were longer than 64 KiB and were cut")
    if record.left_steps:
        tally.partial = (
            tally.partial or f"{record.left_steps:,} steps after the first {len(record.numbers):,} were left"
        )
    source = Source(
        path=where, format=record.grammar, num_lines=tally.num_lines, num_bytes=tally.num_bytes, partial=tally.partial
    )
    return record, source


_HINT = (
    "name the output of Megatron-LM, Megatron-Bridge, NeMo, MLPerf, torchtitan, DeepSpeed, nanotron or Primus, "
    "or a CSV with a column step_time_s"
)


def _records(stream: Any) -> list[Record]:
    """One record for each grammar, every line given to the rows whose words it holds."""
    records = [Record(grammar.name) for grammar in GRAMMARS]
    search = _NEEDLES.search
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
            row.take(record, match)
    for grammar, record in zip(GRAMMARS, records, strict=True):
        grammar.finish(record)
    return records


def _in_timers(record: Record, line: bytes) -> bool:
    """True for the lines of Megatron-LM's timers of all ranks, whose only words are the timers' own."""
    return record.state.get("timers") == "all" and (b"rank" in line or _TIMER_LINES.match(line) is not None)


def _chosen(records: list[Record], where: str) -> Record:
    """The record of the grammar that read most; SpecError where two trainers wrote into one file."""
    order = {grammar.name: grammar.rank for grammar in GRAMMARS}
    ranked = sorted(records, key=lambda r: (-len(r.numbers), order[r.grammar], -len(r.words)))
    first, *others = ranked
    for other in others:
        steps = len(other.numbers)
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


def _joined(records: list[Record], best: int) -> Record:
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


def _is_apart(one: Record, other: Record) -> bool:
    """True if two files are of different times, or without times of different steps."""
    times = (one.first_s, one.last_s, other.first_s, other.last_s)
    if all(map(math.isfinite, times)):
        return one.first_s >= other.last_s or other.first_s >= one.last_s
    return one.numbers[0] > other.numbers[-1] or other.numbers[0] > one.numbers[-1]


def _add_beside(base: Record, record: Record) -> None:
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
        for rank, seconds in ranks.items():
            base.rank_timer(name, rank, seconds)
    for name, value in record.arguments.items():
        base.arguments.setdefault(name, value)
    for name, fact in record.facts.items():
        base.facts.setdefault(name, fact)
    base.links |= record.links


def _append(base: Record, later: Record) -> None:
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
