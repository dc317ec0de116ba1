"""Looks in a run's files for the mechanism of each row of the gap: what it finds has numbers of these files.

A function returns None where the files do not show its mechanism, whatever the reason. Numbers of the run itself have
to be beyond what is worth a word and their noise; numbers beside a price beyond twice the error of prices, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from planner.observe.case import ObservedCase, grid_of
from planner.observe.gap.account import Account, GroupExchanges, in_seconds, planned
from planner.observe.gap.traced import DATA_RANGES, Traced, account_of
from planner.observe.gap.waterfall import traced_of
from planner.observe.observation import RankSpread
from planner.observe.traces.recorded import ObservedFiles
from planner.observe.traces.results import HOST, TraceStep

LONGER, LONGER_ON_HOST = 1.06, 1.2
"""Ranks of one stage differ by 1 to 2% in their clocks; half a dozen of them lie within 5%. A CPU shares its cores."""
NOISE, NOISE_ON_HOST = 0.012, 0.1
"""Least noise of a ratio of two ranks."""
LATE, LATE_ON_HOST = 0.04, 0.08
SLOWER, LINK_NOISE = 1.25, 0.08
"""Exchanges beside products take up to so much longer, which share the GPU with them; so do prices of links err."""
EXPOSED = 0.03
"""Share of a step from which communication that nothing hides is worth a word."""
LEAST_HIDDEN = 0.35
GROUPS = ("tp", "cp", "dp")
GRADIENT_TIMERS = (
    "all-grads-sync", "grads-all-reduce", "backward-params-all-reduce", "backward-reduce-model-grads",
    "params-all-gather", "bwd_allreduce",
)  # fmt: skip
"""Timers of what of gradients and parameters is not hidden."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A mechanism that the files show."""

    says: str
    """A clause with its numbers, such as `rank 3 computes 12% longer than its peers`."""
    seconds: float | None = None
    """Seconds of a step that it takes; None where nothing tells."""
    where: str = ""
    """The rank, stage, group or switch that it is about."""


@dataclass(frozen=True, slots=True)
class RankAccounts:
    """One traced rank's step as its trace shows it, and as it was expected; None where nothing says that."""

    rank: Traced
    found: Account
    expected: Account | None


@dataclass(frozen=True)
class RunFiles:
    """A case as the rows of the gap read it."""

    case: ObservedCase

    @cached_property
    def step_s(self) -> float:
        """Seconds of a steady step; infinity where there is none, so that no share of it is worth a word."""
        return self.case.observation.step_s or float("inf")

    @cached_property
    def ranks(self) -> tuple[Traced, ...]:
        """The ranks that have traces of steps, by number."""
        return tuple(sorted(traced_of(self.case, self.case.recorded), key=lambda rank: rank.report.rank or 0))

    @cached_property
    def earlier(self) -> tuple[Traced, ...]:
        """The traced ranks of the earlier run that this one is held against."""
        earlier = self.case.earlier
        return tuple(traced_of(self.case, earlier.recorded)) if isinstance(earlier, ObservedFiles) else ()

    @cached_property
    def accounts(self) -> tuple[RankAccounts, ...]:
        """Every traced rank with what was expected of it: the plan's stage, or the same rank of the earlier run."""
        grid = grid_of(self.case)
        piped = grid is None or grid.pp > 1
        of_rank: dict[int | None, Account] = {}
        if self.case.prediction is not None and self.case.prediction.kind == "run":
            of_rank = {rank.report.rank: account_of(rank, piped) for rank in self.earlier}
        else:
            of_stage = self._priced()
            of_rank = {
                rank.report.rank: of_stage[rank.stage]
                for rank in self.ranks
                if rank.stage is not None and rank.stage in of_stage
            }
        return tuple(RankAccounts(rank, account_of(rank, piped), of_rank.get(rank.report.rank)) for rank in self.ranks)

    def _priced(self) -> dict[int, Account]:
        candidate, stages = self.case.candidate, {rank.stage for rank in self.ranks}
        if candidate is None or not stages - {None}:
            return {}
        pipeline, pp = candidate.run(), int(candidate.shape.pp)
        known = (stage for stage in stages if stage is not None and stage < pp)
        return {stage: planned(candidate, pipeline, stage, "in the plan") for stage in known}

    @cached_property
    def on_host(self) -> bool:
        """True where a trace has no GPU's events."""
        return any(rank.report.device == HOST for rank in self.ranks)

    @cached_property
    def on_gpus(self) -> tuple[Traced, ...]:
        """The ranks whose traces have a GPU's events."""
        return tuple(rank for rank in self.ranks if rank.report.device != HOST)

    @cached_property
    def wall_s(self) -> float:
        """Seconds of a step in the traces, which a profiler makes longer; infinity without traces."""
        return median(rank.wall_s for rank in self.ranks) if self.ranks else float("inf")

    @cached_property
    def profiled_extra_s(self) -> float:
        """Seconds that a step with a profiler takes beyond one of the log, where both were read."""
        recorded = self.case.recorded.kinds if self.case.recorded else {}
        has_log = any(source.path not in recorded for source in self.case.observation.sources)
        return max(0.0, self.wall_s - self.step_s) if has_log and self.ranks else 0.0

    def size(self, axis: str) -> int | None:
        """The size of an axis by the plan, else by the run's own arguments; None where neither says it."""
        if self.case.plan is not None:
            return int(getattr(self.case.plan.parallelism, axis))
        stated = (self.case.observation.facts.run.get("parallelism") or {}).get(axis)
        return stated if isinstance(stated, int) else None

    @cached_property
    def has_experts(self) -> bool:
        """True for a mixture of experts, as far as the plan, the run's arguments or a trace say it."""
        if self.case.plan is not None:
            return self.case.plan.model.spec.moe is not None
        return (self.size("ep") or 1) > 1 or any(group in ("ep", "etp") for rank in self.ranks for group in rank.groups)

    def exchanges(self, group: str) -> list[tuple[GroupExchanges, GroupExchanges]]:
        """A group's exchanges on each rank, found and expected."""
        return [
            (one.found.exchanges[group], one.expected.exchanges[group])
            for one in self.accounts
            if one.expected and group in one.found.exchanges and group in one.expected.exchanges
        ]


def rank_name(rank: Traced) -> str:
    """The rank in words."""
    return rank.report.file if rank.report.rank is None else f"rank {rank.report.rank}"


def slow_rank(files: RunFiles) -> Finding | None:
    """One rank that computes longer than the others of its stage, or stands still while they wait for it."""
    found = [*_longer_traced(files), *_longer_than_before(files), *_longer_timed(files), *_longer_printed(files)]
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
    for rank, others in beside_stage(files.ranks):
        ratio, noise = ratio_of(rank, others, lambda step: step.compute_s, files.on_host)
        more_s = rank.usual_compute_s - median(other.usual_compute_s for other in others)
        yield from _longer(ratio, noise, files.on_host, rank_name(rank), "its peers", more_s)


def _longer_than_before(files: RunFiles) -> Iterable[tuple[float, Finding]]:
    """Ranks beside themselves in the earlier run, as far as the others have not become slower, too."""
    before = {rank.report.rank: rank for rank in files.earlier}
    pairs = [(rank, before[rank.report.rank]) for rank in files.ranks if rank.report.rank in before]
    prediction = files.case.prediction
    if prediction is None or files.step_s <= prediction.step_s or len(pairs) < 2 or len(pairs) < len(files.ranks):
        return
    then_s = [then.middle(lambda step: step.compute_s) for _, then in pairs]
    if min(then_s) <= 0:
        return
    ratios = [
        rank.middle(lambda step: step.compute_s) / seconds for (rank, _), seconds in zip(pairs, then_s, strict=True)
    ]
    for place, (rank, _) in enumerate(pairs):
        usual = median(ratios[:place] + ratios[place + 1 :])
        noise = 2**0.5 * (NOISE_ON_HOST if files.on_host else NOISE)
        more_s = (ratios[place] - usual) * then_s[place]
        than = "in the earlier run, beside the other ranks"
        yield from _longer(ratios[place] / usual, noise, files.on_host, rank_name(rank), than, more_s)


def _longer_timed(files: RunFiles) -> Iterable[tuple[float, Finding]]:
    """Ranks by the timers of all ranks, where the grid says who is of one stage."""
    timers = {timer.name: timer.per_rank_s for timer in files.case.observation.timers}
    forward_s, backward_s = (timers.get(f"{name}-compute", {}) for name in ("forward", "backward"))
    grid = grid_of(files.case)
    if files.ranks or grid is None:
        return
    pass_s = {rank: forward_s[rank] + backward_s[rank] for rank in forward_s.keys() & backward_s.keys()}
    for rank, own_s in pass_s.items():
        others = [
            other_s for other, other_s in pass_s.items() if other != rank and grid.stage(other) == grid.stage(rank)
        ]
        usual_s = median(others) if others else 0.0
        if usual_s > 0:
            spread = 1.4826 * median(abs(other_s - usual_s) for other_s in others) / usual_s
            noise = max(NOISE, spread) if len(others) > 2 else 2 * NOISE
            yield from _longer(own_s / usual_s, noise, False, f"rank {rank}", "its peers", own_s - usual_s)


def _longer_printed(files: RunFiles) -> Iterable[tuple[float, Finding]]:
    """The rank that `--log-straggler` names again and again: by throughput, or by round trips without a pipeline."""
    for spread in files.case.observation.rank_spreads:
        if spread.low <= 0 or spread.num_values < 3:
            continue
        if spread.name == "tflops" and spread.low_share > 0.5:
            yield from _named_often(spread, spread.low_rank, (1 - spread.low / spread.high) * files.step_s)
        if spread.name == "round_trip_s" and spread.high_share > 0.5 and files.size("pp") == 1:
            yield from _named_often(spread, spread.high_rank, spread.high - spread.low)


def _named_often(spread: RankSpread, rank: int, more_s: float) -> Iterable[tuple[float, Finding]]:
    than = f"the fastest one, in most of {spread.num_values:,} lines"
    return _longer(spread.high / spread.low, 2 * NOISE, False, f"rank {rank}", than, more_s)


def beside_stage(ranks: Sequence[Traced]) -> list[tuple[Traced, list[Traced]]]:
    """Each rank whose stage is known, with the others of that stage, which hold the same layers."""
    pairs = [(rank, [other for other in ranks if other is not rank and other.stage == rank.stage]) for rank in ranks]
    return [(rank, others) for rank, others in pairs if others and rank.stage is not None]


def ratio_of(
    rank: Traced, others: Sequence[Traced], of: Callable[[TraceStep], float], on_host: bool
) -> tuple[float, float]:
    """The median over steps of a rank's seconds ÷ those of the others, and its noise."""
    mine, *theirs = (
        {step.number: of(step) for step in one.report.steps if not step.warm_up} for one in (rank, *others)
    )
    shared = [number for number in mine if all(number in own for own in theirs)]
    usual = {number: median(own[number] for own in theirs) for number in shared}
    ratios = [mine[number] / usual[number] for number in shared if usual[number] > 0]
    if not ratios:
        return 1.0, 1.0
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios) / len(ratios) ** 0.5
    return middle, max(NOISE_ON_HOST / 2 if on_host else NOISE, 1.25 * spread)


def _comes_late(files: RunFiles) -> Finding | None:
    """One rank that stands still by itself, neither computing nor in an exchange, while the others wait for it."""
    if len(files.ranks) < 2:
        return None
    rows = []
    for rank in files.ranks:
        others = [other for other in files.ranks if other is not rank]
        more_s = rank.middle(_still_s) - median(other.middle(_still_s) for other in others)
        waited_s = median(other.middle(_waits_s) for other in others) - rank.middle(_waits_s)
        rows.append((min(more_s, waited_s), rank))
    late_s, rank = max(rows, key=lambda row: row[0])
    if late_s < 4 / 3 * (LATE_ON_HOST if files.on_host else LATE) * files.wall_s:
        return None
    says = f"{rank_name(rank)} does nothing for {in_seconds(late_s)} of a step in which the others wait for it"
    return Finding(says, late_s, rank_name(rank))


def _apart_timed(files: RunFiles) -> Finding | None:
    """The least and the most of the passes' timers over the ranks, further apart than the layers of their stages."""
    timers = {timer.name: timer for timer in files.case.observation.timers}
    names, plan = ("forward-compute", "backward-compute"), files.case.plan
    if files.ranks or not set(names) <= timers.keys() or (plan is None and files.size("pp") != 1):
        return None
    low_s, high_s = sum(timers[name].min_s for name in names), sum(timers[name].max_s for name in names)
    stages = [stage.forward_s + stage.backward_s for stage in plan.best.stages] if plan is not None else [1.0]
    due = max(stages) / min(stages)
    if low_s <= 0 or high_s / low_s < (LONGER + 4 * 2 * NOISE) * due:
        return None
    says = f"the slowest rank's passes take {high_s / low_s - 1:.0%} longer than the fastest one's"
    return Finding(f"{says}, {due - 1:.0%} by their layers", high_s - low_s * due)


def _still_s(step: TraceStep) -> float:
    """Seconds in which a rank stands still and neither another rank, a stream nor the loader of data explains it."""
    return step.long_gaps_s + step.idle_s - data_wait_s(step)


def _waits_s(step: TraceStep) -> float:
    return step.exposed_communication_s + step.dependencies_s


def data_wait_s(step: TraceStep) -> float:
    """Seconds of host gaps in which the loader of data is at work."""
    return sum(length for name, length in step.waits if DATA_RANGES.search(name))


def slow_link(files: RunFiles) -> Finding | None:
    """Transfers, told from waits by several ranks' traces, slower than their links or than in the earlier run."""
    if files.earlier:
        return _slower_than_before(files)
    found = []
    for group in GROUPS:  # those of experts take longer where these are uneven
        known = [pair for pair in files.exchanges(group) if pair[0].late_s is not None]
        found_s, due_s = (median(_moved_s(pair[side]) for pair in known) if known else 0.0 for side in (0, 1))
        if due_s >= 0.01 * files.step_s and found_s / due_s > SLOWER + 2 * LINK_NOISE:
            says = f"transfers of the {group} group take {found_s / due_s:.1f} times as long as over links as planned"
            found.append(Finding(says, found_s - due_s, group))
    return max(found, key=lambda one: one.seconds or 0.0, default=None)


def _moved_s(one: GroupExchanges) -> float:
    return one.busy_s - (one.late_s or 0.0)


def _slower_than_before(files: RunFiles) -> Finding | None:
    before = {rank.report.rank: rank for rank in files.earlier}
    rows: dict[str, list[tuple[float, float]]] = {}
    for rank in files.ranks:
        then = before.get(rank.report.rank)
        for group in sorted(_told_groups(rank) & _told_groups(then)) if then else ():
            rows.setdefault(group, []).append((_transferred_s(rank, group), _transferred_s(then, group)))  # type: ignore[arg-type]
    least = (0.09 if files.on_host else 0.05) * 4 / 3 * files.step_s
    found = []
    for group, pairs in rows.items():
        # all ranks of a collective transfer together; of a pair, one may only wait
        now_s, then_s = (max if group in ("point to point", "pp") else min)(pairs, key=lambda pair: pair[0] - pair[1])
        if now_s - then_s > least and now_s > (SLOWER + LINK_NOISE) * then_s:
            says = f"transfers of the {group} group take {in_seconds(now_s - then_s)} of a step more than before"
            found.append(Finding(says, now_s - then_s, _axis(files, group)))
    return max(found, key=lambda one: one.seconds or 0.0, default=None)


def _axis(files: RunFiles, group: str) -> str:
    """The group; one without a name is that of the only axis with several ranks."""
    axes = [axis for axis in (*GROUPS, "ep", "pp") if (files.size(axis) or 1) > 1]
    return group if group in (*GROUPS, "ep") else axes[0] if len(axes) == 1 else ""


def _told_groups(rank: Traced) -> set[str]:
    return {one.group for one in rank.report.collectives if one.wait_s is not None}


def _transferred_s(rank: Traced, group: str) -> float:
    """Seconds of a step in which a group's exchanges run, without waits for late ranks."""
    rows = [one for one in rank.report.collectives if one.group == group and one.wait_s is not None]
    waited_s = sum((one.wait_s or 0.0) * one.count for one in rows) / max(1, len(rank.report.steps))
    return max(0.0, rank.busy_s(group) - waited_s)


def unhidden(files: RunFiles, group: str) -> Finding | None:
    """Exchanges of a group that were to hide behind computing, and do not: longer ones alone are no sign of that."""
    known = files.exchanges(group)
    if not known:
        return None
    found, due = min(known, key=lambda pair: pair[1].hidden_s - pair[0].hidden_s)
    lost_s = min(due.hidden_s - found.hidden_s, _shown_s(found) - _shown_s(due))
    if found.hidden_s > LEAST_HIDDEN * found.busy_s or lost_s < (EXPOSED + 0.02) * files.step_s + 0.16 * due.busy_s:
        return None
    says = f"{found.hidden_s / found.busy_s:.0%} of {group} communication runs behind computing"
    return Finding(f"{says}, {due.hidden_s / due.busy_s:.0%} were to", lost_s, group)


def _shown_s(one: GroupExchanges) -> float:
    return max(0.0, one.busy_s - one.hidden_s - (one.late_s or 0.0))


def gradient_timers(files: RunFiles) -> Finding | None:
    """The trainer's timers of gradients and parameters of the rank that waits least, beyond those planned to show."""
    timers = [timer.min_s for timer in files.case.observation.timers if timer.name in GRADIENT_TIMERS]
    prediction = files.case.prediction
    if not timers or prediction is None or prediction.kind == "run" or files.ranks:
        return None
    found_s, due_s = sum(timers), prediction.breakdown.get("exposed_dp_s", 0.0)
    if found_s - due_s < EXPOSED * files.step_s + 2 * (0.01 * files.step_s + 0.08 * due_s):
        return None
    says = f"timers of gradients and parameters show {in_seconds(found_s)} of a step, {in_seconds(due_s)} expected"
    return Finding(says, found_s - due_s, "dp")


def uneven_experts(files: RunFiles) -> Finding | None:
    """Every rank waits in exchanges of experts, since the late one changes; or ranks differ in products alone."""
    if not files.has_experts:
        return None
    known = [(found.late_s, due.late_s or 0.0) for found, due in files.exchanges("ep") if found.late_s is not None]
    if len(known) >= 2:
        least_s = min(found_s - due_s for found_s, due_s in known)
        if least_s > (EXPOSED + 0.01) * files.step_s:
            says = f"each rank waits {in_seconds(least_s)} more of a step in exchanges of experts: the late one changes"
            return Finding(says, least_s, "ep")
    for rank, others in beside_stage(files.on_gpus):
        products, _ = ratio_of(rank, others, lambda step: family_s(step, ("gemm", "MoE routing")), False)
        attention, noise = ratio_of(rank, others, lambda step: family_s(step, ("attention",)), False)
        if products - attention > LONGER - 1 + 2 * max(noise, 0.02):
            says = f"products take {products - attention:.0%} more than its peers', beside its attention"
            return Finding(f"{rank_name(rank)}'s {says}", None, rank_name(rank))
    return None


def family_s(step: TraceStep, wanted: Sequence[str]) -> float:
    """Seconds of a step that kernels of these families take."""
    return sum(family.seconds for family in step.families if family.family in wanted)
