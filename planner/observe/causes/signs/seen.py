"""The numbers of a run that several signs read: ranks of traces beside each other, and what they are held against."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from planner.observe.case import Case
from planner.observe.causes.signs.accounts import Pair, pairs_of
from planner.observe.ideal.grid import grid_of
from planner.observe.observation import Term, WhatIf
from planner.observe.remedy.recipe_gap import slower_settings
from planner.observe.traces.recorded import ObservedFiles, Recorded
from planner.observe.traces.results import HOST, RankReport, TraceStep

_TRACES = ("torch profiler trace", "Nsight Systems export")
DATA = re.compile(r"data_?load|batch.?generator|get_batch|next_batch|data.?iter", re.IGNORECASE)
"""Names of annotations that wait for data."""


@dataclass(frozen=True)
class Rank:
    """One rank's trace without its warm-up."""

    report: RankReport
    steps: tuple[TraceStep, ...]
    stage: int | None

    @property
    def on_host(self) -> bool:
        """True for a trace without a GPU's events."""
        return self.report.device == HOST

    @property
    def name(self) -> str:
        """The rank in words."""
        return self.report.file if self.report.rank is None else f"rank {self.report.rank}"

    def middle(self, of: Callable[[TraceStep], float]) -> float:
        """The median over the steps."""
        return median(of(step) for step in self.steps)


@dataclass(frozen=True)
class Seen:
    """A case with the gap and the replays, as signs read it."""

    case: Case
    waterfall: Sequence[Term] = ()
    what_ifs: Sequence[WhatIf] = ()

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of a steady step."""
        return self.case.observation.step_s

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that have traces, by number."""
        return ranks_of(self.case.recorded, self.size("pp") == 1)

    @cached_property
    def earlier_ranks(self) -> tuple[Rank, ...]:
        """The ranks of the earlier run that this one is held against."""
        earlier = self.case.earlier
        return ranks_of(earlier.recorded, True) if isinstance(earlier, ObservedFiles) else ()

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The accounts of traced ranks, each with what was expected of it."""
        return pairs_of(self.case)

    @cached_property
    def switched(self) -> dict[str, tuple[Term, ...]]:
        """The settings that the log states and that cost seconds by the price, by the cause that each of them is."""
        return slower_settings(self.case)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of one pipeline in a step; 1 where nothing says it."""
        grid = grid_of(self.case)
        return (grid.num_microbatches if grid else None) or 1

    @cached_property
    def has_experts(self) -> bool | None:
        """True for a mixture of experts; None where neither the plan, the run's arguments nor a trace says it."""
        if self.case.plan is not None:
            return self.case.plan.model.spec.moe is not None
        groups = (group.group for rank in self.ranks for step in rank.steps for group in step.groups)
        return True if (self.size("ep") or 1) > 1 or any(group in ("ep", "etp") for group in groups) else None

    @cached_property
    def on_gpus(self) -> tuple[Rank, ...]:
        """The ranks whose traces have a GPU's events."""
        return tuple(rank for rank in self.ranks if not rank.on_host)

    @cached_property
    def wall_s(self) -> float | None:
        """Seconds of a step in the traces, which a profiler makes longer."""
        return median(rank.middle(lambda step: step.wall_s) for rank in self.ranks) if self.ranks else None

    @cached_property
    def profiled_extra_s(self) -> float:
        """Seconds that a step with a profiler takes beyond one of the log, where both were read."""
        logs = any(source.format not in _TRACES for source in self.case.observation.sources)
        return max(0.0, self.wall_s - self.step_s) if logs and self.wall_s and self.step_s else 0.0

    def size(self, axis: str) -> int | None:
        """The size of an axis of the grid by the plan, else by the run's own arguments; None where neither says it."""
        if self.case.plan is not None:
            return int(getattr(self.case.plan.parallelism, axis))
        stated = (self.case.observation.facts.run.get("parallelism") or {}).get(axis)
        return stated if isinstance(stated, int) else None

    def has_axis(self, axis: str) -> bool:
        """False where the job is known not to have ranks along an axis; experts must be known of."""
        return self.size(axis) != 1 and (axis != "ep" or self.has_experts is True)

    def recoverable_s(self, kind: str, name: str) -> float | None:
        """Seconds that a replay without one operation, rank or stage wins; None where it was not replayed."""
        return next((w.recoverable_s for w in self.what_ifs if (w.kind, w.name) == (kind, name)), None)


def ranks_of(recorded: Recorded | None, one_stage: bool) -> tuple[Rank, ...]:
    """The ranks of traces that have steady steps, those of the warm-up alone as they are."""
    if recorded is None or recorded.traces is None:
        return ()
    ranks = []
    for report in sorted(recorded.traces.ranks, key=lambda report: (report.rank or 0, report.file)):
        steps = tuple(step for step in report.steps if not step.warm_up) or report.steps
        if steps:
            ranks.append(Rank(report, steps, 0 if report.stage is None and one_stage else report.stage))
    return tuple(ranks)
