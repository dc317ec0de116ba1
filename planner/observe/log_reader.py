"""Reads the files of a run: each log line by line, by the format that most of its steps are of; several as one run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from planner.errors import SpecError
from planner.observe.clocked_formats import CLOCKED_GRAMMARS
from planner.observe.describe import described
from planner.observe.line_formats import COMMON_ROWS, ONE_LINE_GRAMMARS
from planner.observe.lines import Tally, cleaned, lines
from planner.observe.machine_logs import MLPERF, StepTable, recognises
from planner.observe.megatron_lines import BRIDGE, MEGATRON
from planner.observe.observation import Observation, SourceFile
from planner.observe.record import RunRecord, joined
from planner.specs.reading import label

GRAMMARS = (MEGATRON, BRIDGE, *ONE_LINE_GRAMMARS, *CLOCKED_GRAMMARS, MLPERF)
"""Every format of lines."""
_ROWS = tuple((index, row) for index, grammar in enumerate(GRAMMARS) for row in (*grammar.rows, *COMMON_ROWS))
_NEEDLES = re.compile(b"|".join(sorted({re.escape(row.needle.encode()) for _, row in _ROWS})))
"""Words that lines worth a look hold."""
_BAR = "progress bar"
_RANKS = {grammar.name: grammar.rank for grammar in GRAMMARS}
_LEAST_MIXED, _LEAST_MIXED_FRACTION = 10, 0.2
"""Steps of two trainers, each at least so many, make a file a mixture."""
_KIN = ({"megatron", "megatron-bridge"}, {"mlperf", "nemo"}, {"deepspeed", "megatron"})
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
            text, rank = cleaned(line) if _NEEDLES.search(line) is not None else ("", None)
            for index, row in _ROWS if text else ():
                if row.needle in text and (match := row.pattern.search(text)) is not None:
                    record = self.records[index]
                    record.state.pop("rank", None)
                    record.state |= {} if rank is None else {"rank": str(rank)}
                    record.num_words += 1
                    row.take(record, match)

    def _look(self, line: bytes) -> None:
        self._looks_left -= 1
        if (like := _LIKE.search(line[:500])) is not None:
            self.looks_like.add((like.lastindex or 1) - 1)

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
    """Records, the one that read most first; a bar's whole seconds count where nothing else says a step."""

    def size(record: RunRecord) -> float:
        return len(record.numbers) if record.grammar != _BAR else 0.5 * bool(record.numbers)

    return sorted(records, key=lambda record: (-size(record), _RANKS[record.grammar], -record.num_words))


def _chosen(records: list[RunRecord], where: str) -> RunRecord:
    """The record of the format that read most; SpecError where two trainers wrote into one file."""
    first, *others = _ranked(records)
    for other in others:
        steps = 0 if other.grammar == _BAR else len(other.numbers)
        mixed = steps >= _LEAST_MIXED and steps >= _LEAST_MIXED_FRACTION * len(first.numbers)
        if mixed and not any({first.grammar, other.grammar} <= kin for kin in _KIN):
            raise SpecError(
                f"{where}: holds steps of {first.grammar} ({len(first.numbers):,}) and of {other.grammar} ({steps:,})",
                "give each run's log by itself",
            )
        if first.grammar == "megatron" and other.grammar == "deepspeed" and other.numbers:
            first.facts.setdefault("trainer", "megatron-deepspeed")
        if not first.numbers and (other.memory or other.printed) and not (first.memory or first.printed):
            first = other
    return first


def observe(paths: Sequence[str], advance: Callable[[], None] = lambda: None) -> Observation:
    """The run that files show; several are the ranks of one job, or its parts one after the other.

        from planner.observe.log_reader import observe

        observation = observe(["train.log"])
        print(observation.step_s, observation.tokens_per_s)

    Raises SpecError for a file that cannot be read, or that has no steps of a trainer that is known.
    """
    if not paths:
        raise SpecError("plan observe: no file", "name a training log")
    read = [_read_file(path, advance) for path in paths]
    best = max(range(len(read)), key=lambda index: len(read[index][0].numbers))
    grammar = read[best][0].grammar
    record = joined([record for record, _ in read], best)
    return described(record, trainer_of(grammar), tuple(source for _, source in read))


def trainer_of(grammar: str) -> str:
    """The trainer whose lines a format has; empty for a table."""
    return next((known.trainer for known in GRAMMARS if known.name == grammar), "")


def _read_file(path: str, advance: Callable[[], None]) -> tuple[RunRecord, SourceFile]:
    """The record of one file, and what it is."""
    tally, where = Tally(), label(path)
    reader = LogReader(where)
    reader.feed(lines(path, tally, advance))
    record = reader.record()
    if not (record.numbers or record.memory or record.timers):
        if not (record.failed_allocations or record.hung_collectives or record.printed):
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


LOOKS_LIKE = (
    (r"'loss': .{1,80}'learning_rate': ", "lines of Hugging Face's Trainer, which have no times",
     "add its progress bar, which goes to stderr (2>&1), or its last line with train_runtime"),
    (r"Step \d+ \| loss:", "lines of torchtune's metric logger, which have no times",
     "add its progress bar, which goes to stderr (2>&1)"),
    (r"Epoch \d+.{0,40}%\|.*v_num=", "Lightning's progress bar, which counts micro-batches and no steps",
     "log a step's seconds to a CSV with a column step_time_s"),
    (r"\biter \d+ step \d+.{0,80}iter time: ", "LitGPT's lines, which time micro-batches and no steps",
     "log a step's seconds to a CSV with a column step_time_s"),
    (r"Iter\(train\) \[|tgs \(tokens/gpu/second\)|Progress on:train|'perf/step_time'",
     "lines of a trainer that is not known (mmengine's, InternLM's, levanter's or slime's)",
     "log a step's seconds to a CSV with a column step_time_s"),
    (r"Avg generation throughput|Decode batch\.|\"POST /v1/", "a log of a server that generates text",
     "name the log of a trainer"),
    (r"# +size +count +type|Avg bus bandwidth", "nccl-tests' output", "plan profile measures links itself"),
    (r"NCCL INFO ", "NCCL's own messages, without a trainer's", "name the trainer's output"),
    (r"NVIDIA-SMI \d|\| GPU-Util ", "nvidia-smi's output", "name the trainer's output"),
    (r"^\s*(?:torchrun|srun|#SBATCH|#!/bin/(?:ba)?sh)|pretrain_gpt\.py", "a script that launches a job",
     "plan import reads scripts; name the output of the job here"),
    (r"^\s*\"?(?:hidden_size|num_hidden_layers|_target_)\"?:", "a configuration", "plan import reads configurations"),
    (r"Traceback \(most recent call last\)", "a traceback before the first step", "name a log that has steps"),
)  # fmt: skip
"""Other files that people have: a pattern of a line, what such a file is, and what is missing or to do."""
_LIKE = re.compile(b"|".join(b"(" + pattern.encode() + b")" for pattern, _, _ in LOOKS_LIKE))


def _unread(where: str, looks_like: Iterable[int]) -> SpecError:
    """The error for a file without steps, which says what it looks like."""
    if (row := min(looks_like, default=None)) is not None:
        _, what, hint = LOOKS_LIKE[row]
        return SpecError(f"{where}: has no lines of steps that are known: it looks like {what}", hint)
    names = ", ".join(dict.fromkeys(grammar.name for grammar in GRAMMARS))
    hint = f"name the output of a trainer whose lines are known ({names}), or a CSV with a column step_time_s"
    return SpecError(f"{where}: has no lines of steps that are known", hint)
