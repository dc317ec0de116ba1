"""The batch nearby that a number of GPUs divides well, and what it would gain."""

from __future__ import annotations

from planner.answer import BatchOffer, Plan
from planner.errors import Infeasible, SolverError
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.layouts import find_layouts
from planner.shape import liked_batch

LEAST_GAIN_FRACTION = 0.02
"""Least share of the tokens a second for which another batch is offered."""


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
