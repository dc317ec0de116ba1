"""The ways in which a job can go on, each a layout that its checkpoint can be loaded as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.answer import Plan
from planner.decide.kept import plan_of
from planner.decide.resume.batches import near_batches
from planner.decide.resume.choice import Closed, Kind, Loads
from planner.decide.resume.job import ResumedJob
from planner.decide.resume.reshard import NoReshard, case_of, fastest_for, loading, reshard_for
from planner.decide.resume.split import NoSplit, split_for, split_near, tokens_per_s, unchecked
from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.layout.replan import reprice
from planner.search.first import some_layout
from planner.search.why.remedy import with_remedy


@dataclass(frozen=True, slots=True)
class Way:
    """One way to go on that can be taken."""

    kind: Kind
    candidate: Candidate
    found: Plan | None = None
    """The plan, where a search made one."""

    @property
    def plan(self) -> Plan:
        """The plan of this way, priced exactly."""
        return self.found or plan_of(self.candidate)

    @property
    def batch(self) -> int:
        return self.candidate.pricing.training.global_batch_size

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.candidate)


class Ways:
    """The ways of one job, and the reasons why others are closed."""

    def __init__(self, job: ResumedJob) -> None:
        self.job = job
        self.closed: list[Closed] = []
        self.interim = _interim(job)
        self.nothing: Infeasible | None = None
        """The error of a search that found nothing."""
        ways = (self._stay(), self._split(), self._reshard())
        self.open = _different([way for way in ways if way is not None])
        self.near = _different([*self.open, *self._near()])[len(self.open) :]

    def loading(self, candidate: Candidate) -> Loads | None:
        """The way in which a layout loads the checkpoint; None if it cannot."""
        return loading(self.job, candidate, self.interim is not None)

    def _stay(self) -> Way | None:
        """The old layout where GPUs were added, which stay idle."""
        job, layout = self.job, self.job.layout
        if not job.grows or job.moves_batch:
            return None
        return Way("stay", unchecked(job, layout.dp, layout.micro_batch_size, job.old.training.global_batch_size))

    def _split(self) -> Way | None:
        found = split_for(self.job)
        if isinstance(found, NoSplit):
            return self._no_way("split", found.says)
        if self.job.grows and found.shape.dp <= self.job.layout.dp:
            return self._no_way("split", f"no more than dp {found.shape.dp} divide the batch of {self._batch:,}")
        return self._loadable(Way("split", found))

    def _reshard(self) -> Way | None:
        found = reshard_for(self.job)
        if isinstance(found, NoReshard):
            self.nothing = found.error
            return self._no_way("reshard", found.says)
        return self._loadable(Way("reshard", reprice(found, found.best), found))

    def _loadable(self, way: Way) -> Way | None:
        """The way, if it can load the checkpoint."""
        if self.loading(way.candidate) is not None:
            return way
        row = self.job.checkpoint
        return self._no_way(
            way.kind, f"a checkpoint of {self.job.old.runtime} ({row.format}) keeps {', '.join(row.keeps)}"
        )

    def _no_way(self, kind: Kind, reason: str) -> Way | None:
        """No way, for a reason that is told."""
        self.closed.append(Closed(kind=kind, reason=reason))
        return None

    @property
    def _batch(self) -> int:
        return self.job.case.training.global_batch_size

    def _near(self) -> Iterator[Way]:
        """The fastest way of each kind under a batch nearby, unless the user asks for another batch than the old."""
        job = self.job
        if job.moves_batch:
            return
        least = max((int(way.candidate.shape.dp) for way in self.open if way.kind != "reshard"), default=0)
        most = job.num_gpus // job.copy_gpus
        split = split_near(job, most, least) if most > least else NoSplit("")
        if not isinstance(split, NoSplit) and (way := self._loadable(Way("split", split))) is not None:
            yield way
        searched = next((way.found for way in self.open if way.found is not None), None)
        if searched is None:
            return
        layouts = [job.layout, searched.parallelism, *(other.parallelism for other in searched.alternatives)]
        others = [fastest_for(job, batch) for batch in near_batches(job, layouts)]
        loadable = [other for other in others if other is not None and self.loading(other) is not None]
        if loadable:
            yield Way("reshard", max(loadable, key=tokens_per_s))

    def infeasible(self) -> Infeasible:
        """The error of a job that cannot go on at all, with a remedy where one is found."""
        job, says = self.job, f"no way to go on with {self.job.num_gpus:,} GPUs"
        case = case_of(job)
        if self.nothing is None or isinstance(case, NoReshard):
            why = "; ".join(f"{closed.kind}: {closed.reason}" for closed in self.closed)
            return Infeasible(f"{says}: {why}", self._enough())
        told = with_remedy(self.nothing, case, some_layout, job.deadline)
        option = (told.remedy or {}).get("options", ["", ""])
        axis = option[0].removeprefix("--").replace("-", "_")
        hint = f"leave {axis} out of --keep: a layout fits with {' '.join(option)}" if axis in job.keep else told.hint
        return Infeasible(
            f"{says}: {told.message}", hint, told.rejections, nearest=told.nearest, remedy=told.remedy
        )  # fmt: skip

    def _enough(self) -> str:
        """The fewest whole nodes, up to those of the old layout, on which a split can load the checkpoint."""
        size, layout = self.job.case.cluster.node_size, self.job.layout
        for dp in range(1, layout.dp + 1):
            used = self.job.copy_gpus * dp
            num_gpus = used if used < size else -(-used // size) * size
            if num_gpus >= self.job.old.cluster.num_gpus:
                break
            found = split_for(self.job.on(num_gpus))
            if not isinstance(found, NoSplit) and self.loading(found) is not None:
                return f"--gpus {num_gpus} is enough"
        return "wait for the lost GPUs" if self.job.shrinks else "leave -b out, and the job stays as it is"


def _interim(job: ResumedJob) -> Candidate | None:
    """A split that loads the checkpoint as it is, whatever the user keeps and pins: it could write it again."""
    row = job.checkpoint
    if row.rewritten is None or row.rewritten.by != "resave":
        return None
    found = split_for(replace(job, keep=(), case=job.case.free()))
    return None if isinstance(found, NoSplit) or loading(job, found, has_split=False) != "as_is" else found


def _different(ways: list[Way]) -> list[Way]:
    """The ways without those whose layout an earlier one has."""
    keys = [_key(way) for way in ways]
    return [way for number, way in enumerate(ways) if keys[number] not in keys[:number]]


def _key(way: Way) -> tuple[object, ...]:
    candidate = way.candidate
    return candidate.shape, candidate.split, candidate.schedule, way.batch
