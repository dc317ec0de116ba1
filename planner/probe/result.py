"""What a probe measured, rank by rank, and what became of it; read and written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Literal

from pydantic import AfterValidator

from planner.probe.run import ProbeRun
from planner.specs.base import Spec

Finite = Annotated[float | None, AfterValidator(lambda value: value if value is None or isfinite(value) else None)]
"""None where training has diverged: JSON has no word for what is not finite."""


def shown(value: float | None, num_digits: int) -> str:
    return "not finite" if value is None else f"{value:.{num_digits}f}"


class TimedAction(Spec):
    """One action of the last step; seconds from the start of the step."""

    action: str
    ready_s: float
    """The rank was free and began to wait for the action's input."""
    start_s: float
    end_s: float


class ChunkSeconds(Spec):
    """Median seconds of one micro-batch on one virtual stage."""

    stage: int
    """Virtual stage."""
    forward_s: float
    backward_s: float
    """Of whole backwards, or of input and weight gradient together where the schedule splits them."""
    input_grad_s: float | None = None
    weight_grad_s: float | None = None
    """Both measured apart: in the schedule itself where it splits backwards, else after the steps; null where not."""


class TimedExchange(Spec):
    """One exchange timed by itself, after the steps."""

    name: str
    size: int
    """Ranks that take part."""
    num_bytes: int
    """Of the whole tensor."""
    seconds: float
    bus_gb_per_s: float


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
    """Gradients summed over ranks; the waits for others among it."""
    optimizer_s: float
    """Of this rank alone: its part of the norm, clipping, update, zeroed gradients."""
    gather_s: float = 0.0
    """Weights from the ranks that updated them."""
    step_s: float
    loss: Finite
    gradient_norm: Finite


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
    cp: int = 0
    tp: int
    torch_version: str
    device_name: str
    num_parameters: int
    steps: tuple[StepSeconds, ...]
    actions: tuple[TimedAction, ...]
    """Of the last step."""
    chunks: tuple[ChunkSeconds, ...] = ()
    exchanges: tuple[TimedExchange, ...] = ()
    peak_in_flight_chunks: int
    memory: RankMemory | None = None
    checks: tuple[Check, ...] = ()

    @property
    def replica(self) -> tuple[int, int, int]:
        """Which of the pipelines the rank is in."""
        return self.dp, self.cp, self.tp


class OutOfMemory(Spec):
    """A rank that the device had no memory for: a result, not a failure."""

    rank: int
    stage: int
    phase: str
    message: str
    asked_bytes: int | None = None


class MeasuredRun(Spec):
    """All ranks of one probe run."""

    run: ProbeRun
    ranks: tuple[RankResult, ...]
    out_of_memory: OutOfMemory | None = None


class ComparedQuantity(Spec):
    """One quantity, predicted and measured."""

    name: str
    stage: int | None = None
    """Pipeline rank; null for the whole pipeline."""
    unit: Literal["s", "bytes", "fraction", "count"]
    predicted: float
    measured: float
    agrees: bool | None = None
    """Within the tolerance; null where the quantity is shown and not judged."""

    @property
    def error_fraction(self) -> float | None:
        """measured / predicted − 1."""
        return self.measured / self.predicted - 1 if self.predicted else None


class StageActivity(Spec):
    """What the busiest rank of a stage did with the last step, and what waited for it."""

    stage: int
    rank: int | None = None
    utilisation_fraction: float
    """Computing, of the time from the first rank's start to the last rank's end."""
    wait_s: float
    """Waiting for messages of other ranks."""
    idle_s: dict[str, float]
    """Idle time by cause, as the replay names them, and the host's between actions."""
    queue: tuple[tuple[float, int], ...]
    """(seconds, micro-batches that have arrived and not been taken up from then on)."""
    max_queue: int


def stride_of(exchange: TimedExchange, run: ProbeRun) -> int | None:
    """How far apart the ranks of an exchange are; None of experts' gradients, whose ranks lie otherwise."""
    axis = exchange.name.split()[0]
    if axis not in ("tp", "cp") and exchange.size != run.dp * run.cp:
        return None
    return 1 if axis == "tp" else run.tp


def slowest_exchanges(ranks: Sequence[RankResult]) -> list[TimedExchange]:
    """Of each kind of exchange the slowest rank's."""
    slowest: dict[str, TimedExchange] = {}
    for exchange in (exchange for rank in ranks for exchange in rank.exchanges):
        if exchange.name not in slowest or exchange.seconds > slowest[exchange.name].seconds:
            slowest[exchange.name] = exchange
    return list(slowest.values())


class PlanSlice(Spec):
    """What of a plan is run."""

    asked: str
    run: str
    reduced: tuple[str, ...] = ()
    """What is smaller than in the plan."""
    verified: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()


class ProbeResult(Spec):
    """A plan run, or a slice of it: what was predicted beside what was measured."""

    schema_version: Literal[1] = 1
    mode: Literal["ranks", "stages"]
    """All ranks of the slice together, or one stage at a time with its peers emulated."""
    device: str
    torch_version: str
    inputs_sha256: str
    """Of the plan's inputs."""
    slice: PlanSlice
    sleeps: bool = False
    """Compute was replaced by sleeps: times say something about the schedule only."""
    tolerance_fraction: float
    comparisons: tuple[ComparedQuantity, ...]
    checks: tuple[Check, ...]
    activity: tuple[StageActivity, ...] = ()
    step_s: float | None = None
    """Median of the measured steps; of single stages, the replay of the whole pipeline with measured durations."""
    step_spread_s: float = 0.0
    """Longest less shortest measured step; of single stages, that of the stage where it is most."""
    plan_runtime: str = ""
    """The trainer that the plan is for."""
    plan_step_s: float | None = None
    """Of the plan under that trainer; what ran is eager torch, and is held against the price of that. Null where the
    plan's own stages did not run."""
    loss: float | None = None
    run: ProbeRun
    ranks: tuple[RankResult, ...] = ()
    out_of_memory: OutOfMemory | None = None
    predicted_bytes: int | None = None
    """Of the stage that ran out of memory: what the plan says it needs."""

    @property
    def agrees(self) -> bool:
        """Whether every check passed and every judged quantity is within the tolerance."""
        return (
            self.out_of_memory is None
            and all(check.passed for check in self.checks)
            and all(comparison.agrees is not False for comparison in self.comparisons)
        )

    @property
    def uses_tolerance(self) -> bool:
        """Whether any quantity is judged by the tolerance, which equal results and the bubble of sleeps are not."""
        return not self.sleeps and any(comparison.agrees is not None for comparison in self.comparisons)


FailureKind = Literal["error", "out_of_memory", "host_memory", "lost_peer"]
"""Out of memory is a GPU; the host's is another matter."""


class Failure(Spec):
    """What a rank that failed leaves behind."""

    rank: int
    stage: int
    phase: str
    """And the action, where it was at one."""
    kind: FailureKind
    message: str
    traceback: str
    time_s: float
    """When, on the host's monotonic clock."""
    asked_bytes: int | None = None
