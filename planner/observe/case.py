"""A run, all that its files show, and what it is held against: the input of every question about the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import reprice
from planner.observe.observation import Observation, Observed, Prediction
from planner.observe.traces.recorded import Recorded
from planner.shape import RANK_ORDERS, Shape


@dataclass(frozen=True)
class ObservedCase:
    """An observed run; None for what is not known of it."""

    observation: Observation
    recorded: Recorded | None = None
    prediction: Prediction | None = None
    """The price of its layout, or an earlier run."""
    plan: Plan | None = None
    """The plan that it is a run of."""
    earlier: Observed | None = None
    """The earlier run that it is held against, if that is what the prediction is."""

    @cached_property
    def candidate(self) -> Candidate | None:
        """The plan's best layout, which can be replayed and changed."""
        return None if self.plan is None else reprice(self.plan, self.plan.best)


@dataclass(frozen=True, slots=True)
class ObservedGrid:
    """Sizes of a run's grid; pipelines of one run differ in their data-parallel, tensor and context ranks."""

    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int = 1
    dp_outermost: bool = False
    num_microbatches: int | None = None
    """Micro-batches of one pipeline in a step; None where the batch is not known."""

    @property
    def stride(self) -> int:
        """Ranks from one stage of a pipeline to the next."""
        shape = Shape.of(tp=self.tp, cp=self.cp, pp=self.pp, dp=self.dp, dp_outermost=int(self.dp_outermost))
        return int(shape.stage_stride)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.stride % self.pp

    def pipeline(self, rank: int) -> int:
        """The rank of the first stage to which this one's activations belong: one number for each pipeline."""
        return rank - self.stage(rank) * self.stride


def grid_of(case: ObservedCase) -> ObservedGrid | None:
    """The plan's grid, or else that which the log's arguments state; None where neither says it."""
    if case.plan is not None:
        layout = case.plan.parallelism
        return ObservedGrid(
            layout.tp, layout.cp, layout.pp, layout.dp, layout.vpp, layout.dp_outermost, layout.num_microbatches
        )
    facts, stated = case.observation.facts, case.observation.facts.run.get("parallelism") or {}
    tp, cp, pp = (_size(stated, axis) for axis in ("tp", "cp", "pp"))
    if not (stated and facts.num_gpus and tp and cp and pp) or facts.num_gpus % (tp * cp * pp):
        return None
    dp = facts.num_gpus // (tp * cp * pp)
    sequences, micro = facts.global_batch_size, _size(stated, "micro_batch_size")
    even = sequences and micro and sequences % (micro * dp) == 0
    num_microbatches = sequences // (micro * dp) if even and sequences and micro else None
    order = stated.get("rank_order", RANK_ORDERS[0])
    return ObservedGrid(tp, cp, pp, dp, _size(stated, "vpp") or 1, order != RANK_ORDERS[0], num_microbatches)


def _size(stated: dict[str, Any], name: str) -> int | None:
    value = stated.get(name, 1)
    return value if isinstance(value, int) and value > 0 else None
