"""The waterfall: measured less predicted seconds of a step in named terms that add up to the difference.

An account has one rank's seconds of a step by what it did: as a plan prices it, a trace shows it, or a log times it.
Beside the steps stand the terms of the wall time per step less the steady step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from statistics import median
from typing import TypeVar

from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.layout.seconds import Pipeline, exchanged_dp_s
from planner.layout.step import LATE, compute_by_kernels, exchanges_of_passes
from planner.observe.case import ObservedCase, grid_of, stage_of, stated_otherwise
from planner.observe.observation import Observation, OutlierKind, Term
from planner.observe.traces.events import (
    DATA_RANGES,
    PLANNED,
    POINT_TO_POINT,
    CollectiveTime,
    GroupTime,
    RankReport,
    TraceStep,
)
from planner.observe.traces.events import OTHER as OTHER_FAMILY
from planner.observe.trainer_lines import TABLE
from planner.physics.passes import COMM_GROUPS
from planner.specs.base import Fields, Named, grouped
from planner.specs.expressions import text_of, value_of
from planner.specs.reading import shipped_table

EXCHANGES, PASSES, GRADIENTS, OPTIMIZER, UNATTRIBUTED = (
    "exchanges", "passes", "gradients", "optimizer", "unattributed",
)  # fmt: skip
PRODUCTS, ATTENTION, MEMORY_BOUND, OTHER = (
    "compute_products", "compute_attention", "compute_memory_bound", "compute_other",
)  # fmt: skip
PIPELINE, HOST_GAPS, DATA, COPIES, WAITS, PROFILER = (
    "pipeline_waits", "host_gaps", "data_loading", "copies", "waits", "profiler",
)  # fmt: skip
GAP_TABLE: Fields = shipped_table("observe/gap.yaml")
STEP_TERMS: Named = GAP_TABLE["step_terms"]
"""Terms of the step, measured less predicted seconds, in the order of a waterfall, and how people call them."""
WALL_TERMS: Named = {name: row["called"] for name, row in GAP_TABLE["wall_terms"].items()}
"""Terms of the wall time: seconds per step beside the steady step."""


@dataclass(frozen=True, slots=True)
class GroupExchanges:
    """All exchanges of one group on a rank in a step."""

    busy_s: float
    """Seconds in which one of them runs, waits for other ranks included."""
    hidden_s: float
    """Seconds of these in which the rank computes, or another group's exchange shows."""
    late_s: float | None = None
    """Seconds of these before the last rank has come; None where nothing tells."""


@dataclass(frozen=True, slots=True)
class Account:
    """The seconds of a step of one rank."""

    where: str
    """The place that the numbers come from, as a sentence goes on: `in the trace of rank 3`."""
    parts: Mapping[str, float]
    """Seconds by term, of what is one number on either side."""
    exchanges: Mapping[str, GroupExchanges] = field(default_factory=dict)
    """Exchanges by group."""

    @property
    def total_s(self) -> float:
        """Seconds of all parts, and of exchanges as far as they show."""
        return sum(self.parts.values()) + sum(one.busy_s - one.hidden_s for one in self.exchanges.values())


_NONE = GroupExchanges(0.0, 0.0, 0.0)


def differences(measured: Account, expected: Account) -> Iterator[Term]:
    """Terms that add up to the total of what was measured less the total of what was expected.

    Those of a group's exchanges: Δshown = Δtransfers + Δwaits for late ranks − Δhidden.
    """
    rows = [(name, "", measured.parts.get(name, 0.0), expected.parts.get(name, 0.0))
            for name in dict.fromkeys((*expected.parts, *measured.parts))]  # fmt: skip
    for group in dict.fromkeys((*expected.exchanges, *measured.exchanges)):
        found, wanted = (side.exchanges.get(group, _NONE) for side in (measured, expected))
        if found.late_s is None or wanted.late_s is None:
            told = {"exchanges": ("transfers and waits together took ", found.busy_s, wanted.busy_s)}
        else:
            moved_s = found.busy_s - found.late_s, wanted.busy_s - wanted.late_s
            told = {"link_rate": ("transfers took ", *moved_s)}
            told["skew"] = ("waits for late ranks took ", found.late_s, wanted.late_s)
        told["overlap"] = ("not hidden behind computing: ", -found.hidden_s, -wanted.hidden_s)
        rows += [(GAP_TABLE["exchange_terms"][group][kind], *row) for kind, row in told.items()]
    for name, words, is_s, was_s in rows:
        says = f"{words}{in_seconds(is_s)} {measured.where}, {in_seconds(was_s)} {expected.where}"
        yield Term(term=name, seconds=is_s - was_s, evidence=says, recoverable_s=max(0.0, is_s - was_s))


def in_seconds(value_s: float) -> str:
    """Seconds as evidence has them: `0.5512 s`."""
    return f"{value_s:.4g} s"


def planned(candidate: Candidate, pipeline: Pipeline, rank: int, where: str) -> Account:
    """The account of a pipeline rank; it adds up to the candidate's step."""
    pricing = candidate.pricing
    shape = candidate.shape
    cost = candidate.rank_costs[rank]
    kernels = compute_by_kernels(candidate, rank)
    outside = candidate.outside
    busy_s = float(pipeline.busy_s[rank])
    issued_s = busy_s - candidate.num_microbatches * float(cost.total_s)
    alone_s = float(pricing.unpaired_s(shape))
    uneven_s = float(pricing.uneven_s(shape))
    step_overhead_s = float(pricing.runtime.step_overhead_s)
    parts = {
        PRODUCTS: kernels["products_s"], ATTENTION: kernels["attention_s"], MEMORY_BOUND: kernels["memory_bound_s"],
        OTHER: 0.0, PIPELINE: pipeline.makespan_s - busy_s, OPTIMIZER: float(cost.optimizer_s),
        HOST_GAPS: kernels["host_s"] + issued_s + step_overhead_s, COPIES: 0.0,
        # ranks end their step together: with the slowest optimizer, and the one whose documents take most attention
        WAITS: outside.optimizer_s - float(cost.optimizer_s) + uneven_s,
        EXCHANGES: outside.tail_s - alone_s - uneven_s - step_overhead_s,
    }  # fmt: skip
    exchanges = _inside(candidate, rank, alone_s)
    if whole_s := max(exchanged_dp_s(shape, cost), outside.exposed_dp_s):
        exchanges["dp"] = GroupExchanges(whole_s, whole_s - outside.exposed_dp_s, 0.0)
    return Account(where, parts, exchanges)


def _inside(candidate: Candidate, rank: int, alone_s: float) -> dict[str, GroupExchanges]:
    """The exchanges inside a rank's passes; those that have no other micro-batch beside them show."""
    cost = candidate.rank_costs[rank]
    times = candidate.num_microbatches
    own = [
        one
        for (stage, kind), ones in exchanges_of_passes(candidate).items()
        for one in ones
        if candidate.placement[stage] == rank and kind in "FB"
    ]
    found = {}
    for group, ways_s in cost.exchanges_s.items():
        shown_s = times * float(sum(ways_s))
        hidden_s = times * sum(one.hidden_s for one in own if one.group == group)
        late_s = times * sum(one.exposed_s for one in own if one.group == group and one.name == LATE[group])
        if group == "ep":
            shown_s = shown_s + alone_s
            hidden_s = hidden_s - min(alone_s, hidden_s)
            late_s = 0.0
        if shown_s or hidden_s:
            found[group] = GroupExchanges(shown_s + hidden_s, hidden_s, late_s)
    return found


_TIMED = {
    PASSES: ("forward_backward_s", "forward_s", "backward_s"),
    GRADIENTS: ("gradients_s", "parameters_s"),
    OPTIMIZER: ("optimizer_s",),
}
"""The seconds of an observation's breakdown that each term adds up."""
_INSIDE_PASSES = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
_BETWEEN_PASSES = ("pp_comm_s", "bubble_s")
_LEAST_COVERED = 0.5
"""Timers that cover less of a step are of micro-batches, or of parts of it."""


def timed(observation: Observation, where: str) -> Account | None:
    """The account of a run by its timers; None where they do not tell passes apart, or cover too little."""
    breakdown = observation.breakdown
    step_s = observation.step_s or 0.0
    parts = {
        term: sum(breakdown.get(name, 0.0) for name in names)
        for term, names in _TIMED.items()
        if breakdown.keys() & set(names)
    }
    if PASSES not in parts or sum(parts.values()) < _LEAST_COVERED * step_s:
        return None
    waited_s = max((timer.max_s for timer in observation.timers if timer.name in TABLE["data_timers"]), default=0.0)
    if 0 < waited_s < parts[PASSES]:
        parts |= {PASSES: parts[PASSES] - waited_s, DATA: waited_s}
    return Account(where, parts)


def priced(breakdown: Mapping[str, float], tail_s: float, observed: Mapping[str, float], where: str) -> Account:
    """The account of a plan's breakdown, with the terms that timers tell of an observed one.

    A timer of both passes together holds the waits between them; `tail_s` is the end of a step, behind the optimizer.
    """
    waits = _BETWEEN_PASSES if "forward_backward_s" in observed else ()
    issued_s = max(0.0, breakdown.get("overhead_s", 0.0) - tail_s)
    parts = {PASSES: sum(breakdown.get(name, 0.0) for name in (*_INSIDE_PASSES, *waits)) + issued_s}
    for term, name in ((GRADIENTS, "exposed_dp_s"), (OPTIMIZER, "optimizer_s")):
        if observed.keys() & set(_TIMED[term]):
            parts[term] = breakdown.get(name, 0.0)
    return Account(where, parts)


Timed = TypeVar("Timed", GroupTime, CollectiveTime)
KINDS = {
    "gemm": PRODUCTS, "attention": ATTENTION, "softmax": ATTENTION, "optimizer": OPTIMIZER, OTHER_FAMILY: OTHER,
    "dispatch on the host": OTHER,
}  # fmt: skip
"""The part that each family of kernels counts to; all others are bound by memory."""
SLOW = 1.05
"""A traced step longer than the median of its rank's by this factor is left out, as a log's slow steps are."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A rank's steady steps, and the pipeline stage that it is of."""

    report: RankReport
    stage: int | None
    steps: tuple[TraceStep, ...]

    @property
    def passes_s(self) -> float:
        """Mean seconds of a step that the rank itself takes: waits for its pipeline and for gradients are others'."""
        return self.mean(_own_s)

    def middle(self, seconds_of: Callable[[TraceStep], float]) -> float:
        """The median of a number over the steps."""
        return median(map(seconds_of, self.steps))

    def mean(self, seconds_of: Callable[[TraceStep], float]) -> float:
        """Mean of a number over the steps."""
        return sum(map(seconds_of, self.steps)) / len(self.steps)


def _own_s(step: TraceStep) -> float:
    inside_s = sum(one.exposed_s for one in step.groups if PLANNED.get(one.group) in COMM_GROUPS)
    return step.compute_s + step.copies_s + step.host_gaps_s + inside_s


def compute_s(step: TraceStep) -> float:
    """Seconds of a step in which the rank computes."""
    return step.compute_s


def wall_s(step: TraceStep) -> float:
    """Seconds of a traced step."""
    return step.wall_s


def traced_of(case: ObservedCase) -> list[Traced]:
    """The ranks whose traces mark steps; the layout says the stage and the group of those whose traces do not."""
    grid = grid_of(case)
    groups = [] if grid is None else [axis for axis in ("tp", "cp", "dp", "pp", "ep") if getattr(grid, axis) > 1]
    found = []
    for report in case.recorded.ranks if case.recorded else ():
        named = _named(report, groups[0]) if len(groups) == 1 else report
        steady = [step for step in named.steps if not step.warm_up and step.number is not None]
        limit_s = SLOW * median(map(wall_s, steady)) if steady else 0.0
        stage = named.stage
        if stage is None and named.rank is not None and grid is not None:
            stage = stage_of(grid, named.rank)
        if steps := tuple(step for step in steady if step.wall_s <= limit_s):
            found.append(Traced(named, stage, steps))
    return sorted(found, key=lambda rank: rank.report.rank or 0)


_OTHERS = ("embedding", "model", "world")
"""Groups that a plan has at the end of a step, or not at all."""


def _named(report: RankReport, only: str) -> RankReport:
    """The report with the one group of a job for all that its trace does not name."""
    known = (*PLANNED, *_OTHERS)

    def named(rows: Iterable[Timed]) -> tuple[Timed, ...]:
        return tuple(row if row.group in known else row.model_copy(update={"group": only}) for row in rows)

    steps = tuple(step.model_copy(update={"groups": named(step.groups)}) for step in report.steps)
    return report.model_copy(update={"steps": steps, "collectives": named(report.collectives)})


def typical(ranks: Sequence[Traced]) -> Traced:
    """The rank that speaks for all: of the stage that is busiest, the one that computes neither most nor least.

    A late rank shows as waits of this one, a slow stage as what it does itself. Of an even number the lower middle one.
    """
    stages = grouped((rank.stage, rank) for rank in ranks).values()
    middle = [sorted(own, key=lambda rank: rank.middle(compute_s))[(len(own) - 1) // 2] for own in stages]
    return max(middle, key=lambda rank: rank.passes_s)


def account_of(rank: Traced, has_pipeline: bool) -> Account:
    """The account of a traced rank, which adds up to its mean step."""
    kernels: dict[str, float] = dict.fromkeys((PRODUCTS, ATTENTION, MEMORY_BOUND, OTHER, OPTIMIZER), 0.0)
    for step in rank.steps:
        for family in step.families:
            kernels[KINDS.get(family.family, MEMORY_BOUND)] += family.seconds / len(rank.steps)
    # what no family has: kernels that end and begin in one nanosecond
    kernels[OTHER] += rank.mean(compute_s) - sum(kernels.values())
    data_s = rank.mean(lambda step: max((took for name, took in step.waits if DATA_RANGES.search(name)), default=0.0))
    parts = kernels | {
        HOST_GAPS: rank.mean(lambda step: step.host_gaps_s) - data_s, DATA: data_s,
        COPIES: rank.mean(lambda step: step.copies_s), WAITS: rank.mean(lambda step: step.dependencies_s + step.idle_s),
    }  # fmt: skip
    late: dict[str, float] = defaultdict(float)
    for row in rank.report.collectives:
        if row.wait_s is not None:
            late[_axis_of(row.group, has_pipeline)] += row.wait_s * row.count / max(len(rank.report.steps), 1)
    busy, shown = defaultdict[str, float](float), defaultdict[str, float](float)
    for group in (group for step in rank.steps for group in step.groups):
        axis = _axis_of(group.group, has_pipeline)
        busy[axis] += group.busy_s / len(rank.steps)
        shown[axis] += group.exposed_s / len(rank.steps)
    exchanges = {
        axis: GroupExchanges(busy_s, busy_s - shown[axis], min(late[axis], busy_s) if axis in late else None)
        for axis, busy_s in busy.items()
    }
    for name, part in (("pp", PIPELINE), ("", EXCHANGES)):
        one = exchanges.pop(name, _NONE)
        parts[part] = one.busy_s - one.hidden_s
    number = "" if rank.report.rank is None else f" of rank {rank.report.rank}"
    return Account(f"in the trace{number}", parts, exchanges)


def _axis_of(label: str, has_pipeline: bool) -> str:
    """The plan's group of a trace's group; empty where it has none of its own.

    Transfers from rank to rank that name no group are the pipeline's, or else those of a ring of context parallelism.
    """
    return "cp" if label == POINT_TO_POINT and not has_pipeline else PLANNED.get(label, "")


_SMALL, _NOTHING = 1e-6, 1e-9
"""Shares of a step: a smaller term is the rounding of clocks and counts to the rest, a smaller rest is nothing."""


def waterfall(case: ObservedCase, known: Sequence[Term] = ()) -> tuple[Term, ...]:
    """Terms that add up to the observed step less the predicted one; nothing where one of them is not known.

    `known` are what switches cost that the log shows otherwise than the plan (`recipe_terms`): other terms are beside
    the price of the recipe that the run has.
    """
    step_s = case.observation.step_s
    prediction = case.prediction
    if step_s is None or prediction is None:
        return ()
    stated = stated_otherwise(case) if known and prediction.kind == "plan" else ()
    candidate = stated[-1].candidate if stated else case.candidate
    where = f"in {PurePath(prediction.source).name}{' with the recipe of the log' if stated else ''}"
    terms = _of_traces(case, candidate, where) or _of_timers(case, candidate, where)
    terms = [term for term in [*known, *terms] if abs(term.seconds) > _SMALL * step_s]
    left_s = step_s - prediction.step_s - sum(term.seconds for term in terms)
    if abs(left_s) > _NOTHING * step_s:
        says = f"{in_seconds(step_s)} a step, {in_seconds(prediction.step_s)} predicted by {prediction.source}"
        terms.append(Term(term=UNATTRIBUTED, seconds=left_s, evidence=f"{says}; no file tells this part apart"))
    order = list(STEP_TERMS)
    return tuple(sorted(terms, key=lambda term: order.index(term.term) if term.term in order else -1))


def _of_timers(case: ObservedCase, candidate: Candidate | None, where: str) -> list[Term]:
    """Terms by the timers of the log, beside the price or the earlier run's; none where they tell nothing apart."""
    prediction = case.prediction
    observation = case.observation
    expected = None
    found = timed(observation, "by the log's timers")
    if found is not None and candidate is not None and prediction is not None and prediction.kind == "plan":
        whole = price_layout(candidate).step.breakdown.model_dump()
        expected = priced(whole, candidate.outside.tail_s, observation.breakdown, where)
    elif case.earlier is not None and case.earlier.observation.breakdown.keys() == observation.breakdown.keys():
        expected = timed(case.earlier.observation, where)
    return [] if found is None or expected is None else list(differences(found, expected))


def _of_traces(case: ObservedCase, candidate: Candidate | None, where: str) -> list[Term]:
    """Terms by the trace of the typical rank beside the plan's rank of its stage, and what a profiler adds."""
    ranks = traced_of(case)
    step_s = case.observation.step_s
    if candidate is None or not ranks or step_s is None or (case.prediction and case.prediction.kind == "run"):
        return []
    rank = typical(ranks)
    pp = int(candidate.shape.pp)
    stage = 0 if pp == 1 else rank.stage
    if stage is None or stage >= pp:
        return []
    measured = account_of(rank, pp > 1)
    expected = planned(candidate, candidate.run(), stage, where)
    named = {name: one for name, one in expected.exchanges.items() if name in measured.exchanges}
    unnamed_s = sum(one.busy_s - one.hidden_s for name, one in expected.exchanges.items() if name not in named)
    parts = {**expected.parts, EXCHANGES: expected.parts[EXCHANGES] + unnamed_s}
    expected = replace(expected, parts=parts, exchanges=named)  # groups that a trace does not name are one number
    terms = list(differences(measured, expected))
    traced_s = rank.mean(wall_s)
    if step_s < traced_s and case.has_log:
        says = (
            f"{in_seconds(step_s)} a step in the log, {in_seconds(traced_s)} in the trace, which a profiler slows down"
        )
        terms.append(Term(term=PROFILER, seconds=step_s - traced_s, evidence=says, recoverable_s=0.0))
    return terms


_CLOCK_NOISE = 0.1
"""Share of steps below which what lies between their lines and what two of them claim is the clock of the lines."""


def beside_steps(observation: Observation) -> tuple[Term, ...]:
    """Terms that add up to the wall time per step less the steady step; nothing where lines have no times."""
    wall, step_s, outliers = observation.wall, observation.step_s, observation.outliers
    made_again = sum(restart.lost_steps for restart in observation.restarts)
    num_steps = observation.num_steps - made_again
    if wall is None or step_s is None or num_steps < 1:
        return ()

    def longer(kind: OutlierKind) -> str:
        last = [outlier for outlier in outliers if outlier.kind == kind][-1]
        return f"{in_steps(last.num_steps)} took longer{f' ({last.likely})' if last.likely else ''}"

    low_s, high_s = observation.step_s_spread or (step_s, step_s)
    between_s = max(wall.idle_s, wall.overlap_s)
    names = {
        "o": observation, "wall": wall, "made_again": made_again, "low_s": low_s, "high_s": high_s, "longer": longer,
        "slow": lambda kind: sum(outlier.extra_s for outlier in outliers if outlier.kind == kind),
        "warm_up_s": observation.warmup_extra_s if observation.num_warmup_steps else 0.0,
        "is_clock": wall.overlap_s and between_s < _CLOCK_NOISE * step_s * observation.num_steps,
        "s": in_seconds, "steps": in_steps,
    }  # fmt: skip
    found = []
    for name, row in GAP_TABLE["wall_terms"].items():
        if total_s := value_of(row["total_s"], names):
            each_s = total_s / num_steps
            says = f"{text_of(row['says'], names)}: {in_seconds(abs(total_s))} of {in_steps(num_steps)}"
            back_s = None if "needed" in row else max(0.0, each_s)
            found.append(Term(term=name, seconds=each_s, evidence=says, recoverable_s=back_s))
    return tuple(found)


def in_steps(count: int) -> str:
    """A number of steps, with its noun."""
    return f"{count:,} step{'' if count == 1 else 's'}"
