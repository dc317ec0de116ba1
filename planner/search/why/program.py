"""The integer program behind a plan as text, with its numbers."""

from __future__ import annotations

from planner.answer import Plan
from planner.layout.replan import reprice
from planner.layout.risk import headroom_bytes
from planner.search.ilp.describe import describe
from planner.search.ilp.translate import node_of
from planner.search.rebalance import recompute_of
from planner.specs.training import SearchLimits


def program_text(plan: Plan, max_rows: int | None = None, limits: SearchLimits | None = None) -> str:
    """The integer program that splits the layers for the shape, schedule and recompute of the plan's best layout.

    Groups of more than `max_rows` variables or rows are shortened. Its ranks leave the headroom of `limits` free, if
    the layout does so.
    """
    candidate = reprice(plan, plan.best)
    if limits is not None:
        tighter = reprice(plan, plan.best, headroom_bytes=headroom_bytes(candidate.pricing, limits))
        candidate = tighter if tighter.fits else candidate
    choice = recompute_of(candidate.split, plan)
    return describe(node_of(candidate.pricing, candidate.table, choice, candidate.schedule), max_rows)
