"""Batches that a number of GPUs divides well: the nearest to one that was asked for, and what it would gain."""

from __future__ import annotations

from planner.answer import BatchOffer, Plan
from planner.errors import Infeasible, SolverError
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.layouts import find_layouts
from planner.shape import divisors

NEAR_FRACTION = 0.03
"""Share by which another batch may be larger or smaller than the one asked for."""
LEAST_GAIN_FRACTION = 0.02
"""Least share of the tokens a second for which another batch is offered."""


def liked_batch(num_sequences: float, num_gpus: int) -> int | None:
    """The nearest multiple of the largest divisor of `num_gpus` that has one within NEAR_FRACTION; None if none has.

    The more of the number of GPUs divides the batch, the more sizes data parallelism can have with no GPU idle. The
    batch itself is the answer where no larger divisor has a multiple nearby.
    """
    for divisor in reversed(divisors(num_gpus, num_gpus)):
        near = max(round(num_sequences / divisor), 1) * divisor
        if abs(near - num_sequences) <= NEAR_FRACTION * num_sequences:
            return near
    return None


def batch_offer(found: Plan, case: Case, deadline: Deadline) -> BatchOffer | None:
    """Another batch nearby under which GPUs train more tokens a second; None if there is none or time is up.

    The layout is searched again for it, with the recipe of the best plan.
    """
    training = case.training
    other = liked_batch(training.global_batch_size, case.cluster.num_gpus)
    if other is None or other == training.global_batch_size or deadline.passed:
        return None
    again = case.with_batch(other)
    try:
        best = find_layouts(again, [found.runtime_spec], deadline).best
    except (Infeasible, SolverError):
        return None
    tokens_per_s = again.training.tokens_per_step / best.step_s
    if tokens_per_s <= (1 + LEAST_GAIN_FRACTION) * found.step.tokens_per_s:
        return None
    return BatchOffer(global_batch_size=other, step_s=best.step_s, tokens_per_s=tokens_per_s)
