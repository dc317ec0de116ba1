"""The failures of the job that goes on, what each costs, and how many spare nodes pay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planner.answer import Plan
from planner.decide.resume.choice import Answer, Failure, SpareNodes
from planner.decide.resume.job import ResumedJob
from planner.decide.resume.reshard import fastest_for, loading
from planner.decide.resume.seconds import Clock, losses_on
from planner.decide.resume.split import NoSplit, split_for, tokens_per_s
from planner.months.closed_form import best_interval_s, rhythm_of
from planner.months.failure_kinds import FailureKind, failure_kinds
from planner.months.losses import Losses
from planner.months.spares import Spares, cheapest_spares, spares
from planner.months.standstill import going_on_s, waiting_s

SECONDS_PER_HOUR = 3600
MORE_SHOWN = 2
"""Numbers of spare nodes above the cheapest that are shown."""


@dataclass(frozen=True, slots=True)
class _Fallback:
    """The fastest way to go on after some nodes are lost, with the batch as it is."""

    answer: Answer
    rate_fraction: float
    back_s: float


@dataclass(frozen=True, slots=True)
class Exposed:
    """The job that goes on, exposed to failures."""

    job: ResumedJob
    """Its plan is the one that goes on."""
    _known: dict[tuple[int, bool], _Fallback | None] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, plan: Plan, job: ResumedJob) -> Exposed:
        """The plan that goes on, on the GPUs that there are now."""
        return cls(replace(job, old=plan))

    @property
    def losses(self) -> Losses:
        return losses_on(self.job, self.job.layout.num_gpus_used)

    @property
    def num_idle_nodes(self) -> int:
        """Whole nodes of the GPUs given that no rank uses: they can stand in for lost ones."""
        return self.job.layout.num_gpus_spare // self.job.case.cluster.node_size

    @property
    def num_spare_nodes(self) -> int:
        return self.num_idle_nodes + (self.job.case.training.operations.num_spare_nodes or 0)

    def failures(self) -> tuple[Failure, ...]:
        """All kinds of failures, with the answer to each that loses least."""
        kinds = failure_kinds(self.losses, self.job.case.cluster)
        return tuple(self._failure(kind) for kind in kinds if kind.per_day.value > 0)

    def _failure(self, kind: FailureKind) -> Failure:
        losses, rate = self.losses, self.job.old.step.tokens_per_s
        clock = Clock(self.job)
        answer, still_s, left = self._answer(kind, clock)
        rhythm = rhythm_of(replace(losses, num_spare_nodes=None), lambda fact: fact.value)
        work_s = best_interval_s(rhythm) / 2 + float(rhythm.write_s)
        lost_s = work_s + still_s
        return Failure(
            taken=kind.taken,
            num_nodes=kind.num_nodes,
            per_day=kind.per_day.value,
            per_day_interval=(kind.per_day.low, kind.per_day.high),
            job=answer,
            lost_s=lost_s,
            tokens_per_s=left * rate,
            gpu_hours_per_day=kind.per_day.value * lost_s * losses.num_gpus / SECONDS_PER_HOUR,
            source=kind.source,
        )

    def _answer(self, kind: FailureKind, clock: Clock) -> tuple[Answer, float, float]:
        """The job's answer, the seconds at its full rate that it loses, and the share of the rate until the repair."""
        used, old = self.job.layout.num_gpus_used, clock.old
        if not kind.num_nodes:
            return "restarts", clock.standstill(used, "as_is").value_s, 1.0
        if kind.num_nodes <= self.num_spare_nodes:
            return "stands_in", clock.standby.value_s, 1.0
        waits_s = float(waiting_s(old.repair_s.value, old.detection_s.value, clock.again_s))
        found = self.fallback(kind.num_nodes, clock, searches=True)
        if found is None:
            return "waits", waits_s, 0.0
        return_s = clock.standstill(used, "as_is").parts["read"].value + clock.again_s
        goes_on_s = float(going_on_s(old.repair_s.value, found.back_s, found.rate_fraction, return_s))
        return (found.answer, goes_on_s, found.rate_fraction) if goes_on_s < waits_s else ("waits", waits_s, 0.0)

    def fallback(self, num_nodes: int, clock: Clock, searches: bool) -> _Fallback | None:
        """The fastest layout without some nodes: split, or, if it is searched for, any that can be loaded."""
        if (num_nodes, searches) not in self._known:
            self._known[num_nodes, searches] = self._found(num_nodes, clock, searches)
        return self._known[num_nodes, searches]

    def _found(self, num_nodes: int, clock: Clock, searches: bool) -> _Fallback | None:
        size = self.job.case.cluster.node_size
        # idle nodes are the first to be used up
        left = self.job.num_gpus - num_nodes * size
        if left < size:
            return None
        job = replace(self.job.on(left), deadline=self.job.deadline)
        split, rate, found = split_for(job), self.job.old.step.tokens_per_s, list[_Fallback]()
        if not isinstance(split, NoSplit) and (loads := loading(job, split, False)) is not None:
            num_gpus = int(split.shape.num_ranks)
            clock = clock.with_interim(num_gpus, split.step_s)
            found.append(_Fallback("splits", tokens_per_s(split) / rate, clock.standstill(num_gpus, loads).value_s))
        other = fastest_for(job, job.case.training.global_batch_size) if searches else None
        if other is not None and (loads := loading(job, other, bool(found))) is not None:
            still = clock.standstill(int(other.shape.num_ranks), loads)
            found.append(_Fallback("reshards", tokens_per_s(other) / rate, still.value_s))
        return max(found, key=lambda each: each.rate_fraction, default=None)

    def spare_nodes(self) -> tuple[tuple[SpareNodes, ...], int]:
        """The cost of numbers of spare nodes a day, from none to beyond the cheapest, and the cheapest."""
        clock, size = Clock(self.job), self.job.case.cluster.node_size
        lost_alone = self.num_idle_nodes + 1
        found = self.fallback(lost_alone, clock, searches=not self.num_idle_nodes)
        losses = replace(self.losses, rate_without_node_fraction=min(1.0, found.rate_fraction) if found else 0.0)
        cheapest = cheapest_spares(losses, size, self.num_idle_nodes).num_nodes
        shown = range(max(cheapest, self.num_idle_nodes, losses.num_spare_nodes_advised) + MORE_SHOWN)
        rows = (spares(losses, number, size, self.num_idle_nodes) for number in shown)
        return tuple(self._shown(row) for row in rows), cheapest

    def _shown(self, row: Spares) -> SpareNodes:
        return SpareNodes(
            num_nodes=row.num_nodes,
            num_idle=min(row.num_nodes, self.num_idle_nodes),
            none_free_fraction=row.none_free_fraction,
            idle_gpu_hours=row.idle_gpu_hours,
            lost_gpu_hours=row.lost_gpu_hours,
        )
