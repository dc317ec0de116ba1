"""Takes a log line by line: by the grammar that most of its steps are of, or as a table of step times."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

from planner.errors import SpecError
from planner.observe.lines import cleaned
from planner.observe.logs import common, table
from planner.observe.logs.deepspeed import DEEPSPEED
from planner.observe.logs.megatron import BRIDGE, MEGATRON
from planner.observe.logs.nanotron import NANOTRON
from planner.observe.logs.nemo import DLLOGGER, MLPERF, NEMO
from planner.observe.logs.torchtitan import TORCHTITAN
from planner.observe.record import Record

GRAMMARS = (
    MEGATRON, BRIDGE, TORCHTITAN, DEEPSPEED, NANOTRON, MLPERF, DLLOGGER, NEMO,
)  # fmt: skip
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


def trainer_of(grammar: str) -> str:
    """The trainer whose lines a grammar has; empty for a table."""
    return next((known.trainer for known in GRAMMARS if known.name == grammar), "")


class Reader:
    """Reads a log line by line, and has the record of the lines so far.

    reader = Reader("train.log")
    reader.feed([b" iteration 1/ 100 | elapsed time per iteration (ms): 5444.9 | …"])
    print(reader.record().seconds)
    """

    def __init__(self, where: str) -> None:
        self.where = where
        """The file as messages name it."""
        self.records = [Record(grammar.name) for grammar in GRAMMARS]
        """One for each grammar, every line given to the rows whose words it holds."""
        self.num_matched = 0
        """Lines that said something, each counted once for every row that it is of."""
        self._table: table.Table | None = None
        self._begun = False

    def feed(self, lines: Iterable[bytes]) -> None:
        """Take lines. Raises SpecError for a table without a column of step times."""
        stream = iter(lines)
        if not self._begun:
            first = next((line for line in stream if line.strip()), None)
            if first is None:
                return
            self._begun = True
            self._table = table.Table(self.where) if table.recognises(first) else None
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

    def leading(self) -> Record:
        """The record that has most steps so far, unfinished: it grows with the lines that follow."""
        return self._table.record if self._table is not None else _ranked(self.records)[0]

    def all_records(self) -> list[Record]:
        """Every record that grows."""
        return self.records if self._table is None else [self._table.record]

    def record(self) -> Record:
        """The record of all lines, finished: no line can be given any more. SpecError for a log of two trainers."""
        if self._table is not None:
            return self._table.finished()
        for grammar, record in zip(GRAMMARS, self.records, strict=True):
            grammar.finish(record)
        return _chosen(self.records, self.where)


def _in_timers(record: Record, line: bytes) -> bool:
    """True for the lines of Megatron-LM's timers of all ranks, whose only words are the timers' own."""
    return record.state.get("timers") == "all" and (b"rank" in line or _TIMER_LINES.match(line) is not None)


_RANKS = {grammar.name: grammar.rank for grammar in GRAMMARS}


def _ranked(records: list[Record]) -> list[Record]:
    """Records, the one that read most first."""
    return sorted(records, key=lambda record: (-len(record.numbers), _RANKS[record.grammar], -len(record.words)))


def _chosen(records: list[Record], where: str) -> Record:
    """The record of the grammar that read most; SpecError where two trainers wrote into one file."""
    first, *others = _ranked(records)
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
