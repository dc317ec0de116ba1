"""Nodes with so few splits that all of them are tried by replay, without an integer program.

If stages interleave, all chunks but the first and the last are equal, so that a node has only a handful of splits.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.candidate import Candidate
from planner.layout.split import Split
from planner.schedule.bounds import any_order_bounds_s
from planner.schedule.orders import SCHEDULES
from planner.search.chunks import equal_chunk_counts
from planner.search.ilp.translate import RecomputeChoice
from planner.specs.model import ModelSpec

MAX_SPLITS = 256
"""Most splits of a node for all of them to be tried; most are ruled out by a bound of their own, without a replay."""


def few_splits(candidate: Candidate, choice: RecomputeChoice) -> list[tuple[int, ...]] | None:
    """Layers of each virtual stage in every split of the candidate's node; None if an integer program is needed."""
    shape, runtime = candidate.shape, candidate.pricing.runtime
    if int(shape.vpp) == 1 or choice.whole == "per_stage":
        return None
    num_stages = int(shape.pp) * int(shape.vpp)
    layers = candidate.pricing.model.num_hidden_layers
    splits = list(equal_chunk_counts(layers, num_stages, runtime.head_only_stage))
    return splits if len(splits) <= MAX_SPLITS else None


def least_step_s(candidate: Candidate) -> float:
    """A lower bound of the candidate's step in seconds, from each rank's work and the trips to it; without a replay."""
    schedule = SCHEDULES[candidate.schedule]
    bounds_s = any_order_bounds_s(
        candidate.durations,
        candidate.placement,
        candidate.num_microbatches,
        splits_backward=schedule.splits_backward,
    )
    return float(bounds_s.max()) + sum(candidate.outside)


def fitting(candidate: Candidate, choice: RecomputeChoice, splits: list[tuple[int, ...]]) -> Iterator[Candidate]:
    """The candidate with each split that fits, with as few layers recomputed as `choice` allows."""
    model = candidate.pricing.model
    for counts in splits:
        numbers = range(max(counts) + 1) if choice.whole == "one_count" else [max(counts) * (choice.whole == "all")]
        split = _least_recomputed(candidate, choice, counts, numbers, model)
        if split is not None:
            yield split


def _least_recomputed(
    candidate: Candidate, choice: RecomputeChoice, counts: tuple[int, ...], numbers: range | list[int], model: ModelSpec
) -> Candidate | None:
    """The candidate that fits with the fewest layers of each chunk recomputed whole; None if none fits.

    `numbers` are the numbers of layers to try. More recomputed layers than necessary cannot be faster.
    """
    low, high = 0, len(numbers)
    fits: Candidate | None = None
    while low < high:
        middle = (low + high) // 2
        tried = candidate.with_split(_split(counts, choice, numbers[middle], model))
        if tried.fits:
            fits, high = tried, middle
        else:
            low = middle + 1
    return fits


def _split(counts: tuple[int, ...], choice: RecomputeChoice, number: int, model: ModelSpec) -> Split:
    """The split with these layers of each stage, and the first `number` layers of each chunk recomputed whole."""
    plain = Split(counts, choice.base)
    if not number:
        return plain
    recomputed = []
    for first, last in plain.chunks:
        again = model.layers[first : min(first + number, last)]
        recomputed.append(tuple(again.count(kind) for kind in model.kinds))
    return Split(counts, choice.base, tuple(recomputed))
