"""The table of the gap: a row for each thing that may make a run slow or take its memory, and the looks for them.

A row has the evidence that a file must show, what to record where no file does, and what to do about it, which the
planner prices where it can. A look returns None where the files do not show its mechanism, whatever the reason: numbers
of the run itself have to be beyond what is worth a word and their noise, numbers beside a price beyond twice the error
of prices, too. No row is named on the seconds alone: that a step is slow says nothing of why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
OF_MEMORY = ("fragmentation", "leak", "out_of_memory")
"""Rows that answer for memory and for no seconds."""

LONGER, LONGER_ON_HOST = 1.06, 1.2
"""Ranks of one stage differ by 1 to 2% in their clocks; half a dozen of them lie within 5%. A CPU shares its cores."""
NOISE, NOISE_ON_HOST = 0.012, 0.1
"""Least noise of a ratio of two ranks."""
LATE, LATE_ON_HOST = 0.053, 0.107
SLOWER = 1.41
"""Exchanges beside products take up to 1.25 times as long, which share the GPU with them; and prices of links err."""
EXPOSED = 0.05
"""Share of a step from which communication that nothing hides is worth a word."""
LEAST_HIDDEN = 0.35
GROUPS = ("tp", "cp", "dp")
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
        known: dict[int, Account] = {}
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


def rank_name(rank: Traced) -> str:
    """The rank in words."""
    return rank.report.file if rank.report.rank is None else f"rank {rank.report.rank}"


def slow_rank(files: RunFiles) -> Finding | None:
    """One rank that computes longer than the others of its stage, or stands still while they wait for it."""
    found = [*_longer_traced(files), *_longer_printed(files)]
    longest = max(found, key=lambda pair: pair[0], default=None)
    return longest[1] if longest else _comes_late(files) or _apart_timed(files)


def _longer(
    ratio: float, noise: float, on_host: bool, name: str, than: str, more_s: float
) -> Iterable[tuple[float, Finding]]:
    """The finding of a rank whose seconds are so many times those of its peers, if that is beyond noise."""
    least = LONGER_ON_HOST if on_host else LONGER
    if ratio > least and ratio - 1 > 4 * noise:
        yield ratio, Finding(f"{name} computes {ratio - 1:.0%} longer than {than}", max(0.0, more_s), name)


def _longer_traced(files: RunFiles) -> Iterable[tuple[float, Finding]]:
    """Ranks by the median over steps of their computing ÷ that of the others of their stage, which hold its layers."""
    for rank in files.ranks:
        others = [other for other in files.ranks if other is not rank and other.stage == rank.stage]
        if not others or rank.stage is None:
            continue
        mine, *theirs = (
            {step.number: step.compute_s for step in one.report.steps if not step.warm_up} for one in (rank, *others)
        )
        shared = [number for number in mine if all(own.get(number) for own in theirs)]
        ratios = [mine[number] / median(own[number] for own in theirs) for number in shared]
        if ratios:
            ratio = median(ratios)
            spread = 1.25 * SIGMA_OF_MAD * median(abs(each - ratio) for each in ratios) / len(ratios) ** 0.5
            noise = max(NOISE_ON_HOST / 2 if files.on_host else NOISE, spread)
            more_s = rank.middle(compute_s) - median(other.middle(compute_s) for other in others)
            yield from _longer(ratio, noise, files.on_host, rank_name(rank), "its peers", more_s)


def _longer_printed(files: RunFiles) -> Iterable[tuple[float, Finding]]:
    """The rank that `--log-straggler` names again and again: by throughput, or by round trips without a pipeline."""
    for spread in files.observation.rank_spreads:
        than = f"the fastest one, in most of {spread.num_values:,} lines"
        if spread.low <= 0 or spread.num_values < LEAST_LINES:
            continue
        if spread.name == "tflops" and spread.low_share > 0.5:
            rank, more_s = spread.low_rank, (1 - spread.low / spread.high) * files.step_s
        elif spread.name == "round_trip_s" and spread.high_share > 0.5 and files.num_stages == 1:
            rank, more_s = spread.high_rank, spread.high - spread.low
        else:
            continue
        yield from _longer(spread.high / spread.low, 2 * NOISE, False, f"rank {rank}", than, more_s)


def _comes_late(files: RunFiles) -> Finding | None:
    """One rank that stands still by itself, neither computing nor in an exchange, while the others wait for it."""
    rows = []
    for rank in files.ranks if len(files.ranks) > 1 else ():
        others = [other for other in files.ranks if other is not rank]
        more_s = rank.middle(_still_s) - median(other.middle(_still_s) for other in others)
        waited_s = median(other.middle(_waits_s) for other in others) - rank.middle(_waits_s)
        rows.append((min(more_s, waited_s), rank))
    late_s, late = max(rows, key=lambda row: row[0], default=(0.0, None))
    if late is None or late_s < (LATE_ON_HOST if files.on_host else LATE) * files.wall_s:
        return None
    says = f"{rank_name(late)} does nothing for {in_seconds(late_s)} of a step in which the others wait for it"
    return Finding(says, late_s, rank_name(late))


def _apart_timed(files: RunFiles) -> Finding | None:
    """The least and the most of the passes' timers over the ranks, further apart than the layers of their stages."""
    timers, plan = {timer.name: timer for timer in files.observation.timers}, files.plan
    passes = [timers[name] for name in ("forward-compute", "backward-compute") if name in timers]
    if files.ranks or len(passes) < 2 or (plan is None and files.num_stages != 1):
        return None
    low_s, high_s = sum(timer.min_s for timer in passes), sum(timer.max_s for timer in passes)
    stages = [stage.forward_s + stage.backward_s for stage in plan.best.stages] if plan is not None else [1.0]
    due = max(stages) / min(stages)
    if low_s <= 0 or high_s / low_s < (LONGER + 8 * NOISE) * due:
        return None
    says = f"the slowest rank's passes take {high_s / low_s - 1:.0%} longer than the fastest one's"
    return Finding(f"{says}, {due - 1:.0%} by their layers", high_s - low_s * due)


def _still_s(step: TraceStep) -> float:
    """Seconds in which a rank stands still and neither another rank, a stream nor the loader of data explains it."""
    return step.long_gaps_s + step.idle_s - _data_wait_s(step)


def _waits_s(step: TraceStep) -> float:
    return step.exposed_communication_s + step.dependencies_s


def _data_wait_s(step: TraceStep) -> float:
    """Seconds of host gaps in which the loader of data is at work."""
    return sum(length for name, length in step.waits if DATA_RANGES.search(name))


def slow_link(files: RunFiles) -> Finding | None:
    """Transfers, told from waits by several ranks' traces, slower than their links."""
    found = []
    for group in GROUPS:  # those of experts take longer where these are uneven
        known = [pair for pair in files.exchanges(group) if pair[0].late_s is not None]
        moved = ([pair[side].busy_s - (pair[side].late_s or 0.0) for pair in known] for side in (0, 1))
        found_s, due_s = (median(one) if one else 0.0 for one in moved)
        if due_s >= 0.01 * files.step_s and found_s / due_s > SLOWER:
            says = f"transfers of the {group} group take {found_s / due_s:.1f} times as long as over links as planned"
            found.append(Finding(says, found_s - due_s, group))
    return max(found, key=lambda one: one.seconds or 0.0, default=None)


def unhidden(group: str) -> Callable[[RunFiles], Finding | None]:
    """Looks for exchanges of a group that were to hide behind computing, and do not: longer ones alone are no sign."""

    def see(files: RunFiles) -> Finding | None:
        known = files.exchanges(group)
        if not known:
            return None
        found, due = min(known, key=lambda pair: pair[1].hidden_s - pair[0].hidden_s)
        shown_s, due_s = (max(0.0, one.busy_s - one.hidden_s - (one.late_s or 0.0)) for one in (found, due))
        lost_s = min(due.hidden_s - found.hidden_s, shown_s - due_s)
        if found.hidden_s > LEAST_HIDDEN * found.busy_s or lost_s < EXPOSED * files.step_s + 0.16 * due.busy_s:
            return None
        says = f"{found.hidden_s / found.busy_s:.0%} of {group} communication runs behind computing"
        return Finding(f"{says}, {due.hidden_s / due.busy_s:.0%} were to", lost_s, group)

    return see


def growing_memory(files: RunFiles) -> Finding | None:
    """Memory that grows from step to step, in the second half of the run as in the first."""
    rows = [row for row in files.observation.memory_series if len(row.num_bytes) >= LEAST_ROWS]
    return next((found for row in rows if (found := _growth(row)) is not None), None)


def _growth(row: MemorySeries) -> Finding | None:
    """The median slope of all pairs (Theil and Sen) over both halves, against the noise around it."""
    steps, sizes = np.asarray(row.steps, float), np.asarray(row.num_bytes, float)
    half, length = len(steps) // 2, float(steps[-1] - steps[0])
    slope, *halves = (
        slope_of(steps[part], sizes[part]) for part in (slice(None), slice(0, half + 1), slice(half, None))
    )
    straight = sizes - slope * (steps - steps[0])
    noise = SIGMA_OF_MAD * float(np.median(np.abs(straight - np.median(straight))))
    # what warms up grows in the first half alone
    steady = min(slope * length, 2 * min(halves) * length)
    if steady < 1.25 * max(0.03 * float(np.median(sizes)), 3 * noise, MIB):
        return None
    size = f"{slope * length / GIB:.2f} GiB" if slope * length > 0.1 * GIB else f"{slope * length / MIB:.1f} MiB"
    where, kind = "" if row.rank is None else f"rank {row.rank}", row.kind.replace("_", " ")
    whose = f"{kind} memory{f' of {where}' if where else ''}"
    return Finding(f"{whose} grows by {size} over {int(length):,} steps, in both halves", None, where)


unhidden_ep, unhidden_dp = unhidden("ep"), unhidden("dp")
_WORDS: Fields = {
    "GRADIENT_TIMERS": GRADIENT_TIMERS, "LEAST_LINES": LEAST_LINES, "LEAST_STEPS": LEAST_STEPS, "s": in_seconds,
    "gib": lambda num_bytes, places: f"{num_bytes / GIB:.{places}f} GiB", "first": lambda found: next(found, None),
    "requested": attrgetter("requested_bytes"), "in_sequence": lambda one: (one.sequence, not one.collective),
    "map": map, "sorted": sorted,
}  # fmt: skip
"""The names that the looks of `gap.yaml` have beside `files` and `o`."""


def seen(look: Fields, files: RunFiles) -> Finding | None:
    """The finding of a look of the table; None where its condition does not hold."""
    names = {**_WORDS, "files": files, "o": files.observation}
    for name, text in (*look.get("let", {}).items(), ("seconds", look.get("seconds", "None"))):
        names[name] = value_of(text, names)
    if not value_of(look["when"], names):
        return None
    return Finding(text_of(look["says"], names), names["seconds"], text_of(look.get("where", ""), names))


@dataclass(frozen=True, slots=True)
class GapRow:
    """One thing that may be wrong with a run, as `gap.yaml` has it."""

    name: str
    says: str
    record: str
    terms: Texts = ()
    helps: str = ""
    switches: Texts = ()
    options: Texts = ()
    beside: bool = False
    sees: tuple[str | Fields, ...] = ()
    layouts: str = ""

    @property
    def looks(self) -> list[Callable[[RunFiles], Finding | None]]:
        """Looks for the row's mechanism, one after the other; none where only the log's own arguments can show it."""
        return [globals()[look] if isinstance(look, str) else partial(seen, look) for look in self.sees]

    def at(self, where: str) -> str:
        """The row in words, of a rank or stage that is known."""
        if where.split(" ")[0] in ("rank", "stage"):
            return self.says.replace("one rank", where) if "one rank" in self.says else f"{where}: {self.says}"
        return f"{self.says} ({where})" if where else self.says


GAP_ROWS: Mapping[str, GapRow] = {name: GapRow(name, **row) for name, row in GAP_TABLE["rows"].items()}
"""Every row by the name that `causes` has; another is a row there, and the function that it `sees` by."""
