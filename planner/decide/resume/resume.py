"""Replanning after nodes come or go: the old layout split, another one, or waiting, beside each other.

Read `replan` first. Each way gets its layout (`ways`), its seconds until it trains and its break-even (`seconds`), and
what it changes (`changes`). The plan that is answered keeps the batch asked for, and loses least until the usual
repair. Batches nearby are choices of their own: they change what is learned, which is for the user to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.answer import BatchOffer, Plan
from planner.decide.resume.changes import convergence_of, execution_of, needs_of
from planner.decide.resume.choice import Before, Choice, Closed, Kind, Resume
from planner.decide.resume.failures import Exposed
from planner.decide.resume.job import ResumedJob
from planner.decide.resume.seconds import Clock
from planner.decide.resume.ways import Way, Ways
from planner.layout.price import price_layout
from planner.layout.risk import memory_width, oom_probability
from planner.specs.cluster import ClusterSpec
from planner.specs.training import SearchLimits, TrainingSpec

LEAST_BATCH_GAIN = 0.02
"""Least share of the tokens a second for which another batch is a choice, as for `Plan.batch_offer`."""
ALIKE = 0.01
"""Share by which losses are alike, so that the way that changes less is recommended."""
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
    clock = _clock(ways)
    timed = [(way, _timed(way, ways, clock)) for way in ways.open]
    least = min(_loss(choice, job) for _, choice in timed)
    best, chosen = next(pair for pair in timed if _loss(pair[1], job) <= least + ALIKE * abs(least))
    near = [choice for way in ways.near if _gains(choice := _timed(way, ways, clock), timed)]
    waits = [clock.waiting(_wait(job))] if job.shrinks else []
    choices = sorted([*(choice for _, choice in timed), *near, *waits], key=lambda c: _ORDER.index(c.kind))
    answer = best.plan.model_copy(update={"batch_offer": _offer(near)})
    resume = _resume(job, tuple(choices), choices.index(chosen), tuple(ways.closed))
    return Replanned(answer, _with_failures(resume, Exposed.of(answer, job)))


def _clock(ways: Ways) -> Clock:
    clock, interim = Clock(ways.job), ways.interim
    return clock if interim is None else clock.with_interim(int(interim.shape.num_ranks), interim.step_s)


def _timed(way: Way, ways: Ways, clock: Clock) -> Choice:
    """A way as a choice, with its figures."""
    job, candidate = ways.job, way.candidate
    layout = price_layout(candidate, exact=False).parallelism
    loads = ways.loading(candidate)
    assert loads is not None
    fullest = max(stage.total_bytes for stage in candidate.memory)
    capacity = candidate.pricing.cluster.hardware.memory_bytes
    choice = Choice(
        kind=way.kind,
        layout=str(layout),
        parallelism=layout,
        num_gpus_used=layout.num_gpus_used,
        num_gpus_idle=layout.num_gpus_spare,
        global_batch_size=way.batch,
        step_s=candidate.step_s,
        tokens_per_s=way.tokens_per_s,
        rate_fraction=way.tokens_per_s / job.old.step.tokens_per_s,
        oom_probability=oom_probability(fullest, capacity, memory_width(candidate.pricing)),
        loads=loads,
        needs=tuple(needs_of(job, candidate, loads)),
        convergence=tuple(convergence_of(job, candidate)),
        execution=tuple(execution_of(job, layout)),
        options=("-b", str(way.batch)) if way.batch != job.case.training.global_batch_size else (),
    )
    return clock.timed(choice)


def _loss(choice: Choice, job: ResumedJob) -> float:
    """Seconds lost until the repair; where none is awaited, the rate, so that the fastest way loses least."""
    return choice.lost_until_repair_s or 0.0 if job.shrinks else -choice.rate_fraction


def _gains(near: Choice, timed: Sequence[tuple[Way, Choice]]) -> bool:
    """True for a batch nearby that gives enough more tokens a second than the same kind of way, or staying, without."""
    same = [choice.tokens_per_s for _, choice in timed if choice.kind in (near.kind, "stay")]
    return near.tokens_per_s > (1 + LEAST_BATCH_GAIN) * max(same, default=0.0)


def _wait(job: ResumedJob) -> Choice:
    """Waiting for the lost GPUs, with all as it was."""
    old, layout = job.old, job.old.parallelism
    return Choice(
        kind="wait",
        layout=str(layout),
        parallelism=layout,
        num_gpus_used=layout.num_gpus_used,
        num_gpus_idle=layout.num_gpus_spare,
        global_batch_size=old.training.global_batch_size,
        step_s=old.step.step_s,
        tokens_per_s=old.step.tokens_per_s,
        rate_fraction=1.0,
        oom_probability=old.best.oom_probability,
    )


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
