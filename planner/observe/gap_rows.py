"""The table of the gap: a row for each thing that may make a run slow or take its memory, and the looks for them.

A row has the evidence that a file must show, what to record where no file does, and what to do about it, which the
planner prices where it can. A look returns None where the files do not show its mechanism, whatever the reason: numbers
of the run itself have to be beyond what is worth a word and their noise, numbers beside a price beyond twice the error
of prices, too. No row is named on the seconds alone: that a step is slow says nothing of why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from statistics import median

import numpy as np

from planner.layout.candidate import Candidate
from planner.observe.accounts import (
    GAP_TABLE,
    Account,
    GroupExchanges,
    Traced,
    account_of,
    compute_s,
    in_seconds,
    planned,
    traced_of,
    wall_s,
)
from planner.observe.case import ObservedCase, fewer_recomputed, grid_of, moves, running, stage_of
from planner.observe.observation import MemorySeries
from planner.observe.steady import SIGMA_OF_MAD, slope_of
from planner.observe.traces.dumps import SnapshotOutOfMemory
from planner.observe.traces.events import DATA_RANGES, HOST, TraceStep
from planner.specs.base import Fields, Texts
from planner.specs.expressions import text_of, value_of
from planner.specs.units import GIB, MIB

RECORDINGS: Mapping[str, str] = GAP_TABLE["recordings"]
"""How to record what would show a row."""
OF_MEMORY = ("fragmentation", "leak", "out_of_memory", "memory_limit")
"""Rows that answer for memory and for no seconds."""

GRADIENT_TIMERS = (
    "all-grads-sync", "grads-all-reduce", "backward-params-all-reduce", "backward-reduce-model-grads",
    "params-all-gather", "bwd_allreduce",
)  # fmt: skip
"""Timers of what of gradients and parameters is not hidden."""
LEAST_STEPS, LEAST_ROWS, LEAST_LINES = 20, 6, 3


@dataclass(frozen=True, slots=True)
class Finding:
    """A mechanism that the files show."""

    says: str
    """A clause with its numbers, such as `rank 3 computes 12% longer than its peers`."""
    seconds: float | None = None
    """Seconds of a step that it takes; None where nothing tells."""
    where: str = ""
    """The rank, stage, group or switch that it is about."""


class RunFiles(ObservedCase):
    """A case as the rows of the gap read it."""

    @cached_property
    def step_s(self) -> float:
        """Seconds of a steady step; infinity where there is none, so that no share of it is worth a word."""
        return self.observation.step_s or float("inf")

    @cached_property
    def ranks(self) -> tuple[Traced, ...]:
        """The ranks that have traces of steps, by number."""
        return tuple(traced_of(self))

    @cached_property
    def accounts(self) -> tuple[tuple[Account, Account | None], ...]:
        """Every rank with a GPU's trace, and what was planned of its stage."""
        candidate, grid = self.candidate, grid_of(self)
        known = {}
        if candidate is not None and self.ranks and self.prediction and self.prediction.kind == "plan":
            pipeline = candidate.run()
            known = {n: planned(candidate, pipeline, n, "in the plan") for n in range(int(candidate.shape.pp))}
        piped = grid is None or bool(grid.pp > 1)
        return tuple(
            (account_of(rank, piped), known.get(-1 if rank.stage is None else rank.stage))
            for rank in self.ranks
            if rank.report.device != HOST
        )

    @cached_property
    def failures(self) -> list[SnapshotOutOfMemory]:
        """The allocations that failed, by memory snapshots."""
        snapshots = self.recorded.snapshots if self.recorded else ()
        return [one.out_of_memory for one in snapshots if one.out_of_memory]

    @cached_property
    def on_host(self) -> bool:
        """True where a trace has no GPU's events."""
        return any(rank.report.device == HOST for rank in self.ranks)

    @cached_property
    def wall_s(self) -> float:
        """Seconds of a step in the traces, which a profiler makes longer; infinity without traces."""
        return median(rank.mean(wall_s) for rank in self.ranks) if self.ranks else float("inf")

    @cached_property
    def num_stages(self) -> int | None:
        """Pipeline stages by the plan, else by the run's own arguments; None where neither says it."""
        grid = grid_of(self)
        return None if grid is None else int(grid.pp)

    @cached_property
    def data_waits(self) -> list[tuple[float, str]]:
        """Mean seconds of a step in which ranks wait for data, by their traces, each with its rank; the most first."""
        return sorted(((rank.mean(_data_wait_s), rank_name(rank)) for rank in self.ranks), reverse=True)

    @cached_property
    def gpus_compute_s(self) -> float:
        """Seconds of a step in which a GPU computes, by the traces."""
        return self._of_gpus(compute_s)

    def family_s(self, wanted: str) -> float:
        """Seconds of a step in kernels of a family."""
        return self._of_gpus(lambda step: sum(one.seconds for one in step.families if one.family == wanted))

    def _of_gpus(self, seconds_of: Callable[[TraceStep], float]) -> float:
        gpus = [rank.middle(seconds_of) for rank in self.ranks if rank.report.device != HOST]
        return median(gpus) if gpus else 0.0

    def least_beyond(self, part: str) -> tuple[float, float]:
        """Seconds of a part of the step on the rank where they are least beyond what was planned, and those planned."""
        pairs = [(found.parts.get(part, 0.0), due.parts[part] if due else 0.0) for found, due in self.accounts]
        return min(pairs, key=lambda pair: pair[0] - pair[1], default=(0.0, 0.0))

    def now_and_then_s(self, kind: str, word: str = "") -> float:
        """Seconds of a mean step by slow ones of one kind, by name or by what the log says of them."""
        slow_s = sum(row.extra_s for row in self.observation.outliers if row.kind == kind and word in row.likely)
        return slow_s / max(1, self.observation.num_steps)

    @cached_property
    def less_recomputed(self) -> tuple[Candidate, Candidate] | None:
        """The layout, and the fastest that recomputes fewer layers and still fits; None where no peak is known."""
        now = running(self)
        if now is None or self.observation.peak_memory_bytes is None:
            return None
        return now, min((one for _, one in moves(now, fewer_recomputed)), key=lambda one: one.step_s, default=now)

    def stage_of_rank(self, rank: int | None) -> int | None:
        """The pipeline stage of a rank; None where nothing tells."""
        grid = grid_of(self)
        return None if rank is None or grid is None else stage_of(grid, rank)

    def planned_peak_bytes(self, stage: int | None) -> int | None:
        """Bytes that were planned to be allocated on a stage, or on the fullest one; None without a plan."""
        if self.plan is None:
            return None
        best = self.plan.best
        return (best.worst_stage if stage is None else best.stages[stage]).memory.peak_allocated_bytes

    def exchanges(self, group: str) -> list[tuple[GroupExchanges, GroupExchanges]]:
        """A group's exchanges on each rank, found and expected."""
        return [
            (found.exchanges[group], expected.exchanges[group])
            for found, expected in self.accounts
            if expected and group in found.exchanges and group in expected.exchanges
        ]

    def transfers_s(self, group: str) -> tuple[float, float]:
        """Seconds of a group's transfers, told from waits by several ranks' traces, found and expected."""
        known = [pair for pair in self.exchanges(group) if pair[0].late_s is not None]
        found_s, due_s = ([pair[side].busy_s - (pair[side].late_s or 0.0) for pair in known] for side in (0, 1))
        return (median(found_s), median(due_s)) if known else (0.0, 0.0)

    def least_unhidden(self, group: str) -> list[tuple[str, GroupExchanges, GroupExchanges]]:
        """A group's exchanges, found and expected, on the rank that hides most of what was to be hidden, if any is."""
        known = sorted(self.exchanges(group), key=lambda pair: pair[1].hidden_s - pair[0].hidden_s)
        return [(group, *pair) for pair in known[:1]]

    @property
    def ratios(self) -> Iterator[tuple[str, float, float, float]]:
        """Ranks by the median over steps of their computing ÷ that of the others of their stage, which hold its layers:
        the name, the ratio, its noise, and the seconds more."""
        for rank in self.ranks:
            others = [other for other in self.ranks if other is not rank and other.stage == rank.stage]
            if not others or rank.stage is None:
                continue
            mine, *theirs = (
                {step.number: step.compute_s for step in one.report.steps if not step.warm_up}
                for one in (rank, *others)
            )
            shared = [number for number in mine if all(own.get(number) for own in theirs)]
            ratios = [mine[number] / median(own[number] for own in theirs) for number in shared]
            if ratios:
                ratio = median(ratios)
                noise = 1.25 * SIGMA_OF_MAD * median(abs(each - ratio) for each in ratios) / len(ratios) ** 0.5
                more_s = rank.middle(compute_s) - median(other.middle(compute_s) for other in others)
                yield rank_name(rank), ratio, noise, max(0.0, more_s)

    @property
    def still(self) -> Iterator[tuple[str, float]]:
        """Ranks by name with the seconds that each stands still by itself, neither computing nor in an exchange, while
        the others wait for it."""
        for rank in self.ranks if len(self.ranks) > 1 else ():
            others = [other for other in self.ranks if other is not rank]
            more_s = rank.middle(_still_s) - median(other.middle(_still_s) for other in others)
            waited_s = median(other.middle(_waits_s) for other in others) - rank.middle(_waits_s)
            yield rank_name(rank), min(more_s, waited_s)

    @property
    def growths(self) -> Iterator[tuple[MemorySeries, float, float, float]]:
        """Memory over the steps of a rank: the bytes by which it grows (the median slope of all pairs, Theil and Sen),
        those that both halves of the run have in common, and the noise around it."""
        for row in self.observation.memory_series:
            steps, sizes = np.asarray(row.steps, float), np.asarray(row.num_bytes, float)
            half, length = len(steps) // 2, float(steps[-1] - steps[0])
            slope, *halves = (
                slope_of(steps[part], sizes[part]) for part in (slice(None), slice(0, half + 1), slice(half, None))
            )
            straight = sizes - slope * (steps - steps[0])
            noise = SIGMA_OF_MAD * float(np.median(np.abs(straight - np.median(straight))))
            # what warms up grows in the first half alone
            yield row, slope * length, min(slope * length, 2 * min(halves) * length), noise


def rank_name(rank: Traced) -> str:
    """The rank in words."""
    return rank.report.file if rank.report.rank is None else f"rank {rank.report.rank}"


def _still_s(step: TraceStep) -> float:
    """Seconds in which a rank stands still and neither another rank, a stream nor the loader of data explains it."""
    return step.long_gaps_s + step.idle_s - _data_wait_s(step)


def _waits_s(step: TraceStep) -> float:
    return step.exposed_communication_s + step.dependencies_s


def _data_wait_s(step: TraceStep) -> float:
    """Seconds of host gaps in which the loader of data is at work."""
    return sum(length for name, length in step.waits if DATA_RANGES.search(name))


_WORDS: Fields = {
    "GRADIENT_TIMERS": GRADIENT_TIMERS, "LEAST_LINES": LEAST_LINES, "LEAST_STEPS": LEAST_STEPS,
    "LEAST_ROWS": LEAST_ROWS, "s": in_seconds, "median": median, "MIB": MIB, "GIB": GIB,
    "gib": lambda num_bytes, places: f"{num_bytes / GIB:.{places}f} GiB", "first": lambda found: next(found, None),
    "requested": attrgetter("requested_bytes"), "in_sequence": lambda one: (one.sequence, not one.collective),
    "map": map, "sorted": sorted,
}  # fmt: skip
"""The names that the looks of `gap.yaml` have beside `files` and `o`."""


def seen(look: Fields, files: RunFiles) -> Finding | None:
    """The finding of a look of the table, of several the one that takes most; None where it holds of none."""
    names, found = {**_WORDS, "files": files, "o": files.observation}, []
    for thing in value_of(look.get("each", "[None]"), names):
        names["it"] = thing
        for name, text in (*look.get("let", {}).items(), ("seconds", look.get("seconds", "None"))):
            names[name] = value_of(text, names)
        if value_of(look["if"], names):
            where = text_of(look.get("where", ""), names)
            found.append(Finding(text_of(look["says"], names), names["seconds"], where))
    return max(found, key=lambda one: one.seconds or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class GapRow:
    """One thing that may be wrong with a run, as `gap.yaml` has it."""

    name: str
    says: str
    record: str
    evidence: str = ""
    terms: Texts = ()
    helps: str = ""
    switches: Texts = ()
    options: Texts = ()
    beside: bool = False
    sees: tuple[Fields, ...] = ()
    layouts: str = ""

    @property
    def looks(self) -> list[Callable[[RunFiles], Finding | None]]:
        """Looks for the row's mechanism, one after the other; none where only the log's own arguments can show it."""
        return [partial(seen, look) for look in self.sees]

    def at(self, where: str) -> str:
        """The row in words, of a rank or stage that is known."""
        if where.split(" ")[0] in ("rank", "stage"):
            return self.says.replace("one rank", where) if "one rank" in self.says else f"{where}: {self.says}"
        return f"{self.says} ({where})" if where else self.says


GAP_ROWS: Mapping[str, GapRow] = {name: GapRow(name, **row) for name, row in GAP_TABLE["rows"].items()}
"""Every row by the name that `causes` has; another is a row there."""
