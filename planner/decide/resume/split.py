"""The old layout with another number of data-parallel ranks: all else stays where it is, and so does the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.decide.resume.job import ResumedJob
from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of
from planner.layout.risk import headroom_bytes
from planner.schedule.orders import violation
from planner.shape import NEAR_FRACTION, divisors
from planner.specs.units import gib
from planner.trainers.rules.common import ETP
from planner.trainers.rules.of_trainer import rules_for
from planner.trainers.rules.recipe import broken_recipe_rules

MOVED = ("dp", "micro_batch_size", "shard_size")
"""Axes that a split may move."""
MOST_SIZES = 3
"""Data-parallel sizes, the largest first, for which a batch nearby is looked for."""


@dataclass(frozen=True, slots=True)
class NoSplit:
    """The reason why the old layout cannot be split."""

    says: str


def split_for(job: ResumedJob) -> Candidate | NoSplit:
    """The layout with the most data-parallel ranks that divide the batch, obey all rules and fit."""
    most, pins = job.num_gpus // job.copy_gpus, job.case.pins
    if (pinned := _against_a_pin(job.start, {axis: pins[axis] for axis in pins if axis not in MOVED})) is not None:
        return NoSplit(pinned)
    if not most:
        return NoSplit(f"one copy of the model takes {job.copy_gpus:,} GPUs, {job.num_gpus:,} are there")
    reason = ""
    for dp in _sizes(job, most):
        for other, why in _tried(job, dp, job.case.training.global_batch_size):
            if other is not None:
                return other
            reason = reason or why
    return NoSplit(reason or "the old number of data-parallel ranks cannot be kept")


def split_near(job: ResumedJob, most_dp: int, least_dp: int) -> Candidate | NoSplit:
    """The fastest split whose batch is the nearest that its data-parallel ranks divide, within NEAR_FRACTION.

    More than `least_dp` ranks are tried, and so are few sizes only: each fewer rank loses more than a batch gains.
    """
    batch, found, reason = job.case.training.global_batch_size, list[Candidate](), ""
    shape = job.start.shape
    slots, experts = int(shape.tp * shape.cp), int(shape.ep * shape.etp)
    sizes = [dp for dp in _sizes(job, most_dp) if dp > least_dp and slots * dp % experts == 0]
    for dp in sizes[:MOST_SIZES]:
        for near in _batches(job, dp, batch):
            other = next((other for other, _ in _tried(job, dp, near) if other is not None), None)
            if other is not None:
                found.append(other)
                break
        else:
            reason = (
                reason or f"no batch within {NEAR_FRACTION:.0%} of {batch:,} suits dp {dp} and {job.start.schedule}"
            )
    if not found:
        return NoSplit(reason or "no larger number of data-parallel ranks than that of the batch asked for")
    return max(found, key=tokens_per_s)


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


def _tried(job: ResumedJob, dp: int, batch: int) -> Iterator[tuple[Candidate | None, str]]:
    """The layout for each micro-batch, or the reason why there is none."""
    for size in _micro_batches(job):
        if batch % (dp * size):
            steps = max(1, round(batch / (dp * size))) * dp * size
            near = f"{steps:,} would" if steps else "none does"
            yield None, f"dp {dp} · micro-batch {size} does not divide the batch of {batch:,}; {near}"
            continue
        found = with_ranks(job, dp, size, batch)
        yield (None, found) if isinstance(found, str) else (found, "")


def with_ranks(job: ResumedJob, dp: int, micro_batch_size: int, batch: int) -> Candidate | str:
    """The old layout with `dp` ranks and another batch, or the sentence that refuses it."""
    found, case = unchecked(job, dp, micro_batch_size, batch), job.case.with_batch(batch)
    shape, schedule = found.shape, found.schedule
    if (pinned := _against_a_pin(found, case.pins)) is not None:
        return pinned
    if shape.dp * shape.cp % shape.shard_size:
        return f"groups of {shape.shard_size} ranks, which share the weights, do not divide dp {dp} · cp {shape.cp}"
    rules = (ETP, *rules_for(case.runtime))
    broken = next((rule for rule in rules if not rule.holds(case.model, case.training, shape)), None)
    if broken is not None:
        return broken.message(case.model, case.training, shape)
    error = violation(schedule, int(shape.pp), int(shape.vpp), found.num_microbatches)
    if error is not None:
        return error.message
    refused = next(iter(broken_recipe_rules(setting_of(found))), None)
    if refused is not None:
        return f"{refused.switch} {refused.says}"
    return found if found.fits else _misfit(found)


def _against_a_pin(candidate: Candidate, pins: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The sentence on the first pinned axis that a layout has at another value; without stages it has no schedule."""
    shape = candidate.shape
    values = {name: getattr(shape, name) for name in type(shape).__slots__ if name in pins}
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


def _misfit(candidate: Candidate) -> str:
    excess = max(candidate.excess_bytes)
    stage = candidate.excess_bytes.index(excess)
    left = f" with {gib(candidate.pricing.headroom_bytes):.1f} left free" if candidate.pricing.headroom_bytes else ""
    return (
        f"dp {candidate.shape.dp} lacks {gib(excess):.1f} GiB on stage {stage}{left}: fewer ranks share what is sharded"
    )
