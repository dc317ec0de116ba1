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
    ORDER,
    Answer,
    Before,
    Choice,
    Clock,
    Failure,
    Kind,
    Loads,
    Resume,
    ResumedJob,
    losses_on,
    transfer,
)
from planner.decide.ways import Way, Ways, fastest_for, loading, split_for, tokens_per_s
from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.months.losses import Losses, failure_kinds
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


def changes_of(job: ResumedJob, candidate: Candidate, layout: Layout) -> Iterator[tuple[bool, str]]:
    """Everything that changes, and whether it may affect what is learned; the rest affects seconds and bytes alone,
    and the order in which sums are rounded."""
    old, new = job.old.training.global_batch_size, candidate.pricing.training.global_batch_size
    if old != new:
        yield True, f"batch {old:,} → {new:,} ({new / old - 1:+.1%})"
    if job.checkpoint.data and candidate.shape.dp != job.layout.dp:
        yield True, "order of the data"
    for axis in AXES:
        before, after = getattr(job.layout, axis), getattr(layout, axis)
        if before != after:
            yield False, f"{axis} {before} → {after}"
    for row in map(SWITCHES.__getitem__, switches_of(job.old.runtime_spec)):
        value, moved = row.value_of(job.old.runtime_spec), row.value_of(job.case.runtime)
        if value != moved:
            yield value in row.consent or moved in row.consent, f"{row.name} {written(value)} → {written(moved)}"


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

    def failures(self) -> tuple[Failure, ...]:
        """All kinds of failures, with the answer to each that loses least."""
        losses, rate = self.losses, self.job.old.step.tokens_per_s
        rhythm = rhythm_of(replace(losses, num_spare_nodes=None), lambda fact: fact.value)
        work_s, rows = best_interval_s(rhythm) / 2 + float(rhythm.write_s), []
        for kind in failure_kinds(losses, self.job.case.cluster):
            if kind.per_day.value > 0:
                answer, still_s, left = self._answer(kind.num_nodes)
                per_day, lost_s = kind.per_day, work_s + still_s
                row = Failure(
                    taken=kind.taken,
                    num_nodes=kind.num_nodes,
                    per_day=per_day.value,
                    per_day_interval=(per_day.low, per_day.high),
                    job=answer,
                    lost_s=lost_s,
                    tokens_per_s=left * rate,
                    gpu_hours_per_day=per_day.value * lost_s * losses.num_gpus / SECONDS_PER_HOUR,
                    source=kind.source,
                )
                rows.append(row)
        return tuple(rows)

    def _answer(self, num_nodes: int) -> tuple[Answer, float, float]:
        """The job's answer, the seconds at its full rate that it loses, and the share of the rate until the repair."""
        clock, used = Clock(self.job), self.job.layout.num_gpus_used
        if not num_nodes:
            return "restarts", clock.standstill(used, "as_is").value_s, 1.0
        if num_nodes <= self.num_idle_nodes + (self.job.case.training.operations.num_spare_nodes or 0):
            return "stands_in", clock.standby.value_s, 1.0
        repair_s = clock.old.repair_s.value
        waits_s = float(waiting_s(repair_s, clock.old.detection_s.value, clock.again_s))
        found = self.fallback(num_nodes, searches=True)
        if found is not None:
            return_s = transfer(clock.old).value + clock.again_s
            goes_on_s = float(going_on_s(repair_s, found.back_s, found.rate_fraction, return_s))
            if goes_on_s < waits_s:
                return found.answer, goes_on_s, found.rate_fraction
        return "waits", waits_s, 0.0

    def fallback(self, num_nodes: int, searches: bool) -> _Fallback | None:
        """The fastest layout without some nodes: split, or, if it is searched for, any that can be loaded."""
        if (num_nodes, searches) not in self._known:
            found = self._fallbacks(num_nodes, searches)
            self._known[num_nodes, searches] = max(found, key=lambda each: each.rate_fraction, default=None)
        return self._known[num_nodes, searches]

    def _fallbacks(self, num_nodes: int, searches: bool) -> Iterator[_Fallback]:
        # idle nodes are the first to be used up
        left, interim = self.job.num_gpus - num_nodes * self.job.case.cluster.node_size, None
        if left < self.job.case.cluster.node_size:
            return
        job = self.job.on(left)
        other = fastest_for(job, job.case.training.global_batch_size) if searches else None
        tried: tuple[tuple[Answer, Candidate | str | None], ...] = (("splits", split_for(job)), ("reshards", other))
        for answer, found in tried:
            if isinstance(found, Candidate) and (loads := loading(job, found, interim is not None)) is not None:
                still = Clock(self.job, interim).standstill(int(found.shape.num_ranks), loads)
                yield _Fallback(answer, tokens_per_s(found) / self.job.old.step.tokens_per_s, still.value_s)
                interim = found

    def spare_nodes(self) -> tuple[tuple[Spares, ...], int]:
        """The daily cost of each number of spare nodes, from none to beyond the cheapest, and the cheapest number."""
        size, idle = self.job.case.cluster.node_size, self.num_idle_nodes
        found = self.fallback(idle + 1, searches=not idle)
        losses = replace(self.losses, rate_without_node_fraction=min(1.0, found.rate_fraction) if found else 0.0)
        cheapest = cheapest_spares(losses, size, idle).num_nodes
        shown = range(max(cheapest, idle, losses.num_spare_nodes_advised) + MORE_SHOWN)
        return tuple(spares(losses, number, size, idle) for number in shown), cheapest


LEAST_BATCH_GAIN = 0.02
"""Least share of the tokens a second for which another batch is a choice, as for `Plan.batch_offer`."""
ALIKE = 0.01
"""Relative difference below which losses count as equal, so that the choice that changes less is recommended."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """The plan that is recommended, and the ways beside it."""

    plan: Plan
    resume: Resume

    def to_json(self) -> dict[str, object]:
        """The plan's JSON with the ways under `resume`."""
        return {**self.plan.to_json(), "resume": self.resume.model_dump(mode="json")}


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
    waits = [_wait(clock)] if job.shrinks else []
    choices = sorted([*(choice for _, choice in timed), *near, *waits], key=lambda c: ORDER.index(c.kind))
    gaining = max(near, key=lambda choice: choice.tokens_per_s, default=None)
    offer = gaining and BatchOffer(**{name: getattr(gaining, name) for name in BatchOffer.model_fields})
    answer = best.plan.model_copy(update={"batch_offer": offer})
    exposed = Exposed(replace(job, old=answer))
    rows, cheapest = exposed.spare_nodes()
    resume = _resume(job, choices, choices.index(chosen)).model_copy(
        update={
            "closed": tuple(ways.closed),
            "failures": exposed.failures(),
            "spares": rows,
            "num_idle_nodes": exposed.num_idle_nodes,
            "num_spare_nodes_cheapest": cheapest,
            "num_spare_nodes_advised": exposed.losses.num_spare_nodes_advised,
        }
    )
    return Replanned(answer, resume)


def _timed(way: Way, ways: Ways, clock: Clock) -> Choice:
    """A way as a choice, with its figures."""
    job, candidate = ways.job, way.candidate
    priced = price_layout(candidate, exact=False)
    loads, changes = ways.loading(candidate), [*changes_of(job, candidate, priced.parallelism)]
    assert loads is not None
    return _choice(
        clock,
        way.kind,
        priced.parallelism,
        way.batch,
        candidate.step_s,
        loads,
        oom_probability=priced.oom_probability,
        needs=tuple(needs_of(job, candidate, loads)),
        convergence=tuple(words for touches, words in changes if touches),
        execution=tuple(words for touches, words in changes if not touches),
        options=("-b", str(way.batch)) if way.batch != job.case.training.global_batch_size else (),
    )


def _wait(clock: Clock) -> Choice:
    """Waiting for the lost GPUs, with all as it was."""
    old = clock.job.old
    sizes = (old.parallelism, old.training.global_batch_size, old.step.step_s)
    return _choice(clock, "wait", *sizes, oom_probability=old.best.oom_probability)


def _choice(
    clock: Clock, kind: Kind, layout: Layout, batch: int, step_s: float, loads: Loads = "as_is", **figures: Any
) -> Choice:
    """A choice with the sizes of its layout, its rate beside the old plan's, and the seconds until it trains."""
    old = clock.job.old
    rate = batch * old.training.seq_length / step_s
    fraction = rate / old.step.tokens_per_s
    return Choice(
        kind=kind,
        layout=str(layout),
        parallelism=layout,
        num_gpus_used=layout.num_gpus_used,
        num_gpus_idle=layout.num_gpus_spare,
        global_batch_size=batch,
        step_s=step_s,
        tokens_per_s=rate,
        rate_fraction=fraction,
        loads=loads,
        **figures,
        **clock.figures(kind, layout.num_gpus_used, loads, fraction),
    )


def _loss(choice: Choice, job: ResumedJob) -> float:
    """Seconds lost until the repair; where none is awaited, the rate, so that the fastest way loses least."""
    return choice.lost_until_repair_s or 0.0 if job.shrinks else -choice.rate_fraction


def _gains(near: Choice, timed: Sequence[tuple[Way, Choice]]) -> bool:
    """True for a batch nearby that gives enough more tokens a second than the same kind of way, or staying, without."""
    same = [choice.tokens_per_s for _, choice in timed if choice.kind in (near.kind, "stay")]
    return near.tokens_per_s > (1 + LEAST_BATCH_GAIN) * max(same, default=0.0)


def _resume(job: ResumedJob, choices: Sequence[Choice], recommended: int) -> Resume:
    """The answer without what later failures cost."""
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
        choices=tuple(choices),
        recommended=recommended,
        sources=clock.sources,
    )
