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
from statistics import median

import numpy as np

from planner.observe.accounts import (
    GAP_TABLE,
    HOST_GAPS,
    PIPELINE,
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
from planner.specs.base import Texts
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
GAPS, GAPS_UNPRICED = 0.05, 0.133
"""Shares of a step from which host gaps are worth a word: beside a price of them, and where nothing says the usual."""
DATA_SHARE, SOFTMAX_SHARE, CHECKPOINT_SHARE, GARBAGE_SHARE = 0.038, 0.025, 0.04, 0.0125
LOWER_CLOCK = 0.93
"""Clocks of GPUs of one kind at one load lie within a few percent."""
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

    def exchanges(self, group: str) -> list[tuple[GroupExchanges, GroupExchanges]]:
        """A group's exchanges on each rank, found and expected."""
        return [
            (found.exchanges[group], expected.exchanges[group])
            for found, expected in self.accounts
            if expected and group in found.exchanges and group in expected.exchanges
        ]


def _beyond(seconds: float, least_s: float, says: str, where: str = "") -> Finding | None:
    return None if seconds < least_s else Finding(says, seconds, where)


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


def gradient_timers(files: RunFiles) -> Finding | None:
    """The trainer's timers of gradients and parameters of the rank that waits least, beyond those planned to show."""
    timers = [timer.min_s for timer in files.observation.timers if timer.name in GRADIENT_TIMERS]
    prediction = files.prediction
    if not timers or prediction is None or prediction.kind == "run" or files.ranks:
        return None
    found_s, due_s = sum(timers), prediction.breakdown.get("exposed_dp_s", 0.0)
    says = f"timers of gradients and parameters show {in_seconds(found_s)} of a step, {in_seconds(due_s)} expected"
    return _beyond(found_s - due_s, EXPOSED * files.step_s + 0.16 * due_s, says, "dp")


def uneven_experts(files: RunFiles) -> Finding | None:
    """Every rank waits in exchanges of experts, since the late one changes."""
    known = [found.late_s - (due.late_s or 0.0) for found, due in files.exchanges("ep") if found.late_s is not None]
    least_s = min(known) if len(known) > 1 else 0.0
    says = f"each rank waits {in_seconds(least_s)} more of a step in exchanges of experts: the late one changes"
    return _beyond(least_s, 0.04 * files.step_s, says, "ep")


def _apart(files: RunFiles, part: str) -> tuple[float, float]:
    """Seconds of a part of the step on the rank where they are least beyond what was planned, and those planned."""
    pairs = [(found.parts.get(part, 0.0), due.parts[part] if due else 0.0) for found, due in files.accounts]
    return min(pairs, key=lambda pair: pair[0] - pair[1], default=(0.0, 0.0))


def host_gaps(files: RunFiles) -> Finding | None:
    """Time in which no rank's GPU has work because its host has not launched any; waits for data are not counted."""
    found_s, due_s = _apart(files, HOST_GAPS)
    if files.has_log and files.ranks:
        found_s -= max(0.0, files.wall_s - files.step_s)  # the profiler's own
    share = GAPS if any(due for _, due in files.accounts) else GAPS_UNPRICED
    held = f", {in_seconds(due_s)} expected" if due_s else ""
    says = f"GPUs wait {in_seconds(found_s)} of a step for their hosts to launch work{held}"
    return _beyond(found_s - due_s, share * files.step_s + 0.3 * due_s, says)


def data_waits(files: RunFiles) -> Finding | None:
    """Annotations of the loader that cover gaps, or the trainer's own timer of its batches."""
    worst = max(files.ranks, key=lambda rank: rank.mean(_data_wait_s), default=None)
    if worst is not None and (waited_s := worst.mean(_data_wait_s)) > DATA_SHARE * files.wall_s:
        others = [rank.mean(_data_wait_s) for rank in files.ranks if rank is not worst]
        where = rank_name(worst) if others and max(others) < 0.5 * waited_s else ""
        return Finding(f"{rank_name(worst)} waits {in_seconds(waited_s)} of a step for data", waited_s, where)
    timed_s = files.observation.data_s
    if timed_s is None or timed_s < DATA_SHARE * files.step_s:
        return None
    return Finding(f"the trainer's timer of batches shows {in_seconds(timed_s)} of a step", timed_s)


def slow_attention(files: RunFiles) -> Finding | None:
    """Attention in products and a softmax of its own."""
    gpus = [rank for rank in files.ranks if rank.report.device != HOST]
    softmax_s, fused_s, all_s = (
        median(rank.middle(of) for rank in gpus) if gpus else 0.0
        for of in (lambda step: _family_s(step, "softmax"), lambda step: _family_s(step, "attention"), compute_s)
    )
    if softmax_s - fused_s <= SOFTMAX_SHARE * all_s:
        return None
    fused = f"those of fused attention {in_seconds(fused_s)}"
    return Finding(f"kernels of softmax take {in_seconds(softmax_s)} of a step, {fused}", softmax_s)


def _family_s(step: TraceStep, wanted: str) -> float:
    return sum(family.seconds for family in step.families if family.family == wanted)


def low_clocks(files: RunFiles) -> Finding | None:
    """Clocks that the files print: lower than in an earlier run, or one rank's again and again below the others'."""
    earlier, now = files.earlier, files.observation.clock_mhz
    then = earlier.observation.clock_mhz if earlier else None
    if now and then and now < LOWER_CLOCK * then:
        return Finding(f"GPUs run at {now:,.0f} MHz, {then:,.0f} in the earlier run", (1 - now / then) * files.step_s)
    for one in files.observation.rank_spreads:
        often = one.low_share > 0.5 and one.num_values >= LEAST_LINES
        if one.name == "clock_mhz" and often and one.low < LOWER_CLOCK * one.high:
            says = f"rank {one.low_rank} runs at {one.low:,.0f} MHz in most of {one.num_values:,} lines"
            return Finding(f"{says}, the fastest at {one.high:,.0f}", None, f"rank {one.low_rank}")
    return None


def standing_stages(files: RunFiles) -> Finding | None:
    """Stages that stand still longer than the order of the passes says."""
    found_s, due_s = _apart(files, PIPELINE)
    if files.num_stages in (None, 1) or not all(due for _, due in files.accounts):
        return None
    says = f"stages stand still for {in_seconds(found_s)} of a step, {in_seconds(due_s)} by their order"
    return _beyond(found_s - due_s, 0.05 * files.step_s + 0.2 * due_s, says)


def fragments(files: RunFiles) -> Finding | None:
    """Allocations that found no block until the cache was freed, or that failed although enough bytes lay free."""
    observation = files.observation
    for oom in files.failures:
        if oom.fragmented:
            says = f"{oom.requested_bytes / GIB:.1f} GiB were refused while {oom.inactive_bytes / GIB:.1f} GiB lay"
            return Finding(f"{says} reserved and free, {oom.largest_free_block_bytes / GIB:.1f} GiB in one block")
    for one in observation.failed_allocations:
        if one.unused_bytes is not None and one.unused_bytes >= one.requested_bytes:
            says = f"{one.requested_bytes / GIB:.2f} GiB were refused while {one.unused_bytes / GIB:.1f} GiB lay"
            return Finding(f"{says} reserved and free")
    if (count := observation.num_alloc_retries or 0) > 1:
        return Finding(f"the allocator freed its cache and tried again {count:,} times")
    return None


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


def out_of_memory(files: RunFiles) -> Finding | None:
    """Errors of allocations that failed, as the log or a snapshot has them, beside what was planned of the stage."""
    observation = files.observation
    if files.failures:
        return Finding(f"an allocation of {files.failures[-1].requested_bytes / GIB:.2f} GiB failed")
    if not observation.failed_allocations:
        return Finding(f"{observation.num_ooms:,} allocations failed") if observation.num_ooms else None
    one = max(observation.failed_allocations, key=lambda each: each.requested_bytes)
    where, plan, grid = "" if one.rank is None else f"rank {one.rank}", files.plan, grid_of(files)
    parts = [f"an allocation of {one.requested_bytes / GIB:.2f} GiB failed{f' on {where}' if where else ''}"]
    if one.allocated_bytes is not None:
        parts.append(f"torch held {one.allocated_bytes / GIB:.1f} GiB")
    if one.unused_bytes is not None:
        parts.append(f"{one.unused_bytes / GIB:.1f} GiB reserved beside them")
    if plan is not None:
        stage = None if one.rank is None or grid is None else stage_of(grid, one.rank)
        planned_stage = plan.best.worst_stage if stage is None else plan.best.stages[stage]
        whose = "on the fullest stage" if stage is None else f"on its stage {stage}"
        parts.append(f"{planned_stage.memory.peak_allocated_bytes / GIB:.1f} GiB were planned {whose}")
    return Finding(", ".join(parts), None, where)


def hung_collective(files: RunFiles) -> Finding | None:
    """A collective that began and never ended, by a flight recorder's dumps or the watchdog's lines in the log."""
    flight = files.recorded.flight_recorder if files.recorded else None
    if flight is not None and any(group.outstanding or group.mismatches for group in flight.groups):
        return Finding(flight.verdict)
    hung = files.observation.hung_collectives
    if not hung:
        return None
    first = min(hung, key=lambda one: (one.sequence, not one.collective))
    ranks = sorted({one.rank for one in hung if one.sequence == first.sequence and one.rank is not None})
    size = f" of {first.num_elements:,} elements" if first.num_elements else ""
    waited = f" for {first.seconds:,.0f} s" if first.seconds else ""
    what = f"{first.collective or 'the collective'} number {first.sequence}{size}"
    return Finding(f"rank {', '.join(map(str, ranks)) or '?'} waited in {what}{waited}, which never ended")


def saving(files: RunFiles) -> Finding | None:
    """Time that checkpoints take: between steps, in them, and in the step after them."""
    wall = files.observation.wall
    return _now_and_then(files, "checkpoint", CHECKPOINT_SHARE, "checkpoints", wall.checkpoint_s if wall else 0.0)


def _now_and_then(
    files: RunFiles, kind: str, share: float, what: str, beside_s: float = 0.0, word: str = ""
) -> Finding | None:
    """The finding of slow steps of one kind, by name or by what the log says of them, and of seconds beside steps."""
    observation = files.observation
    slow_s = sum(row.extra_s for row in observation.outliers if row.kind == kind and word in row.likely)
    extra_s = (slow_s + beside_s) / max(1, observation.num_steps)
    if observation.num_steps < LEAST_STEPS or extra_s < share * files.step_s:
        return None
    return Finding(f"{what} take {in_seconds(extra_s)} of a mean step", extra_s)


def recomputed_with_room(files: RunFiles) -> Finding | None:
    """Layers recomputed although the peak in the files leaves the memory that keeping their activations takes."""
    now, peak = running(files), files.observation.peak_memory_bytes
    if now is None or peak is None:
        return None
    best = min((one for _, one in moves(now, fewer_recomputed)), key=lambda one: one.step_s, default=now)
    gain_s = now.step_s - best.step_s
    free_gib = (now.pricing.cluster.hardware.memory_bytes - peak) / GIB
    if gain_s < 0.05 * now.step_s:
        return None
    says = f"the peak of {peak / GIB:.1f} GiB leaves {free_gib:.1f} GiB, and recomputing less saves {gain_s:.4g} s"
    return Finding(f"{says} of a step", gain_s)


unhidden_ep, unhidden_dp = unhidden("ep"), unhidden("dp")
_GARBAGE = "steps in which garbage is collected"
collecting = partial(_now_and_then, kind="periodic", share=GARBAGE_SHARE, what=_GARBAGE, word="garbage")
"""Steps that the log's garbage collection makes longer."""


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
    sees: Texts = ()
    layouts: str = ""

    @property
    def looks(self) -> list[Callable[[RunFiles], Finding | None]]:
        """Looks for the row's mechanism, one after the other; none where only the log's own arguments can show it."""
        return [globals()[name] for name in self.sees]

    def at(self, where: str) -> str:
        """The row in words, of a rank or stage that is known."""
        if where.split(" ")[0] in ("rank", "stage"):
            return self.says.replace("one rank", where) if "one rank" in self.says else f"{where}: {self.says}"
        return f"{self.says} ({where})" if where else self.says


GAP_ROWS: Mapping[str, GapRow] = {name: GapRow(name, **row) for name, row in GAP_TABLE["rows"].items()}
"""Every row by the name that `causes` has; another is a row there, and the function that it `sees` by."""
