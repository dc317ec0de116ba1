"""The ways in which a job can go on, each a layout that its checkpoint can be loaded as.

The old layout is split over another number of data-parallel ranks, or any other one is loaded, written again or
converted where its files ask for that; batches near the one asked for are tried where the GPUs divide it badly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from planner.answer import Plan
from planner.decide.job import OF_THE_JOB, ORDER, Closed, Kind, Loads, ResumedJob, way_to_load
from planner.decide.phases import plan_of, refused
from planner.errors import Infeasible, SolverError
from planner.layout.candidate import Candidate
from planner.layout.confidence import headroom_bytes
from planner.layout.price import reprice
from planner.layout.variation import setting_of
from planner.schedule.orders import violation
from planner.search.case import Case
from planner.search.layouts import find_layouts
from planner.search.search import search
from planner.search.why.remedy import with_remedy
from planner.shape import NEAR_FRACTION, SIZES, divisors, liked_batch

MOVED = ("dp", "micro_batch_size", "shard_size")
"""Axes that a split may move."""
MOST_SIZES = 3
"""Data-parallel sizes, the largest first, for which a batch nearby is looked for."""


def split_for(job: ResumedJob) -> Candidate | str:
    """The layout with the most data-parallel ranks that divide the batch, obey all rules and fit."""
    most, pins = job.num_gpus // job.copy_gpus, job.case.pins
    if (pinned := _against_a_pin(job.start, {axis: pins[axis] for axis in pins if axis not in MOVED})) is not None:
        return pinned
    if not most:
        return f"one copy of the model takes {job.copy_gpus:,} GPUs, {job.num_gpus:,} are there"
    reason = ""
    for dp in _sizes(job, most):
        for other in _tried(job, dp, job.case.training.global_batch_size):
            if not isinstance(other, str):
                return other
            reason = reason or other
    return reason or "the old number of data-parallel ranks cannot be kept"


def split_near(job: ResumedJob, least_dp: int) -> Candidate | None:
    """The split with the most data-parallel ranks, above `least_dp`, at the nearest batch within NEAR_FRACTION that
    they divide: each fewer rank loses more than a batch gains."""
    shape, batch = job.start.shape, job.case.training.global_batch_size
    slots, experts = int(shape.tp * shape.cp), int(shape.ep * shape.etp)
    sizes = (dp for dp in _sizes(job, job.num_gpus // job.copy_gpus) if dp > least_dp and slots * dp % experts == 0)
    for dp in islice(sizes, MOST_SIZES):
        for near in _batches(job, dp, batch):
            for other in _tried(job, dp, near):
                if not isinstance(other, str):
                    return other
    return None


def tokens_per_s(candidate: Candidate) -> float:
    """Tokens that a layout trains a second."""
    return candidate.pricing.training.tokens_per_step / candidate.step_s


def _sizes(job: ResumedJob, most: int) -> Iterator[int]:
    """Data-parallel sizes that may be tried, the largest first."""
    pins = job.case.pins | (job.pins(("dp",)) if "dp" in job.keep else {})
    return (dp for dp in range(most, 0, -1) if dp in pins.get("dp", (dp,)))


def _batches(job: ResumedJob, dp: int, batch: int) -> list[int]:
    """Batches within NEAR_FRACTION that `dp` ranks divide, the nearest first."""
    step = dp * min(_micro_batches(job))
    first, last = -(-batch * (1 - NEAR_FRACTION) // step), batch * (1 + NEAR_FRACTION) // step
    near = [step * count for count in range(max(1, int(first)), int(last) + 1)]
    return sorted(near, key=lambda each: abs(each - batch))


def _micro_batches(job: ResumedJob) -> list[int]:
    """Sizes of a micro-batch that may be tried, the old one first: a smaller one divides more, and needs no more."""
    old = job.layout.micro_batch_size
    allowed = (old,) if "micro_batch_size" in job.keep else job.case.pins.get("micro_batch_size")
    return [size for size in reversed(divisors(old, old)) if allowed is None or size in allowed] or [old]


def _tried(job: ResumedJob, dp: int, batch: int) -> Iterator[Candidate | str]:
    """The layout for each micro-batch, or the reason why there is none."""
    for size in _micro_batches(job):
        if batch % (dp * size):
            steps = max(1, round(batch / (dp * size))) * dp * size
            near = f"{steps:,} would" if steps else "none does"
            yield f"dp {dp} · micro-batch {size} does not divide the batch of {batch:,}; {near}"
            continue
        yield with_ranks(job, dp, size, batch)


def with_ranks(job: ResumedJob, dp: int, micro_batch_size: int, batch: int) -> Candidate | str:
    """The old layout with `dp` ranks and another batch, or the sentence that refuses it."""
    found, case = unchecked(job, dp, micro_batch_size, batch), job.case.with_batch(batch)
    shape = found.shape
    if (pinned := _against_a_pin(found, case.pins)) is not None:
        return pinned
    if shape.dp * shape.cp % shape.shard_size:
        return f"groups of {shape.shard_size} ranks, which share the weights, do not divide dp {dp} · cp {shape.cp}"
    error = violation(found.schedule, int(shape.pp), int(shape.vpp), found.num_microbatches)
    return refused(found, case.limits) if error is None else error.message


def _against_a_pin(candidate: Candidate, pins: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The sentence on the first pinned axis that a layout has at another value; without stages it has no schedule."""
    shape = candidate.shape
    values = {name: getattr(shape, name) for name in SIZES if name in pins}
    values |= {"rank_order": shape.rank_order, "recompute": setting_of(candidate).recompute}
    if shape.pp > 1:
        values["schedule"] = candidate.schedule
    axis = next((axis for axis, allowed in pins.items() if values.get(axis, allowed[0]) not in allowed), None)
    if axis is None:
        return None
    return f"--{axis.replace('_', '-')} {','.join(map(str, pins[axis]))}: the running job has {values[axis]}"


def unchecked(job: ResumedJob, dp: int, micro_batch_size: int, batch: int) -> Candidate:
    """The old layout with `dp` ranks and another batch, priced on the new GPUs, whatever rules say of it.

    An order that was made to measure for another number of micro-batches gives way to the schedule that it came from.
    """
    start, case = job.start, job.case.with_batch(batch)
    old = start.shape
    num_microbatches = batch // (dp * micro_batch_size)
    shape = replace(
        old,
        dp=dp,
        shard_size=old.shard_size if old.shard_size != old.dp * old.cp else dp * old.cp,
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        seq_length=case.training.seq_length,
    )
    pricing = replace(start.pricing, cluster=case.cluster, training=case.training, runtime=case.runtime)
    pricing = replace(pricing, headroom_bytes=headroom_bytes(pricing, case.limits))
    made = start.made_order if num_microbatches == start.num_microbatches else None
    table = pricing.table(shape, start.split.priced_modes)
    return replace(start, pricing=pricing, table=table, made_order=made)


ROUGH_GAP_FRACTION = 0.02
"""Gap of the searches for layouts beside the answer: other batches, and after failures that may come."""


def case_of(job: ResumedJob) -> Case | str:
    """The case of all layouts that the checkpoint can be loaded as and that kept axes allow, or why there are none."""
    row = job.checkpoint
    bound = row.rewritten.keeps if row.rewritten is not None else row.keeps
    if "layers" in (*bound, *job.keep):
        who = "--keep" if "layers" in job.keep else f"a checkpoint of {job.old.runtime}, {row.format},"
        return f"{who} keeps the layers of each stage: only its data-parallel ranks may change"
    pins = job.pins(tuple(dict.fromkeys((*bound, *job.keep))))
    if "zero_stage" not in pins and len(row.zero_stages) < 4:
        asked = job.case.limits.zero_stage or job.case.runtime.zero_stages
        pins["zero_stage"] = tuple(stage for stage in asked if stage in row.zero_stages)
        if not pins["zero_stage"]:
            return f"a checkpoint of {job.old.runtime} under ZeRO-{job.layout.zero_stage} loads under no other"
    return job.case.limited(**pins)


def reshard_for(job: ResumedJob) -> Plan | Infeasible | str:
    """The plan of the fastest layout that can be loaded, for the batch asked for, or why there is none."""
    case = case_of(job)
    if isinstance(case, str):
        return case
    try:
        return search(case.limited(time_limit_s=max(job.deadline.left_s, 0.01)))
    except Infeasible as error:
        return error
    except SolverError:
        return "no layout was found in time: raise --time-limit"


def fastest_for(job: ResumedJob, batch: int) -> Candidate | None:
    """The fastest layout for another batch, within a rough gap, that can be loaded; None if none was found in time."""
    case = case_of(job)
    if not isinstance(case, str) and not job.deadline.passed:
        with suppress(Infeasible, SolverError):
            case = case.with_batch(batch).limited(gap_fraction=ROUGH_GAP_FRACTION)
            return find_layouts(case, [case.runtime], job.deadline).best
    return None


def loading(job: ResumedJob, candidate: Candidate, has_split: bool) -> Loads | None:
    """The way in which a layout loads the old job's checkpoint; None if it cannot.

    What is to be written again needs a job that keeps the axes: a split. Without one, the checkpoint must have been
    saved in the other format.
    """
    own, other = row_axes(job.start), row_axes(candidate)
    moved = [axis for axis in own if own[axis] != other[axis]]
    return way_to_load(job.checkpoint, moved, int(candidate.shape.zero_stage), has_split)


def row_axes(candidate: Candidate) -> dict[str, object]:
    """The axes of a candidate, by the names in a checkpoint's row."""
    shape = candidate.shape
    sizes = {name: getattr(shape, name) for name in SIZES}
    layers = (candidate.split.counts, candidate.placement)
    return {**sizes, "layers": layers, "schedule": candidate.schedule, "rank_order": shape.rank_order}


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
        self.open = _different([*self._stay(), *self._split(), *self._reshard()])

    def loading(self, candidate: Candidate) -> Loads | None:
        """The way in which a layout loads the checkpoint; None if it cannot."""
        return loading(self.job, candidate, self.interim is not None)

    def _stay(self) -> Iterator[Way]:
        """The old layout where GPUs were added, which stay idle."""
        job, layout = self.job, self.job.layout
        if job.grows and not job.moves_batch:
            batch = job.old.training.global_batch_size
            yield Way("stay", unchecked(job, layout.dp, layout.micro_batch_size, batch))

    def _split(self) -> Iterator[Way]:
        found, job = split_for(self.job), self.job
        if isinstance(found, Candidate) and job.grows and found.shape.dp <= job.layout.dp:
            batch = job.case.training.global_batch_size
            found = f"no more than dp {found.shape.dp} divide the batch of {batch:,}"
        yield from self._loadable("split", found)

    def _reshard(self) -> Iterator[Way]:
        found = reshard_for(self.job)
        if isinstance(found, Plan):
            yield from self._loadable("reshard", reprice(found, found.best), found)
            return
        self.nothing = found if isinstance(found, Infeasible) else None
        yield from self._loadable("reshard", str(found))

    def _loadable(self, kind: Kind, found: Candidate | str, plan: Plan | None = None) -> Iterator[Way]:
        """The way, if it can load the checkpoint; else the reason why it is closed is kept."""
        row = self.job.checkpoint
        if isinstance(found, Candidate) and self.loading(found) is None:
            found = f"a checkpoint of {self.job.old.runtime} ({row.format}) keeps {', '.join(row.keeps)}"
        if isinstance(found, Candidate):
            yield Way(kind, found, plan)
        else:
            self.closed.append(Closed(kind=kind, reason=found))

    @cached_property
    def near(self) -> list[Way]:
        """The fastest way of each kind under a batch nearby, unless the user asks for another batch than the old: that
        of a split, or the one that most of the GPUs divide."""
        job, batch = self.job, self.job.case.training.global_batch_size
        if job.moves_batch:
            return []
        split = split_near(
            job, max((int(way.candidate.shape.dp) for way in self.open if way.kind != "reshard"), default=0)
        )
        ways = [] if split is None else [Way("split", split)]
        batches = {*(way.batch for way in ways), liked_batch(batch, job.num_gpus) or batch} - {batch}
        others = [fastest_for(job, other) for other in sorted(batches) if any(way.found for way in self.open)]
        ways += [Way("reshard", other) for other in others if other is not None]
        ways = [way for way in ways if self.loading(way.candidate) is not None]
        fastest = {way.kind: way for way in sorted(ways, key=lambda way: way.tokens_per_s)}
        near = [fastest[kind] for kind in ORDER if kind in fastest]
        return _different([*self.open, *near])[len(self.open) :]

    def infeasible(self) -> Infeasible:
        """The error of a job that cannot go on at all, with a remedy where one is found."""
        job, says = self.job, f"no way to go on with {self.job.num_gpus:,} GPUs"
        case = case_of(job)
        if self.nothing is None or isinstance(case, str):
            why = "; ".join(f"{closed.kind}: {closed.reason}" for closed in self.closed)
            last = "wait for the lost GPUs" if job.shrinks else "leave -b out, and the job stays as it is"
            return Infeasible(f"{says}: {why}", last)
        told = with_remedy(self.nothing, case, job.deadline)
        option = (told.remedy or {}).get("options", ["", ""])
        axis = option[0].removeprefix("--").replace("-", "_")
        hint = f"leave {axis} out of --keep: a layout fits with {' '.join(option)}" if axis in job.keep else told.hint
        if any(f"--{name.replace('_', '-')} " in hint for name in OF_THE_JOB):
            hint = "give more GPUs, leave out what is pinned, or plan the job anew, without --from"
        return Infeasible(
            f"{says}: {told.message}", hint, told.rejections, nearest=told.nearest, remedy=told.remedy
        )  # fmt: skip


def _interim(job: ResumedJob) -> Candidate | None:
    """A split that loads the checkpoint as it is, whatever the user keeps and pins: it could write it again."""
    row = job.checkpoint
    if row.rewritten is None or row.rewritten.by != "resave":
        return None
    found = split_for(replace(job, keep=(), case=job.case.free()))
    return None if isinstance(found, str) or loading(job, found, has_split=False) != "as_is" else found


def _different(ways: Iterable[Way]) -> list[Way]:
    """The ways without those whose layout an earlier one has."""
    different: dict[tuple[object, ...], Way] = {}
    for way in ways:
        candidate = way.candidate
        different.setdefault((candidate.shape, candidate.split, candidate.schedule, way.batch), way)
    return list(different.values())
