"""The changes of a way to go on: those of what is learned (convergence), and those of seconds and bytes (execution)."""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Layout
from planner.decide.resume.choice import Loads
from planner.decide.resume.job import ResumedJob
from planner.layout.candidate import Candidate
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
    """The changes that what is learned may depend on."""
    old, new = job.old.training.global_batch_size, candidate.pricing.training.global_batch_size
    if old != new:
        yield f"batch {old:,} → {new:,} ({new / old - 1:+.1%})"
    if job.checkpoint.data and candidate.shape.dp != job.layout.dp:
        yield "order of the data"
    yield from (words for words, touches in _switches(job) if touches)


def execution_of(job: ResumedJob, layout: Layout) -> Iterator[str]:
    """The changes that seconds and bytes alone depend on; sums are rounded in another order."""
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
