"""The record that the rows of a grammar fill: compact arrays of steps, and what is known of everything else."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import chain
from statistics import median
from typing import Any

from planner.observe.observation import FailedAllocation, HungCollective, JobFacts

MOST_VALUES = 4_000
"""The most values of a series; of more, every 2nd, 4th, … in even distances, the last one always."""


@dataclass(slots=True)
class ThinnedSeries:
    """Values at steps, in the order in which they came; values of one step are one, the highest."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    stride: int = 1
    """Each kept value stands for so many, of which it is the highest."""
    _num_of_last: int = 0

    def add(self, step: int, value: float) -> None:
        """Take a value at a step."""
        if self.steps and (step == self.steps[-1] or self._num_of_last < self.stride):
            self._num_of_last += step != self.steps[-1]
            self.values[-1] = max(self.values[-1], value)
            self.steps[-1] = step
            return
        if len(self.steps) >= MOST_VALUES:
            self._halve()
        self.steps.append(step)
        self.values.append(value)
        self._num_of_last = 1

    def extend(self, later: ThinnedSeries) -> None:
        """Take the values of a later part."""
        for step, value in zip(later.steps, later.values, strict=True):
            self.add(step, value)

    def _halve(self) -> None:
        pairs = range(0, len(self.steps) - 1, 2)
        self.values = array("d", (max(self.values[row], self.values[row + 1]) for row in pairs))
        self.steps = array("q", (self.steps[row + 1] for row in pairs))
        self.stride *= 2


MAX_STEPS = 2_000_000
"""The most rows of steps that are kept: 64 MB. A year of steps of 16 s; later ones are counted and said to be left."""
KEPT_ROWS = 8_192
"""Rows that a record of a followed run keeps at least, and twice as many at most: 1 MB, and 64 kB for every timer."""
MAX_TIMER_VALUES = 20_000
MAX_NAMES = 2_000
"""The most timers, ranks or arguments: a file with more is no log of one job."""
MOST_RANKS = 200_000
MOST_OF_RANK = 15
"""Values of one rank's timer of which the median is told: one step says little of a rank."""
MOST_SERIES = 256
"""The most series of memory, one for each rank and kind: 16 MB."""
_NEAR_STEPS = 3
"""A number that falls back by no more was printed late by another rank; a restart goes further back, or waits."""
_LONG_GAP = 8.0
"""Steps without a line before one that falls back: what a restart takes at least."""


@dataclass(slots=True)
class FallBack:
    """A place where the step number fell back."""

    row: int
    """The first row after it."""
    from_step: int
    lost_rows: tuple[int, int]
    """The rows that were made again: [first, last exclusive)."""


@dataclass(slots=True)
class SpreadOverRanks:
    """The least and the most of a number over the ranks, line after line."""

    lows: array[float] = field(default_factory=lambda: array("d"))
    highs: array[float] = field(default_factory=lambda: array("d"))
    low_ranks: array[int] = field(default_factory=lambda: array("q"))
    """The rank that had the least."""
    high_ranks: array[int] = field(default_factory=lambda: array("q"))
    ranks: dict[int, float] = field(default_factory=dict)
    """The last value of single ranks, where a line lists them."""


def vars_of(record: RunRecord) -> dict[str, Any]:
    """The fields of a record by name."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


@dataclass(slots=True)
class RunRecord:
    """The facts that one grammar read in one file."""

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
    marks: dict[int, set[str]] = field(default_factory=dict)
    """Row to what was said to happen between it and the row before: checkpoint, evaluation, gc, …"""
    activities: list[tuple[str, float, float]] = field(default_factory=list)
    """Kind, begin and end of what has both: start-up, evaluation, checkpoint."""
    mark_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds that a mark is said to have taken, by kind and row."""
    timers: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    rank_timers: dict[str, dict[int, array[float]]] = field(default_factory=dict)
    memory: dict[int | None, dict[str, int]] = field(default_factory=dict)
    memory_series: dict[tuple[int | None, str], ThinnedSeries] = field(default_factory=dict)
    """The same over steps, by rank and kind."""
    spreads: dict[str, SpreadOverRanks] = field(default_factory=dict)
    """Numbers of single ranks that a line names: clocks, power, seconds."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often something happened: out of memory, retries of the allocator, steps skipped."""
    means: list[tuple[float, float, float]] = field(default_factory=list)
    """Stretches of steps whose mean alone is recorded: what was counted at the end, seconds of a step, the time."""
    failed_allocations: list[FailedAllocation] = field(default_factory=list)
    hung_collectives: list[HungCollective] = field(default_factory=list)
    links: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    printed: dict[str, array[float]] = field(default_factory=dict)
    """Numbers that the trainer works out itself, such as tflops, mfu and tokens_per_s."""
    facts: dict[str, str | int] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    """Things that one line says about the next."""
    notes: dict[str, None] = field(default_factory=dict)
    first_s: float = math.nan
    last_s: float = math.nan
    is_first_alike: bool = False
    """True where the first step has no warm-up that is worth a word, as an iteration of minutes has not."""
    is_cut: bool = False
    """True where earlier rows were forgotten."""
    duplicates: int = 0
    left_steps: int = 0
    words: Counter[str] = field(default_factory=Counter)
    """How many rows of the grammar's table each line was of."""

    def step(
        self, number: int, seconds: float, *, end_s: float = math.nan, covers: int = 0, rank: int | None = None
    ) -> bool:
        """Take a row of steps: false where it was printed before, by this rank or another.

        `covers` is the number of steps that it is the mean of; 0 where only the row before says that.
        """
        if not (math.isfinite(seconds) and 0 < seconds < 1e7) or not 0 <= number < 2**60:
            self.note("some lines of steps have impossible numbers and were left out")
            return False
        if rank is not None:
            self.rank = rank if self.rank is None else self.rank
            if rank != self.rank:
                self.duplicates += 1
                return False
        if self.numbers and number <= self.numbers[-1] and not self._is_restart(number, end_s):
            self.duplicates += 1
            return False
        if len(self.numbers) >= MAX_STEPS:
            self.left_steps += 1
            return False
        if self.numbers and number <= self.numbers[-1]:
            self._fall_back(number, covers)
        before = self._before(number)
        self.numbers.append(number)
        self.seconds.append(seconds)
        self.covers.append(min(covers or max(1, number - before), 2**31 - 1))
        self.ends.append(end_s)
        self.time(end_s)
        return True

    def _before(self, number: int) -> int:
        """The number of the step before a row, as far as the rows say it."""
        if not self.numbers:
            return number - 1
        if number > self.numbers[-1]:
            return self.numbers[-1]
        return number - self.covers[-1]

    def _is_restart(self, number: int, end_s: float) -> bool:
        """True where a number that falls back is of a step made again, false where it was only printed again."""
        last = self.numbers[-1]
        if number == last or "restarted" in self.state:
            return "restarted" in self.state
        waits_s = end_s - self.ends[-1]
        if last - number > _NEAR_STEPS * self.covers[-1]:
            return True
        return waits_s > _LONG_GAP * self.seconds[-1] * self.covers[-1]

    def _fall_back(self, number: int, covers: int) -> None:
        lost = len(self.numbers)
        begin = number - (covers or self.covers[-1])
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
        if before == layout or not self.numbers:
            return
        self.note(
            f"{len(self.numbers):,} lines of steps before are of a run with another layout, and left out: "
            "give that part of the log by itself"
        )
        kept = {name: getattr(self, name) for name in ("rank", "facts", "arguments", "state", "notes", "words")}
        for name, value in vars_of(RunRecord(self.grammar)).items():
            setattr(self, name, kept.get(name, value))
        self.state.pop("restarted", None)

    def time(self, at_s: float) -> None:
        """Note a moment that the log has."""
        if math.isfinite(at_s) and at_s > 0:
            self.first_s = at_s if math.isnan(self.first_s) else min(self.first_s, at_s)
            self.last_s = at_s if math.isnan(self.last_s) else max(self.last_s, at_s)

    def mark(self, kind: str, seconds: float | None = None) -> None:
        """Note that something other than steps happened after the last row."""
        row = len(self.numbers)
        self.marks.setdefault(row, set()).add(kind)
        if seconds is not None and math.isfinite(seconds) and seconds >= 0:
            of_kind = self.mark_s.setdefault(kind, {})
            of_kind[row] = of_kind.get(row, 0.0) + seconds

    def activity(self, kind: str, begin_s: float, end_s: float) -> None:
        """Note something that took from one moment to another."""
        if math.isfinite(begin_s) and math.isfinite(end_s) and begin_s <= end_s:
            self.activities.append((kind, begin_s, end_s))
            self.time(begin_s)
            self.time(end_s)

    def timer(self, name: str, low_s: float, high_s: float) -> None:
        """Take what a timer shows: the least and the most over the ranks."""
        if name not in self.timers and len(self.timers) >= MAX_NAMES:
            return
        lows, highs = self.timers.setdefault(name, (array("d"), array("d")))
        if len(lows) < MAX_TIMER_VALUES and 0 <= low_s <= high_s < 1e9:
            lows.append(low_s)
            highs.append(high_s)

    def rank_timer(self, name: str, rank: int, seconds: float) -> None:
        """Take what a timer of one rank shows; of many, the last `MOST_OF_RANK`."""
        of_ranks = self.rank_timers.setdefault(name, {})
        if (rank in of_ranks or len(of_ranks) < MOST_RANKS) and 0 <= seconds < 1e9:
            values = of_ranks.setdefault(rank, array("d"))
            values.append(seconds)
            if len(values) > MOST_OF_RANK:
                values.pop(0)

    def of_ranks(self, name: str) -> dict[int, float]:
        """The median of what each rank's timer showed last."""
        return {rank: median(values) for rank, values in self.rank_timers.get(name, {}).items()}

    def bytes_of(self, rank: int | None, step: int | None = None, /, **kinds: float | None) -> None:
        """Take memory of a rank after a step, the last one where none is said; the highest of each kind is kept."""
        known = self.highest(rank, **kinds)
        at = step if step is not None else self.numbers[-1] if self.numbers else 0
        for kind, value in known.items():
            key = (rank, kind)
            if key in self.memory_series or len(self.memory_series) < MOST_SERIES:
                self.memory_series.setdefault(key, ThinnedSeries()).add(at, value)

    def highest(self, rank: int | None, **kinds: float | None) -> dict[str, int]:
        """Keep the highest of each kind of memory, and return what is a number of bytes."""
        known = {kind: round(value) for kind, value in kinds.items() if value is not None and 0 < value < 2**50}
        if not known or (rank not in self.memory and len(self.memory) >= MOST_RANKS):
            return {}
        of_rank = self.memory.setdefault(rank, {})
        for kind, value in known.items():
            of_rank[kind] = max(of_rank.get(kind, 0), value)
        return known

    def spread(self, name: str, low: tuple[float, int], high: tuple[float, int]) -> None:
        """Take the least and the most of a number over the ranks, each with its rank."""
        spread = self.spreads.setdefault(name, SpreadOverRanks())
        if math.isfinite(low[0]) and math.isfinite(high[0]) and len(spread.lows) < MAX_TIMER_VALUES:
            spread.lows.append(low[0])
            spread.highs.append(high[0])
            spread.low_ranks.append(low[1])
            spread.high_ranks.append(high[1])

    def prints(self, name: str, value: float | None) -> None:
        """Take a number that the trainer works out itself."""
        if value is not None and math.isfinite(value) and value > 0:
            values = self.printed.setdefault(name, array("d"))
            if len(values) < MAX_STEPS:
                values.append(value)

    def argument(self, name: str, value: str) -> None:
        """Take an argument of the trainer's dump; the last value of a name counts."""
        if name in self.arguments or len(self.arguments) < MAX_NAMES:
            self.arguments[name] = value

    def forget(self, rows: int) -> int:
        """Keep the last rows of steps, and of timers and others as many values; the number of rows forgotten.

        Memory, facts, counts and notes stay those of the whole run.
        """
        cut = max(0, len(self.numbers) - rows)
        if not cut:
            return 0
        self.is_cut = True
        begin_s = self.ends[cut] - self.seconds[cut] * self.covers[cut]
        self.backs = [
            FallBack(back.row - cut, back.from_step, (max(0, back.lost_rows[0] - cut), max(0, back.lost_rows[1] - cut)))
            for back in self.backs
            if back.row > cut
        ]
        self.marks = {row - cut: kinds for row, kinds in self.marks.items() if row >= cut}
        self.mark_s = {
            kind: {row - cut: seconds for row, seconds in of_kind.items() if row >= cut}
            for kind, of_kind in self.mark_s.items()
        }
        if math.isfinite(begin_s):
            self.first_s = begin_s
            self.activities = [activity for activity in self.activities if activity[2] > begin_s]
        else:
            del self.activities[:-rows]
        for values in (self.numbers, self.seconds, self.covers, self.ends):
            del values[:cut]
        of_spreads = [(s.lows, s.highs, s.low_ranks, s.high_ranks) for s in self.spreads.values()]
        lists: list[Any] = [*self.printed.values(), *self.links.values(), *chain(*self.timers.values(), *of_spreads)]
        for longest in lists:
            del longest[:-rows]
        return cut

    def note(self, text: str) -> None:
        self.notes[text] = None

    def job_facts(self) -> JobFacts:
        """The facts that single lines state."""
        known = {name: value for name, value in self.facts.items() if name in JobFacts.model_fields}
        return JobFacts.model_validate(known)
