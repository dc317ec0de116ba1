"""The answer of a run with phases: each phase with its plan, the changes of layout between them, and the sums."""

from __future__ import annotations

from typing import Any, Literal

from planner.answer import Interval, Plan
from planner.specs.base import Spec


class BatchStep(Spec):
    """One batch of a phase whose batch grows."""

    global_batch_size: int
    tokens: float
    steps: float
    step_s: float


class PhaseAnswer(Spec):
    """One phase, in the layout that is best for the run as a whole."""

    name: str
    tokens: float
    steps: float
    """Optimizer steps, those of all batches together."""
    seq_length: int
    global_batch_size: int
    """Sequences of a step; of a batch that grows, at the end."""
    batches: tuple[BatchStep, ...] = ()
    """The batches of one that grows, in order; empty where it stays."""
    num_gpus: int
    dtype: str
    document_fraction: float = 1.0
    """Share of a whole sequence's attention that stays within its documents; 1 where sequences are not masked."""
    layout: Literal["first", "kept", "resharded"]
    """`kept` if the ranks hold what they held in the phase before, which needs no other checkpoint."""
    stop_s: float
    """Seconds of the planned stop before the phase; 0 where the job goes on."""
    step_s: float
    step_s_interval: Interval | None = None
    tokens_per_s: float
    """Tokens a second of a benchmark's steps, over all batches."""
    mfu: float
    days: float
    """Days of the phase as months of training see them, without the stop before it."""
    days_interval: Interval | None = None
    gpu_hours: float
    usd: float | None = None
    usd_interval: Interval | None = None
    mwh: float | None = None
    effective_fraction: float
    own_layout: str
    """The layout that would be best for the phase by itself."""
    own_days: float
    kept_days: float | None = None
    """Days in the layout of the phase before; null in the first phase, and where that layout cannot run."""
    kept_refused: str = ""
    """The reason why the layout of the phase before cannot run."""
    plan: Plan


class Change(Spec):
    """A stop between two phases, and what it buys."""

    before: str
    """Name of the phase before the stop."""
    after: str
    resharded: bool
    """True if the layout changes, false if the job starts anew in the same one."""
    why: str
    """The thing that the stop is for."""
    from_layout: str
    to_layout: str
    gains_days: float | None = None
    """Days that the changed layout saves in the phases in which it is kept; null where the old one cannot run there."""
    kept_refused: str = ""
    """The reason why the old layout cannot run in the phase after the stop."""
    costs_days: float
    """Days that changing the layout costs, beyond a stop that would be there without it."""
    saved_as: str = ""
    """The option with which the phase before saves, or the tool that converts its checkpoint, for the other layout."""
    stop_s: float


class RunTotal(Spec):
    """The sums over all phases and stops. Phases err together, by the same physics, so that the ends of their intervals
    are added up."""

    tokens: float
    days: float
    days_interval: Interval
    gpu_hours: float
    usd: float | None = None
    usd_interval: Interval | None = None
    mwh: float | None = None
    stops_s: float
    effective_fraction: float
    """Share of the whole time in which steps are made."""


class PhasesAnswer(Spec):
    """A run of phases."""

    command: str = ""
    phases: tuple[PhaseAnswer, ...]
    total: RunTotal
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data in the contract's form; the plans in it are such as commands read."""
        data = self.model_dump(mode="json", exclude={"phases": {"__all__": {"plan"}}})
        for phase, told in zip(self.phases, data["phases"], strict=True):
            told["plan"] = phase.plan.to_json()
        return {"schema_version": 1, **data}
