"""A run, all that its files show, and what it is held against: the input of every question about the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.replan import reprice
from planner.observe.observation import Observation, Observed, Prediction
from planner.observe.traces.recorded import Recorded


@dataclass(frozen=True)
class Case:
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
