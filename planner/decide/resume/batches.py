"""Batches near the one asked for that the new number of GPUs divides well, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.answer import Layout
from planner.decide.resume.job import ResumedJob
from planner.shape import NEAR_FRACTION

MOST_BATCHES = 2
"""Batches for which layouts are searched; each takes a few tenths of a second."""
AS_GOOD = 0.01
"""Share of a score within which the batch that is nearer to the one asked for is taken."""


def near_batches(job: ResumedJob, layouts: Sequence[Layout]) -> list[int]:
    """Batches within NEAR_FRACTION, one for each of the most promising numbers of replicas, the best first.

    The score of a batch for dp replicas is the best, over numbers of stages, of

        (dp · ranks of a copy / GPUs) · k / (k + (pp − 1) / chunks) · layers / (pp · ⌈layers / pp⌉)

    with k micro-batches for each replica: GPUs that work, times a pipeline that is full, times stages that are level.
    Tensor and context parallelism, and the least ranks of a copy that fit, are those of `layouts`. It is a screen: the
    search decides.
    """
    batch = job.case.training.global_batch_size
    by_dp: dict[int, dict[int, float]] = {}
    for dp, near, score in _scores(job, layouts):
        if near != batch:
            scores = by_dp.setdefault(dp, {})
            scores[near] = max(score, scores.get(near, 0.0))
    ranked = sorted(by_dp.values(), key=lambda scores: -max(scores.values()))
    return list(dict.fromkeys(_nearest(scores, batch) for scores in ranked))[:MOST_BATCHES]


def _nearest(scores: dict[int, float], batch: int) -> int:
    """The batch nearest to that asked for, among those with nearly the best score."""
    least = (1 - AS_GOOD) * max(scores.values())
    return min((near for near, score in scores.items() if score >= least), key=lambda near: abs(near - batch))


def _scores(job: ResumedJob, layouts: Sequence[Layout]) -> Iterator[tuple[int, int, float]]:
    """A number of replicas, a batch and its score, for each number of stages."""
    batch, num_gpus, layers = job.case.training.global_batch_size, job.num_gpus, job.case.model.num_hidden_layers
    interleaves = "interleaved-1f1b" in job.case.runtime.schedules
    least = min(one.tp * one.cp * one.pp for one in layouts)
    size = min(one.micro_batch_size for one in layouts)
    for ranks, experts in {(one.tp * one.cp, one.ep * one.etp) for one in layouts}:
        for pp in range(1, layers + 1):
            dp = num_gpus // (ranks * pp)
            if ranks * pp < least or not dp or ranks * dp % experts:
                continue
            level = dp * ranks * pp / num_gpus * layers / (pp * -(-layers // pp))
            first, last = (batch * (1 + sign * NEAR_FRACTION) / (dp * size) for sign in (-1, 1))
            for k in range(max(1, math.ceil(first)), math.floor(last) + 1):
                chunks = max(1, layers // pp) if interleaves and k % pp == 0 else 1
                yield dp, k * dp * size, level * k / (k + (pp - 1) / chunks)
