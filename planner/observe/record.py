"""The record that the rows of a format fill: compact arrays of steps, and what is known of everything else.

Before it stand the numbers, moments and words that a text holds, and the line that a row found.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import compress
from statistics import median

from planner.observe.observation import FailedAllocation, HungCollective, JobFacts
from planner.specs.base import Named
from planner.specs.units import GB, GIB, KIB, MIB

_ISO = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_AMERICAN = re.compile(r"(\d\d)/(\d\d)/(\d{4})(?= \d\d:)")
_CLOCK = re.compile(
    r"(?!.{0,40}(?i:eta|elapsed|remain|left))[^|%<]{0,40}?(?<![\d:.])(\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?(?![\d:])"
)
"""A clock near the begin of a line that has no date, or one without its year."""
_DAY_S = 86_400.0
_FLOAT = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?")
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "MB": 1e6, "GB": GB, "KiB": KIB, "MiB": MIB, "GiB": GIB}
"""Sizes of the units that the table of formats names."""
MOST = 2**53
"""More of anything is no count: the first whole number that a float cannot tell from the next."""
FACTS = ("num_gpus", "global_batch_size", "seq_length", "num_steps_asked", "num_parameters")
"""Numbers of a line that are facts of the job."""
NAMED_FACTS = ("hardware", "model")
"""Facts of the job that are no numbers."""


def number(said: object) -> float:
    """The number at the begin of a text, commas of thousands left out, or a number; not a number where it is none."""
    match = _FLOAT.match(str(said).strip().removeprefix("np.float64(").replace(",", ""))
    return float(match[0]) if match else math.nan


def whole(said: object) -> int | None:
    """The whole number in a text; None where there is none, or one that no file of a trainer has."""
    value = number(said)
    return int(value) if 0 <= value < MOST and value == int(value) else None


def moment(text: str) -> float:
    """The first date and time in a text as seconds since 1970, taken as UTC; not a number where there is none."""
    match = _ISO.search(text) or _ISO.search(_AMERICAN.sub(r"\3-\1-\2", text))
    if match is None:
        return math.nan
    *parts, fraction = match.groups()
    try:
        at_s = datetime.fromisoformat("{}-{}-{}T{}:{}:{}+00:00".format(*parts)).timestamp()
    except (ValueError, OverflowError):
        return math.nan
    return at_s + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def named_parts(text: str, separator: str = "|") -> Named:
    """`a: 1 | b: 2` as a mapping; of equal names the first counts."""
    found: Named = {}
    for part in text.split(separator):
        name, colon, value = part.rpartition(": ") if ": " in part else part.rpartition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def text_of(value: str) -> str:
    """A name from a log: printable, and not long."""
    return "".join(letter for letter in value.strip() if letter.isprintable())[:120]


@dataclass(frozen=True, slots=True)
class FoundLine:
    """A line that a row's pattern was found in."""

    match: re.Match[str]
    numbers: Mapping[str, float]
    """The numbers that the row names, those that the line has."""
    rank: int | None = None
    """The rank that the launcher names before the line."""

    @property
    def before(self) -> str:
        """The text before what was found."""
        return self.match.string[: self.match.start()]

    @property
    def at_s(self) -> float:
        """The moment that stands before it."""
        return moment(self.before)


MOST_VALUES = 4_000
"""The most values of a series of memory; of more, the higher of every two, so that the last one always stays."""
MAX_STEPS = 2_000_000
"""The most rows of steps that are kept: 64 MB. A year of steps of 16 s; later ones are counted and said to be left."""
MAX_TIMER_VALUES, MAX_NAMES, MOST_RANKS, MOST_ERRORS = 20_000, 2_000, 200_000, 1_000
"""The most values of a timer; timers or arguments of a job; ranks; errors that are kept."""
MOST_SERIES = 256
"""The most series of memory, one for each rank and kind: 16 MB."""
_NEAR_STEPS = 3
"""A number that falls back by no more was printed late by another rank; a restart goes further back, or waits."""
_LONG_GAP = 8.0
"""Steps without a line before one that falls back: what a restart takes at least."""
Pair = tuple[float, int]
"""A number and the rank that has it."""


@dataclass(slots=True)
class FallBack:
    """A place where the step number fell back."""

    row: int
    """The first row after it."""
    from_step: int
    lost_rows: tuple[int, int]
    """The rows that were made again: [first, last exclusive)."""


@dataclass(slots=True)
class RunRecord:
    """The facts that one format read in one file."""

    grammar: str
    rank: int | None = None
    """The rank whose steps are taken, where lines say one."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    covers: array[int] = field(default_factory=lambda: array("l"))
    """Steps that a row is the mean of."""
    ends: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since 1970, not a number where a line has no time."""
    backs: list[FallBack] = field(default_factory=list)
    marks: dict[int, dict[str, float]] = field(default_factory=dict)
    """Row to what was said to happen between it and the row before (checkpoint, evaluation, gc), and its seconds; not
    a number where none are said."""
    activities: list[tuple[str, float, float]] = field(default_factory=list)
    """Kind, begin and end of what has both: start-up, evaluation, checkpoint."""
    timers: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    """The least and the most over the ranks, in seconds."""
    early: Counter[str] = field(default_factory=Counter)
    """How many values of each timer came before the second row of steps, of warm-up."""
    memory: dict[int | None, dict[str, int]] = field(default_factory=dict)
    memory_series: dict[tuple[int | None, str], list[tuple[int, float]]] = field(default_factory=dict)
    """The same over steps, by rank and kind."""
    spreads: dict[str, list[tuple[Pair, Pair]]] = field(default_factory=dict)
    """The least and the most of a number over the ranks, line after line: clocks, power, seconds."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often something happened: out of memory, retries of the allocator, steps skipped."""
    means: list[tuple[float, ...]] = field(default_factory=list)
    """Numbers that a format keeps until the whole file is known: means of stretches, a bar's progress."""
    failed_allocations: list[FailedAllocation] = field(default_factory=list)
    hung_collectives: list[HungCollective] = field(default_factory=list)
    not_numbers: tuple[int, int, int] | None = None
    """Lines whose loss or norm of gradients is no number, and the steps of the first and the last of them."""
    printed: dict[str, array[float]] = field(default_factory=dict)
    """Numbers that the trainer works out itself, such as tflops, mfu and tokens_per_s."""
    facts: dict[str, str | int] = field(default_factory=dict)
    arguments: Named = field(default_factory=dict)
    state: Named = field(default_factory=dict)
    """Things that one line says about the next."""
    anchor: tuple[float, float] = (0.0, math.nan)
    """The step and the moment from which the clock of the lines says the seconds of those that follow."""
    notes: dict[str, None] = field(default_factory=dict)
    first_s: float = math.nan
    last_s: float = math.nan
    duplicates: int = 0
    left_steps: int = 0
    counts_covers: bool = False
    """True where only the numbers of rows say how many steps each is the mean of."""
    steady: Sequence[bool] = ()
    """Which rows are behind the warm-up, once that is known."""
    num_words: int = 0
    """Lines that a row of the format's table matched."""

    def step(
        self, number: int, seconds: float, *, end_s: float = math.nan, covers: int = 0, rank: int | None = None
    ) -> bool:
        """Take a row of steps: false where it was printed before, by this rank or another.

        `covers` is the number of steps that it is the mean of; 0 where only the row before says that.
        """
        if not 1e-9 < seconds < 1e7 or not 0 <= number < 2**60:
            self.note("some lines of steps have impossible numbers and were left out")
            return False
        if rank is not None:
            self.rank = rank if self.rank is None else self.rank
        falls_back = bool(self.numbers) and number <= self.numbers[-1]
        if (rank != self.rank and rank is not None) or (falls_back and not self._is_restart(number, end_s)):
            self.duplicates += 1
            return False
        if len(self.numbers) >= MAX_STEPS:
            self.left_steps += 1
            return False
        if falls_back:
            self._fall_back(number, covers)
        before = number - self.covers[-1] if falls_back else self.numbers[-1] if self.numbers else number - 1
        self.numbers.append(number)
        self.seconds.append(seconds)
        self.covers.append(min(covers or max(1, number - before), 2**31 - 1))
        self.counts_covers |= not covers
        self.ends.append(end_s)
        self.time(end_s)
        return True

    def clocked_step(self, step: float, at_s: float, said_s: float = math.nan, rank: int | None = None) -> bool:
        """Take a row by the clock of the lines: of the steps since the anchor, which it moves; else of `said_s`."""
        first, first_s = self.anchor
        follows = step > first and at_s > first_s
        seconds = (at_s - first_s) / (step - first) if follows else said_s
        covers = max(1, round(step - first)) if follows else 0
        taken = seconds > 0 and self.step(int(step), seconds, end_s=at_s, covers=covers, rank=rank)
        if taken or (math.isfinite(at_s) and not seconds > 0 and (step != first or math.isnan(first_s))):
            self.anchor = (step, at_s)
        return taken

    def _is_restart(self, number: int, end_s: float) -> bool:
        """True where a number that falls back is of a step made again, false where it was only printed again."""
        last = self.numbers[-1]
        if number == last or "restarted" in self.state:
            return "restarted" in self.state
        waits_s = end_s - self.ends[-1]
        return last - number > _NEAR_STEPS * self.covers[-1] or waits_s > _LONG_GAP * self.seconds[-1] * self.covers[-1]

    def _fall_back(self, number: int, covers: int) -> None:
        lost = len(self.numbers)
        begin = number - (covers or self.covers[-1])
        if self.numbers[-1] >= int(self.facts.get("num_steps_asked", MOST)) - 1:  # it ended: another run follows
            begin = self.numbers[-1]
        while lost > (self.backs[-1].row if self.backs else 0) and self.numbers[lost - 1] > begin:
            lost -= 1
        self.backs.append(FallBack(len(self.numbers), self.numbers[-1], (lost, len(self.numbers))))
        self.state.pop("restarted", None)

    def restart(self) -> None:
        """Note that the trainer started anew, so that a number that falls back is a step made again."""
        if self.numbers:
            self.state["restarted"] = "yes"

    def starts_with(self, layout: str) -> None:
        """Note the layout with which the trainer starts: steps that were made with another one are of another run."""
        before, self.state["layout"] = self.state.get("layout", layout), layout
        if before != layout and self.numbers:
            self.forget("another layout")

    def forget(self, why: str) -> None:
        """Leave out all steps so far, and what was said beside them: they are of a run with `why`."""
        self.note(
            f"{len(self.numbers):,} lines of steps before are of a run with {why}, and left out: "
            "give that part of the log by itself"
        )
        kept = {"grammar", "rank", "facts", "arguments", "state", "anchor", "notes", "num_words"}
        empty = RunRecord(self.grammar)
        for each in fields(self):
            if each.name not in kept:
                setattr(self, each.name, getattr(empty, each.name))
        self.state.pop("restarted", None)

    def only_from(self, row: int) -> None:
        """Leave out the rows of steps before one, and what was said beside them."""
        if row and math.isfinite(self.ends[row - 1]):
            self.first_s = self.ends[row - 1]
        for values in (self.numbers, self.seconds, self.covers, self.ends):
            del values[:row]
        for values in self.printed.values():
            del values[: -len(self.numbers)]
        self.marks = {at - row: kinds for at, kinds in self.marks.items() if at >= row}
        self.backs = [
            FallBack(back.row - row, back.from_step, (max(0, back.lost_rows[0] - row), back.lost_rows[1] - row))
            for back in self.backs
            if back.row > row
        ]

    def moment(self, text: str) -> float:
        """The moment that a line says; a clock without a date passes midnight where it falls back by half a day."""
        at_s = moment(text)
        if math.isfinite(at_s) or self.last_s > 365 * _DAY_S or (clock := _CLOCK.match(text)) is None:
            return at_s
        at_s = moment(f"1970-01-02 {clock[1]}.{clock[2] or 0}")
        while any(at_s < known_s - _DAY_S / 2 for known_s in (self.last_s, self.anchor[1])):
            at_s += _DAY_S
        return at_s

    def time(self, at_s: float) -> None:
        """Note a moment that the log has."""
        if 0 < at_s < math.inf:  # first of two, for the other may be no number yet
            self.first_s = min(at_s, self.first_s)
            self.last_s = max(at_s, self.last_s)

    def mark(self, kind: str, seconds: float = math.nan) -> None:
        """Note that something other than steps happened after the last row, or what a bar said last."""
        of_row = self.marks.setdefault(len(self.numbers) or len(self.means), {})
        before_s = of_row.get(kind, math.nan)
        of_row[kind] = seconds if math.isnan(before_s) else before_s if math.isnan(seconds) else before_s + seconds

    def activity(self, kind: str, begin_s: float, end_s: float) -> None:
        """Note an activity beside steps, such as an evaluation, with its begin and end."""
        if 0 <= begin_s <= end_s < math.inf:
            self.activities.append((kind, begin_s, end_s))
            self.time(begin_s)
            self.time(end_s)

    def timer(self, name: str, low_s: float, high_s: float | None = None) -> None:
        """Take what a timer shows: the least and the most over the ranks, equal where one number is printed."""
        if name in self.timers or len(self.timers) < MAX_NAMES:
            lows, highs = self.timers.setdefault(name, (array("d"), array("d")))
            most_s = low_s if high_s is None else high_s
            if len(lows) < MAX_TIMER_VALUES and 0 <= low_s <= most_s < 1e9:
                self.early[name] += len(self.numbers) < 2
                lows.append(low_s)
                highs.append(most_s)

    def bytes_of(self, rank: int | None, step: int | None = None, /, **kinds: float | None) -> None:
        """Take memory of a rank after a step, the last one where none is said; the highest of each kind is kept."""
        at = step if step is not None else self.numbers[-1] if self.numbers else 0
        for kind, value in self.highest(rank, **kinds).items():
            if (rank, kind) in self.memory_series or len(self.memory_series) < MOST_SERIES:
                _add(self.memory_series.setdefault((rank, kind), []), at, value)

    def highest(self, rank: int | None, **kinds: float | None) -> dict[str, int]:
        """Keep the highest of each kind of memory, and return what is a number of bytes."""
        known = {kind: round(value) for kind, value in kinds.items() if value is not None and 0 < value < 2**50}
        if not known or (rank not in self.memory and len(self.memory) >= MOST_RANKS):
            return {}
        of_rank = self.memory.setdefault(rank, {})
        for kind, value in known.items():
            of_rank[kind] = max(of_rank.get(kind, 0), value)
        return known

    def spread(self, name: str, low: Pair, high: Pair) -> None:
        """Take the least and the most of a number over the ranks, each with its rank."""
        if math.isfinite(low[0] + high[0]) and len(self.spreads.get(name, ())) < MAX_TIMER_VALUES:
            self.spreads.setdefault(name, []).append((low, high))

    def take(self, numbers: Mapping[str, float], rank: int | None = None) -> None:
        """Take numbers by their names: facts of the job, bytes of a rank, and what the trainer works out itself."""
        for name, value in numbers.items():
            if name in FACTS and 1 <= value < MOST:
                self.facts[name] = int(value)
            elif name not in FACTS and not name.endswith("_bytes"):
                self.prints(name, value)
        self.bytes_of(rank, **{name: value for name, value in numbers.items() if name.endswith("_bytes")})

    def prints(self, name: str, value: float | None) -> None:
        """Take a number that the trainer works out itself."""
        if value is not None and 0 < value < math.inf:
            values = self.printed.setdefault(name, array("d"))
            if len(values) < MAX_STEPS:
                values.append(value)

    def middle(self, name: str) -> float | None:
        """The median of what the trainer prints under a name, behind the warm-up where that is known."""
        values = self.printed.get(name, array("d"))
        kept = [*compress(values, self.steady)] if len(self.steady) == len(values) else values
        return median(kept) if kept else None

    def argument(self, name: str, value: str) -> None:
        """Take an argument of the trainer's dump; the last value of a name counts."""
        if name in self.arguments or len(self.arguments) < MAX_NAMES:
            self.arguments[name] = value

    def note(self, text: str) -> None:
        self.notes[text] = None

    def fact(self, name: str, said: object) -> None:
        """Take a fact of the job that a text states: a name, or a whole number; nothing where it is none."""
        if value := text_of(str(said)) if name in NAMED_FACTS else whole(said):
            self.facts[name] = value

    def job_facts(self) -> JobFacts:
        """The facts that single lines state."""
        known = {name: value for name, value in self.facts.items() if name in JobFacts.model_fields}
        return JobFacts.model_validate(known)


Take = Callable[[RunRecord, FoundLine], None]
"""Takes a line that a row of a format found into the record."""


def _add(series: list[tuple[int, float]], step: int, value: float) -> None:
    """Take a value at a step; values of one step are one, the highest."""
    if series and step == series[-1][0]:
        series[-1] = (step, max(series[-1][1], value))
        return
    series.append((step, value))
    if len(series) > MOST_VALUES:
        pairs = zip(series[::2], series[1::2], strict=False)
        series[:] = [(later[0], max(value, later[1])) for (_, value), later in pairs] + series[len(series) // 2 * 2 :]


def joined(records: list[RunRecord], best: int) -> RunRecord:
    """One record of several files: parts of a run after one another, ranks of it beside each other."""
    base = records[best]
    parts = [base]
    for record in records:
        if record is base:
            continue
        if record.grammar == base.grammar and record.numbers and base.numbers and _is_apart(record, base):
            parts.append(record)
        else:
            _add_beside(base, record)
    parts.sort(key=lambda part: (part.first_s if math.isfinite(part.first_s) else 0.0, part.numbers[:1]))
    for later in parts[1:]:
        _append(parts[0], later)
    return parts[0]


def _is_apart(one: RunRecord, other: RunRecord) -> bool:
    """True if two files are of different times, or without times of different steps."""
    if all(map(math.isfinite, (one.first_s, one.last_s, other.first_s, other.last_s))):
        return one.first_s >= other.last_s or other.first_s >= one.last_s
    return one.numbers[0] > other.numbers[-1] or other.numbers[0] > one.numbers[-1]


def _add_beside(base: RunRecord, record: RunRecord) -> None:
    """Take what another rank's file has beside the steps: memory, timers of ranks, errors, arguments."""
    for rank, kinds in record.memory.items():
        base.highest(rank if rank is not None or None not in base.memory else record.rank, **kinds)
    for (rank, kind), series in record.memory_series.items():
        key = (rank if rank is not None or not base.numbers or record.rank is None else record.rank, kind)
        base.memory_series[key] = base.memory_series.get(key, []) + series
    base.counts.update(record.counts)
    base.failed_allocations += record.failed_allocations
    base.hung_collectives += record.hung_collectives
    base.not_numbers = base.not_numbers or record.not_numbers
    base.spreads = record.spreads | base.spreads
    base.arguments = record.arguments | base.arguments
    base.facts = record.facts | base.facts


def _append(base: RunRecord, later: RunRecord) -> None:
    """Add the steps of a later part of the same run."""
    _add_beside(base, later)
    shift = len(base.numbers)
    base.restart()
    for number, seconds, end_s, covers in zip(later.numbers, later.seconds, later.ends, later.covers, strict=True):
        base.step(number, seconds, end_s=end_s, covers=covers)
    base.state.pop("restarted", None)
    for row, kinds in later.marks.items():
        base.marks[row + shift] = base.marks.get(row + shift, {}) | kinds
    base.activities += later.activities
    for name, pairs in later.timers.items():
        for low_s, high_s in zip(*pairs, strict=True):
            base.timer(name, low_s, high_s)
    for name, values in later.printed.items():
        base.printed.setdefault(name, array("d")).extend(values)
    base.time(later.first_s)
    base.time(later.last_s)
    base.notes |= later.notes
