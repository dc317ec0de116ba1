"""Passes as they should be: those of the earlier run that this one is held against, or the plan's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.observe.case import Case
from planner.observe.ideal.passes import planned_pass_s
from planner.observe.measured import RankPasses
from planner.shape import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Seconds that stages should take of a micro-batch."""

    passes_s: FloatArray
    """Forward and backward of each stage; shape (stages, 2)."""
    exchanges_s: FloatArray
    """Exchanges inside of them, where those are apart."""
    source: str


def reference_of(case: Case, num_stages: int, holds_exchanges: bool) -> Reference | None:
    """The earlier run's passes if it shows every stage, else the plan's, with or without exchanges inside of them."""
    earlier = case.earlier.observation.passes if case.earlier is not None else ()
    by_stage: list[list[RankPasses]] = [[] for _ in range(num_stages)]
    for one in earlier:
        if one.stage is not None and one.stage < num_stages and one.holds_exchanges == holds_exchanges:
            by_stage[one.stage].append(one)
    if num_stages and all(any(one.forward_s and one.backward_s for one in ranks) for ranks in by_stage):
        rows = [[(one.forward_s or 0.0, one.backward_s or 0.0, one.exchanges_s or 0.0) for one in r] for r in by_stage]
        middle = np.array([np.median(ranks, axis=0) for ranks in rows])
        return Reference(middle[:, :2], middle[:, 2], "the earlier run's")
    if case.candidate is None:
        return None
    own, full = (
        np.array([planned_pass_s(case.candidate, stage, holds) for stage in range(num_stages)])
        for holds in (holds_exchanges, True)
    )
    return Reference(own, (full - own).sum(axis=1), "the plan's")
