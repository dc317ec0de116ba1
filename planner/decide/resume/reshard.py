"""Any layout that the checkpoint can be loaded as, written again or converted where its files ask for that."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from planner.answer import Plan
from planner.decide.resume.choice import Loads
from planner.decide.resume.job import ResumedJob
from planner.errors import Infeasible, SolverError
from planner.layout.candidate import Candidate
from planner.search.case import Case
from planner.search.layouts import find_layouts
from planner.search.search import search

ROUGH_GAP_FRACTION = 0.02
"""Gap of the searches for layouts that are not answered: of batches nearby, and after failures that may come."""


@dataclass(frozen=True, slots=True)
class NoReshard:
    """The reason why no other layout can be loaded, or none fits."""

    says: str
    error: Infeasible | None = None


def case_of(job: ResumedJob) -> Case | NoReshard:
    """The case of all layouts that the checkpoint can be loaded as and that the user's kept axes allow."""
    row = job.checkpoint
    bound = row.rewritten.keeps if row.rewritten is not None else row.keeps
    if "layers" in (*bound, *job.keep):
        who = "--keep" if "layers" in job.keep else f"a checkpoint of {job.old.runtime}, {row.format},"
        return NoReshard(f"{who} keeps the layers of each stage: only its data-parallel ranks may change")
    pins = job.pins(tuple(dict.fromkeys((*bound, *job.keep))))
    if "zero_stage" not in pins and len(row.zero_stages) < 4:
        asked = job.case.limits.zero_stage or job.case.runtime.zero_stages
        pins["zero_stage"] = tuple(stage for stage in asked if stage in row.zero_stages)
        if not pins["zero_stage"]:
            return NoReshard(
                f"a checkpoint of {job.old.runtime} under ZeRO-{job.layout.zero_stage} loads under no other"
            )
    return job.case.limited(**pins)


def reshard_for(job: ResumedJob) -> Plan | NoReshard:
    """The plan of the fastest layout that can be loaded, for the batch asked for."""
    case = case_of(job)
    if isinstance(case, NoReshard):
        return case
    try:
        return search(case.limited(time_limit_s=max(job.deadline.left_s, 0.01)))
    except Infeasible as error:
        return NoReshard(error.message, error)
    except SolverError:
        return NoReshard("no layout was found in time: raise --time-limit")


def fastest_for(job: ResumedJob, batch: int) -> Candidate | None:
    """The fastest layout for another batch, within a rough gap, that can be loaded; None if none was found in time."""
    case = case_of(job)
    if not isinstance(case, NoReshard) and not job.deadline.passed:
        with suppress(Infeasible, SolverError):
            case = case.with_batch(batch).limited(gap_fraction=ROUGH_GAP_FRACTION)
            return find_layouts(case, [case.runtime], job.deadline).best
    return None


def loading(job: ResumedJob, candidate: Candidate, has_split: bool) -> Loads | None:
    """The way in which a layout loads the old job's checkpoint; None if it cannot.

    What is to be written again needs a job that keeps the axes: a split. Without one, the checkpoint must have been
    saved in the other format.
    """
    row, other = job.checkpoint, row_axes(candidate)
    own = row_axes(job.start)
    if other["zero_stage"] not in row.zero_stages:
        return None
    if all(own[axis] == other[axis] for axis in row.keeps):
        return "as_is"
    if row.rewritten is None or any(own[axis] != other[axis] for axis in row.rewritten.keeps):
        return None
    if row.rewritten.by == "resave" and not has_split:
        return "ready"
    return row.rewritten.by


def row_axes(candidate: Candidate) -> dict[str, object]:
    """The axes of a candidate by the names that a checkpoint's row knows them by."""
    shape = candidate.shape
    sizes = {name: getattr(shape, name) for name in type(shape).__slots__}
    layers = (candidate.split.counts, candidate.placement)
    return {**sizes, "layers": layers, "schedule": candidate.schedule, "rank_order": shape.rank_order}
