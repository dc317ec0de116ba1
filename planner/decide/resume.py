"""Replanning after nodes come or go: the old layout split, another one, or waiting, beside each other.

Read `replan` first. Each way gets its layout (`ways`), its seconds until it trains and its break-even (`Clock`), and
what it changes (`convergence_of`, `execution_of`). The plan that is answered keeps the batch asked
for, and loses least until the usual repair; what each failure of it costs, and how many spare nodes pay, stands beside
it. Batches nearby are choices of their own: they change what is learned, which is for the user to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.answer import BatchOffer, Layout, Plan
from planner.decide.job import (
    Answer,
    Before,
    Choice,
    Clock,
    Closed,
    Failure,
    Kind,
    Loads,
    Resume,
    ResumedJob,
    SpareNodes,
    losses_on,
)
from planner.decide.ways import Way, Ways, fastest_for, loading, split_for, tokens_per_s
from planner.layout.candidate import Candidate
from planner.layout.confidence import memory_width, oom_probability
from planner.layout.price import price_layout
from planner.months.losses import FailureKind, Losses, failure_kinds
from planner.months.whole_run import (
    Spares,
    best_interval_s,
    cheapest_spares,
    going_on_s,
    rhythm_of,
    spares,
    waiting_s,
)
from planner.specs.cluster import ClusterSpec
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.load import switches_of
from planner.trainers.switches import SWITCHES, written

AXES = (
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "num_microbatches", "schedule", "zero_stage",
    "shard_size", "recompute", "rank_order",
)  # fmt: skip


def needs_of(job: ResumedJob, candidate: Candidate, loads: Loads) -> Iterator[str]:
    """The things to be done for the checkpoint to load."""
    row, runtime = job.checkpoint, job.old.runtime_spec
    if row.rewritten is not None and loads == "resave":
        yield f"a split loads it and saves it again with {row.rewritten.says}"
    elif row.rewritten is not None and loads == "ready":
        yield f"it must have been saved with {row.rewritten.ready}"
    elif row.rewritten is not None and loads == "convert":
        yield f"{row.rewritten.says} converts it"
    if row.in_buckets and loads == "as_is" and runtime.gradient_overlap_fraction > 0:
        old, new = (runtime.bucket_among(int(size)) for size in (job.layout.shard_size, candidate.shape.shard_size))
        if old != new:
            yield f"gradients are reduced in buckets of {old:,} parameters, as before"
    if row.data and candidate.shape.dp != job.layout.dp:
        yield row.data


def convergence_of(job: ResumedJob, candidate: Candidate) -> Iterator[str]:
    """The changes that may affect what is learned."""
    old, new = job.old.training.global_batch_size, candidate.pricing.training.global_batch_size
    if old != new:
        yield f"batch {old:,} → {new:,} ({new / old - 1:+.1%})"
    if job.checkpoint.data and candidate.shape.dp != job.layout.dp:
        yield "order of the data"
    yield from (words for words, touches in _switches(job) if touches)


def execution_of(job: ResumedJob, layout: Layout) -> Iterator[str]:
    """The changes that affect seconds and bytes alone; sums are rounded in another order."""
    for axis in AXES:
        old, new = getattr(job.layout, axis), getattr(layout, axis)
        if old != new:
            yield f"{axis} {old} → {new}"
    yield from (words for words, touches in _switches(job) if not touches)


def _switches(job: ResumedJob) -> Iterator[tuple[str, bool]]:
    """The switches that the user moved, and whether one of the two values changes numerics."""
    for name in switches_of(job.old.runtime_spec):
        row = SWITCHES[name]
        old, new = row.value_of(job.old.runtime_spec), row.value_of(job.case.runtime)
        if old != new:
            yield f"{name} {written(old)} → {written(new)}", old in row.consent or new in row.consent


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
    """The job whose plan goes on."""
    _known: dict[tuple[int, bool], _Fallback | None] = field(default_factory=dict, compare=False)

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
        job = self.job.on(left)
        split, rate, found = split_for(job), self.job.old.step.tokens_per_s, list[_Fallback]()
        if not isinstance(split, str) and (loads := loading(job, split, False)) is not None:
            num_gpus = int(split.shape.num_ranks)
            clock = Clock(clock.job, split)
            found.append(_Fallback("splits", tokens_per_s(split) / rate, clock.standstill(num_gpus, loads).value_s))
        other = fastest_for(job, job.case.training.global_batch_size) if searches else None
        if other is not None and (loads := loading(job, other, bool(found))) is not None:
            still = clock.standstill(int(other.shape.num_ranks), loads)
            found.append(_Fallback("reshards", tokens_per_s(other) / rate, still.value_s))
        return max(found, key=lambda each: each.rate_fraction, default=None)

    def spare_nodes(self) -> tuple[tuple[SpareNodes, ...], int]:
        """The daily cost of each number of spare nodes, from none to beyond the cheapest, and the cheapest number."""
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


LEAST_BATCH_GAIN = 0.02
"""Least share of the tokens a second for which another batch is a choice, as for `Plan.batch_offer`."""
ALIKE = 0.01
"""Relative difference below which losses count as equal, so that the choice that changes less is recommended."""
_ORDER: tuple[Kind, ...] = ("stay", "split", "reshard", "wait")


@dataclass(frozen=True, slots=True)
class Replanned:
    """The plan that is recommended, and the ways beside it."""

    plan: Plan
    resume: Resume

    def to_json(self) -> dict[str, object]:
        """The plan's JSON with the ways under `resume`."""
        return {**self.plan.to_json(), "resume": self.resume.to_json()}


def replan(
    plan: Plan,
    num_gpus: int,
    keep: Sequence[str] = (),
    *,
    training: TrainingSpec | None = None,
    limits: SearchLimits | None = None,
    cluster: ClusterSpec | None = None,
) -> Replanned:
    """How the job of `plan` goes on with `num_gpus` GPUs: the layouts that its checkpoint can be loaded as.

    `keep` names axes of the layout that stay beside those that the checkpoint is bound to. `training`, `limits` and
    `cluster` take the place of the plan's own, for another batch for example. Raises Infeasible, with the fewest GPUs
    that are enough, if no layout fits; SpecError for axes that nobody can keep.
    """
    job = ResumedJob.of(plan, num_gpus, keep, training, limits, cluster)
    if num_gpus == plan.cluster.num_gpus and not job.moves_batch:
        return Replanned(plan, _resume(job, (), 0))
    ways = Ways(job)
    if not ways.open:
        raise ways.infeasible()
    clock = Clock(job, ways.interim)
    timed = [(way, _timed(way, ways, clock)) for way in ways.open]
    least = min(_loss(choice, job) for _, choice in timed)
    best, chosen = next(pair for pair in timed if _loss(pair[1], job) <= least + ALIKE * abs(least))
    near = [choice for way in ways.near if _gains(choice := _timed(way, ways, clock), timed)]
    waits = [clock.waiting(_wait(job))] if job.shrinks else []
    choices = sorted([*(choice for _, choice in timed), *near, *waits], key=lambda c: _ORDER.index(c.kind))
    answer = best.plan.model_copy(update={"batch_offer": _offer(near)})
    resume = _resume(job, tuple(choices), choices.index(chosen), tuple(ways.closed))
    return Replanned(answer, _with_failures(resume, Exposed(replace(job, old=answer))))


def _timed(way: Way, ways: Ways, clock: Clock) -> Choice:
    """A way as a choice, with its figures."""
    job, candidate = ways.job, way.candidate
    layout = price_layout(candidate, exact=False).parallelism
    loads = ways.loading(candidate)
    assert loads is not None
    fullest = max(stage.total_bytes for stage in candidate.memory)
    capacity = candidate.pricing.cluster.hardware.memory_bytes
    choice = _choice(
        way.kind,
        layout,
        way.batch,
        candidate.step_s,
        job,
        tokens_per_s=way.tokens_per_s,
        oom_probability=oom_probability(fullest, capacity, memory_width(candidate.pricing)),
        loads=loads,
        needs=tuple(needs_of(job, candidate, loads)),
        convergence=tuple(convergence_of(job, candidate)),
        execution=tuple(execution_of(job, layout)),
        options=("-b", str(way.batch)) if way.batch != job.case.training.global_batch_size else (),
    )
    return clock.timed(choice)


def _choice(kind: Kind, layout: Layout, batch: int, step_s: float, job: ResumedJob, **figures: Any) -> Choice:
    """A choice with the sizes of its layout, beside the old plan's rate."""
    return Choice(
        kind=kind,
        layout=str(layout),
        parallelism=layout,
        num_gpus_used=layout.num_gpus_used,
        num_gpus_idle=layout.num_gpus_spare,
        global_batch_size=batch,
        step_s=step_s,
        rate_fraction=figures["tokens_per_s"] / job.old.step.tokens_per_s,
        **figures,
    )


def _loss(choice: Choice, job: ResumedJob) -> float:
    """Seconds lost until the repair; where none is awaited, the rate, so that the fastest way loses least."""
    return choice.lost_until_repair_s or 0.0 if job.shrinks else -choice.rate_fraction


def _gains(near: Choice, timed: Sequence[tuple[Way, Choice]]) -> bool:
    """True for a batch nearby that gives enough more tokens a second than the same kind of way, or staying, without."""
    same = [choice.tokens_per_s for _, choice in timed if choice.kind in (near.kind, "stay")]
    return near.tokens_per_s > (1 + LEAST_BATCH_GAIN) * max(same, default=0.0)


def _wait(job: ResumedJob) -> Choice:
    """Waiting for the lost GPUs, with all as it was."""
    old, figures = job.old, {"tokens_per_s": job.old.step.tokens_per_s, "oom_probability": job.old.best.oom_probability}
    return _choice("wait", old.parallelism, old.training.global_batch_size, old.step.step_s, job, **figures)


def _offer(near: Sequence[Choice]) -> BatchOffer | None:
    """The batch nearby that gives most tokens a second."""
    if not near:
        return None
    best = max(near, key=lambda choice: choice.tokens_per_s)
    return BatchOffer(global_batch_size=best.global_batch_size, step_s=best.step_s, tokens_per_s=best.tokens_per_s)


def _resume(job: ResumedJob, choices: tuple[Choice, ...], recommended: int, closed: tuple[Closed, ...] = ()) -> Resume:
    old, clock = job.old, Clock(job)
    repair, standby = clock.old.repair_s, clock.standby
    return Resume(
        before=Before(
            num_gpus=old.cluster.num_gpus,
            layout=str(old.parallelism),
            global_batch_size=old.training.global_batch_size,
            step_s=old.step.step_s,
            tokens_per_s=old.step.tokens_per_s,
        ),
        num_gpus=job.num_gpus,
        num_gpus_lost=old.cluster.num_gpus - job.num_gpus,
        keep=job.keep,
        checkpoint=job.checkpoint,
        repair_s=repair.value,
        repair_s_interval=(repair.low, repair.high),
        standby_s=standby.value_s,
        choices=choices,
        closed=closed,
        recommended=recommended,
        sources=clock.sources,
    )


def _with_failures(resume: Resume, exposed: Exposed) -> Resume:
    """The answer with the failures of the plan that goes on, and what spare nodes cost."""
    rows, cheapest = exposed.spare_nodes()
    return resume.model_copy(
        update={
            "failures": exposed.failures(),
            "spares": rows,
            "num_idle_nodes": exposed.num_idle_nodes,
            "num_spare_nodes_cheapest": cheapest,
            "num_spare_nodes_advised": exposed.losses.num_spare_nodes_advised,
        }
    )
