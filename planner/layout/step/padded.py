"""Runs of examples in padded batches: the mean of their steps, and what packing the same examples would take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.answer import Plan
from planner.layout.replan import reprice
from planner.trainers.documents import example_lengths, largest_normal, longest_of, mean_length, padding_fraction

_NUM_KNOTS = 7
"""Lengths at which a layout is priced; steps are straight between them."""


class Examples(NamedTuple):
    """A run of examples, each seen once an epoch."""

    num_steps: float
    padding_fraction: float
    """Share of the computed tokens that is padding."""
    longer_factor: float
    """Seconds of all steps over those of as many full sequences as the examples fill without padding."""


def run_of_examples(plan: Plan) -> Examples | None:
    """The steps of a run whose training states its examples or pads them; None for any other."""
    training, layout = plan.training, plan.best.parallelism
    if training.tokens is None or (training.examples is None and training.batching == "packed"):
        return None
    lengths = example_lengths(training)
    if training.batching == "packed":
        return Examples(training.tokens / training.tokens_per_step, 0.0, 1.0)
    mean = mean_length(lengths)
    num_steps = training.tokens / mean / training.global_batch_size
    full_steps = training.tokens / training.tokens_per_step
    longer = num_steps * mean_step_s(plan) / (full_steps * plan.best.step.step_s)
    return Examples(num_steps, padding_fraction(lengths, layout.micro_batch_size), longer)


def mean_step_s(plan: Plan) -> float:
    """The expected seconds of a step whose micro-batches are as long as the longest of the examples drawn for them.

    Ranks that shard weights without a pipeline wait for each other in every micro-batch, so that the longest example of
    all ranks' decides. Others wait at the step's end, for the rank whose lengths add up to most: the mean, and the
    expected largest of as many normal sums.
    """
    training, layout = plan.training, plan.best.parallelism
    lengths = example_lengths(training)
    knots = np.unique(np.geomspace(lengths[0][0], lengths[-1][0], _NUM_KNOTS).round().astype(int))
    priced_s = [_step_s(plan, int(length)) for length in knots]
    waits_in_each = layout.zero_stage == 3 and layout.pp == 1
    count = layout.micro_batch_size * (layout.dp if waits_in_each else 1)
    drawn = longest_of(lengths, count)
    steps_s = np.interp([length for length, _ in drawn], knots, priced_s)
    chances = np.array([chance for _, chance in drawn])
    mean_s = float(steps_s @ chances)
    if waits_in_each or layout.dp == 1:
        return mean_s
    deviation_s = float(np.sqrt(np.maximum((steps_s - mean_s) ** 2 @ chances, 0.0) / layout.num_microbatches))
    late_s = deviation_s * float(largest_normal(float(layout.dp)))
    return min(mean_s + late_s, float(steps_s.max()))


def _step_s(plan: Plan, seq_length: int) -> float:
    """Seconds of a step of the plan's layout whose sequences are all so long."""
    if seq_length == plan.training.seq_length:
        return plan.best.step.step_s
    training = plan.training.model_copy(update={"seq_length": seq_length})
    return reprice(plan.model_copy(update={"training": training}), plan.best).step_s
