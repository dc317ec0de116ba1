"""Reads the files of a run: each log by the grammar that most of its steps are of, several as one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from planner.errors import SpecError
from planner.observe.describe import described
from planner.observe.lines import Tally, lines
from planner.observe.measured import Source
from planner.observe.observation import Observation
from planner.observe.reader import Reader, trainer_of
from planner.observe.record import Record
from planner.specs.reading import label


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
    return described(record, trainer_of(grammar), tuple(source for _, source in read))


def _read(path: str, advance: Callable[[], None]) -> tuple[Record, Source]:
    """The record of one file, and what it is."""
    tally, where = Tally(), label(path)
    reader = Reader(where)
    reader.feed(lines(path, tally, advance))
    record = reader.record()
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
        for rank, values in ranks.items():
            for seconds in values:
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
