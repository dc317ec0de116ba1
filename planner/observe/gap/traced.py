"""The account of a step as a rank's trace shows it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from planner.observe.gap.account import (
    ATTENTION,
    COPIES,
    DATA,
    EXCHANGES,
    HOST_GAPS,
    MEMORY_BOUND,
    OPTIMIZER,
    OTHER,
    PIPELINE,
    PRODUCTS,
    WAITS,
    Account,
    GroupExchanges,
    in_seconds,
)
from planner.observe.traces.kernels_and_groups import OTHER as OTHER_FAMILY
from planner.observe.traces.kernels_and_groups import PLANNED, POINT_TO_POINT
from planner.observe.traces.results import CollectiveTime, GroupTime, RankReport, TraceStep
from planner.physics.passes import COMM_GROUPS

Timed = TypeVar("Timed", GroupTime, CollectiveTime)

KINDS = {
    "gemm": PRODUCTS,
    "attention": ATTENTION,
    "softmax": ATTENTION,
    "optimizer": OPTIMIZER,
    OTHER_FAMILY: OTHER,
    "dispatch on the host": OTHER,
}
"""The part that each family of kernels counts to; all others are bound by memory."""
_OTHERS = ("embedding", "model", "world")
"""Groups that a plan has at the end of a step, or not at all."""
DATA_RANGES = re.compile(r"data_?load|batch.?generator|(get|next)_batch|data.?iter", re.IGNORECASE)
"""Annotations of waiting for a batch: those of torch's loader and of Megatron-LM's timers."""
_WORTH_SAYING = 0.001
"""Share of a step that a wait of the host must have to be named."""
SLOW = 1.05
"""A traced step longer than the median of its rank's by this factor is left out, as a log's slow steps are."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A rank's steady steps, and the pipeline stage that it is of."""

    report: RankReport
    stage: int | None
    steps: tuple[TraceStep, ...]
    usual_compute_s: float
    """Median seconds of computing in its steps."""

    @property
    def wall_s(self) -> float:
        """Mean seconds of a step."""
        return self.mean(lambda step: step.wall_s)

    @property
    def passes_s(self) -> float:
        """Mean seconds of a step that the rank itself takes for its passes: waits for its pipeline are others'."""
        own_s = self.compute_s + self.mean(lambda step: step.copies_s + step.host_gaps_s)
        updated_s = self.mean(lambda step: sum(one.seconds for one in step.families if one.family == OPTIMIZER))
        inside = [group for group in self.groups if PLANNED.get(group) in COMM_GROUPS]
        return own_s - updated_s + sum(self.shown_s(group) for group in inside)

    @property
    def compute_s(self) -> float:
        """Mean seconds of computing in a step."""
        return self.mean(lambda step: step.compute_s)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that it exchanges with."""
        return tuple(dict.fromkeys(group.group for step in self.steps for group in step.groups))

    def shown_s(self, group: str) -> float:
        """Mean seconds of a step in which the rank does nothing but a group's exchanges."""
        return self.mean(lambda step: sum(one.exposed_s for one in step.groups if one.group == group))

    def busy_s(self, group: str) -> float:
        """Mean seconds of a step in which one of a group's exchanges runs."""
        return self.mean(lambda step: sum(one.busy_s for one in step.groups if one.group == group))

    def middle(self, seconds_of: Callable[[TraceStep], float]) -> float:
        """The median of a number over the steps."""
        return float(np.median([seconds_of(step) for step in self.steps]))

    def mean(self, seconds_of: Callable[[TraceStep], float]) -> float:
        """Mean of a number over the steps."""
        return sum(map(seconds_of, self.steps)) / len(self.steps)


def traced_ranks(
    reports: Iterable[RankReport], stage_of: Callable[[int], int] | None = None, only: str = ""
) -> list[Traced]:
    """The ranks whose traces mark steps; `stage_of` gives the stage of a rank whose trace does not say it.

    `only` is the one group of a job that has no other: what a trace does not name is of it.
    """
    found = []
    for report in (_named(report, only) for report in reports) if only else reports:
        steady = [step for step in report.steps if not step.warm_up and step.number is not None]
        limit_s = SLOW * float(np.median([step.wall_s for step in steady])) if steady else 0.0
        stage = report.stage
        if stage is None and report.rank is not None and stage_of is not None:
            stage = stage_of(report.rank)
        steps = tuple(step for step in steady if step.wall_s <= limit_s)
        if steps:
            found.append(Traced(report, stage, steps, float(np.median([step.compute_s for step in steady]))))
    return found


def _named(report: RankReport, only: str) -> RankReport:
    """The report with one name for all groups that the trace does not name."""

    def named(rows: Iterable[Timed]) -> tuple[Timed, ...]:
        return tuple(row.model_copy(update={"group": only}) if _is_strange(row.group) else row for row in rows)

    steps = tuple(step.model_copy(update={"groups": named(step.groups)}) for step in report.steps)
    return report.model_copy(update={"steps": steps, "collectives": named(report.collectives)})


def _is_strange(group: str) -> bool:
    return group not in PLANNED and group not in _OTHERS


def typical(ranks: Sequence[Traced]) -> Traced:
    """The rank that speaks for all: of the stage that is busiest, the one that computes neither most nor least.

    A late rank shows as waits of this one, a slow stage as what it does itself. Of an even number the lower middle one.
    """
    by_stage: dict[int | None, list[Traced]] = defaultdict(list)
    for rank in ranks:
        by_stage[rank.stage].append(rank)
    middle = [sorted(own, key=lambda rank: rank.usual_compute_s)[(len(own) - 1) // 2] for own in by_stage.values()]
    return max(middle, key=lambda rank: rank.passes_s)


def account_of(rank: Traced, has_pipeline: bool) -> Account:
    """The account of a traced rank, which adds up to its mean step."""
    kernels: dict[str, float] = dict.fromkeys((PRODUCTS, ATTENTION, MEMORY_BOUND, OTHER, OPTIMIZER), 0.0)
    families: dict[str, float] = defaultdict(float)
    for step in rank.steps:
        for family in step.families:
            families[family.family] += family.seconds / len(rank.steps)
    for name, value in families.items():
        kernels[KINDS.get(name, MEMORY_BOUND)] += value
    _move_optimizer(rank, kernels)
    # what no family has: kernels that end and begin in one nanosecond
    kernels[OTHER] += rank.compute_s - sum(kernels.values())
    data_s = rank.mean(_data_s)
    parts = kernels | {
        HOST_GAPS: rank.mean(lambda step: step.host_gaps_s) - data_s,
        DATA: data_s,
        COPIES: rank.mean(lambda step: step.copies_s),
        WAITS: rank.mean(lambda step: step.dependencies_s + step.idle_s),
    }
    exchanges = _exchanges(rank, has_pipeline)
    for name, part in (("pp", PIPELINE), ("", EXCHANGES)):
        one = exchanges.pop(name, GroupExchanges(0.0, 0.0))
        parts[part] = one.busy_s - one.hidden_s
    number = "" if rank.report.rank is None else f" of rank {rank.report.rank}"
    return Account(f"in the trace{number}", parts, exchanges, _details(rank, families))


def _data_s(step: TraceStep) -> float:
    """Seconds of host gaps in which the host waits for a batch; annotations of it stand inside each other."""
    return max((value for name, value in step.waits if DATA_RANGES.search(name)), default=0.0)


def _move_optimizer(rank: Traced, kernels: dict[str, float]) -> None:
    """Count kernels that the optimizer's own phase launched to it, whatever their names say."""
    phase_s = rank.mean(lambda step: sum(phase.seconds for phase in step.phases if phase.phase == OPTIMIZER))
    moved_s = min(max(0.0, phase_s - kernels[OPTIMIZER]), kernels[MEMORY_BOUND])
    kernels[OPTIMIZER] += moved_s
    kernels[MEMORY_BOUND] -= moved_s


def _exchanges(rank: Traced, has_pipeline: bool) -> dict[str, GroupExchanges]:
    """GroupExchanges by group of the plan; those of no group of its own under the empty name."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for label in rank.groups:
        total = sums[axis_of(label, has_pipeline)]
        total[0] += rank.busy_s(label)
        total[1] += rank.shown_s(label)
    late = _late(rank.report.collectives, len(rank.report.steps), has_pipeline)
    return {
        axis: GroupExchanges(busy_s, busy_s - shown_s, min(late[axis], busy_s) if axis in late else None)
        for axis, (busy_s, shown_s) in sums.items()
    }


def axis_of(label: str, has_pipeline: bool) -> str:
    """The plan's group of a trace's group; empty where it has none of its own.

    Transfers from rank to rank that name no group are the pipeline's, or else those of a ring of context parallelism.
    """
    if label == POINT_TO_POINT and not has_pipeline:
        return "cp"
    return PLANNED.get(label, "")


def unnamed(rank: Traced) -> bool:
    """True where more than 1% of the rank's step exchanges with groups that its trace does not name."""
    strange = [group for group in rank.groups if _is_strange(group)]
    return sum(map(rank.shown_s, strange)) > 0.01 * rank.wall_s


def _late(rows: Iterable[CollectiveTime], num_steps: int, has_pipeline: bool) -> Mapping[str, float]:
    """Seconds of a step that each group's exchanges wait for late ranks, of groups that several traces tell it of."""
    late: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.wait_s is not None:
            late[axis_of(row.group, has_pipeline)] += row.wait_s * row.count / max(num_steps, 1)
    return late


def _details(rank: Traced, families: Mapping[str, float]) -> dict[str, str]:
    """The names of the kernels that no pattern knows, and what the host did while the GPU waited."""
    names = dict.fromkeys(
        name
        for step in rank.steps
        for family in step.families
        if family.family == OTHER_FAMILY
        for name in family.largest
    )
    waits: dict[str, float] = defaultdict(float)
    for step in rank.steps:
        for name, value in step.waits:
            waits[name] += value / len(rank.steps)
    details = {}
    if names and families.get(OTHER_FAMILY):
        details[OTHER] = f"the largest is {next(iter(names))}"
    for part, of_data in ((HOST_GAPS, False), (DATA, True)):
        longest = max(
            ((value, name) for name, value in waits.items() if bool(DATA_RANGES.search(name)) == of_data), default=None
        )
        if longest is not None and longest[0] > _WORTH_SAYING * rank.wall_s:
            details[part] = f"the host was in {longest[1]} for {in_seconds(longest[0])} of them"
    return details
