"""What a probe measured, rank by rank, and what became of it; read and written as JSON."""

from __future__ import annotations

from typing import Literal

from planner.probe.run import ProbeRun
from planner.specs.base import Spec


class TimedAction(Spec):
    """One action of the last step; seconds from the start of the step."""

    action: str
    ready_s: float
    """The rank was free and began to wait for the action's input."""
    start_s: float
    end_s: float


class RankMemory(Spec):
    """Device memory of a rank; none on the CPU, which keeps no account."""

    static_bytes: int
    """Before the first forward."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int


class StepSeconds(Spec):
    """Where a rank's step went."""

    pipeline_s: float
    """From the first action's wait to the last action's end."""
    reduce_s: float
    """Gradients and their norm over ranks."""
    optimizer_s: float
    step_s: float
    loss: float
    gradient_norm: float


class Check(Spec):
    """One statement that the run proved or contradicted."""

    name: str
    passed: bool
    detail: str


class RankResult(Spec):
    """What one rank measured."""

    rank: int
    stage: int
    dp: int
    tp: int
    torch_version: str
    device_name: str
    num_parameters: int
    steps: tuple[StepSeconds, ...]
    actions: tuple[TimedAction, ...]
    """Of the last step."""
    peak_in_flight_chunks: int
    memory: RankMemory | None = None
    checks: tuple[Check, ...] = ()


class OutOfMemory(Spec):
    """A rank that the device had no memory for: a result, not a failure."""

    rank: int
    stage: int
    phase: str
    message: str
    asked_bytes: int | None = None


class Measured(Spec):
    """All ranks of one probe run."""

    run: ProbeRun
    ranks: tuple[RankResult, ...]
    out_of_memory: OutOfMemory | None = None


class Failure(Spec):
    """What a rank that failed leaves behind."""

    rank: int
    stage: int
    phase: str
    kind: Literal["error", "out_of_memory", "lost_peer"]
    message: str
    traceback: str
    time_s: float
    """When, on the host's monotonic clock."""
    asked_bytes: int | None = None
