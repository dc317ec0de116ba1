"""The results of a probe and of a rehearsal: measurements, comparisons and the verdict, read and written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Literal

from pydantic import AfterValidator

from planner.probe.run import Place, ProbeRun
from planner.specs.base import Named, Spec, Texts

Finite = Annotated[float | None, AfterValidator(lambda value: value if value is None or isfinite(value) else None)]
"""A number, or None where training has diverged: JSON has no word for a number that is not finite."""


def shown(value: float | None, num_digits: int) -> str:
    return "not finite" if value is None else f"{value:.{num_digits}f}"


When = Literal["before", "within", "after"]
BUSY_FRACTION = 0.05
"""A GPU that was busier than this before anything ran has other work."""


class DeviceState(Spec):
    """The state of a GPU as its driver reports it; null where the driver does not say."""

    when: When
    """Before the steps, in the middle of computing, or after them."""
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None
    busy_fraction: float | None = None
    """Share of about the last second in which any kernel ran on it."""
    throttle_reasons: Texts = ()
    """Reasons why clocks are lower than asked for, in the driver's words; idleness is none."""
    other_processes: Texts = ()
    """Processes on the GPU that are not of this run."""
    other_bytes: int | None = None
    """Memory that they hold."""


class TimedAction(Spec):
    """One action of the last step; seconds from the start of the step."""

    action: str
    ready_s: float
    """The rank was free and began to wait for the action's input."""
    start_s: float
    end_s: float


class ChunkSeconds(Spec, extra="ignore"):
    """Median seconds of one micro-batch on one virtual stage."""

    stage: int
    """Virtual stage."""
    forward_s: float
    backward_s: float
    """Seconds of a whole backward, or of input and weight gradient together where the schedule splits them."""
    input_grad_s: float | None = None
    weight_grad_s: float | None = None
    """Input and weight gradient are measured apart where the schedule splits backwards; else both are null."""
    spread_fraction: float | None = None
    """Standard error of the medians, as a share of them: the largest."""

    @property
    def passes_s(self) -> tuple[float, float]:
        """Seconds of forward and backward."""
        return self.forward_s, self.backward_s


class ProbedExchange(Spec):
    """One exchange timed by itself, after the steps."""

    name: str
    size: int
    """Number of ranks that take part."""
    num_bytes: int
    """Bytes of the whole tensor."""
    seconds: float
    bus_gb_per_s: float
    spread_fraction: float | None = None
    """Standard error of `seconds`, as a share of it."""


class Condition(Spec):
    """Something unusual while a GPU was measured, by which its seconds may differ from what a plan says of it."""

    text: str
    is_fault: bool = False
    """It is a fault of the machine or of the moment. Seconds are then no evidence of the GPU's speed; else they are of
    a GPU that is set to be slower."""


class ProbedMemory(Spec):
    """Device memory of a rank; none on the CPU, which keeps no account."""

    static_bytes: int
    """Bytes allocated before the first forward."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int


class StepSeconds(Spec):
    """Seconds of the parts of a rank's step."""

    pipeline_s: float
    """Seconds from the first action's wait to the last action's end."""
    reduce_s: float
    """Seconds in which gradients are summed over ranks, waits for other ranks included."""
    optimizer_s: float
    """Seconds of this rank's own work: its part of the norm, the clipping, the update and the zeroing of gradients."""
    gather_s: float = 0.0
    """Seconds in which weights are gathered from the ranks that updated them."""
    step_s: float
    loss: Finite
    gradient_norm: Finite


class ProbeCheck(Spec):
    """One statement that the run proved or contradicted."""

    name: str
    passed: bool
    detail: str


class RankResult(Spec, extra="ignore"):
    """The measurements of one rank."""

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
    """The actions of the last step."""
    chunks: tuple[ChunkSeconds, ...] = ()
    exchanges: tuple[ProbedExchange, ...] = ()
    peak_in_flight_chunks: int
    memory: ProbedMemory | None = None
    checks: tuple[ProbeCheck, ...] = ()
    attention_kernels: Texts = ()
    """The kernels of attention that ran, as profiles name them; none where no attention ran on a GPU."""
    experts_one_by_one: bool = False
    """True where this torch has no grouped product for this GPU: each expert's is a launch of its own, for which the
    host waits."""
    device_states: tuple[DeviceState, ...] = ()

    @property
    def busy_s(self) -> float:
        """Seconds of its actions in the last step."""
        return sum(timed.end_s - timed.start_s for timed in self.actions)


class RankOutOfMemory(Spec):
    """A rank that ran out of device memory. This is a result, not a failure."""

    rank: int
    stage: int
    phase: str
    message: str
    asked_bytes: int | None = None


class MeasuredRun(Spec):
    """All ranks of one probe run."""

    run: ProbeRun
    ranks: tuple[RankResult, ...]
    out_of_memory: RankOutOfMemory | None = None


class ComparedQuantity(Spec):
    """One quantity, predicted and measured."""

    name: str
    stage: int | None = None
    """Pipeline rank; null for the whole pipeline."""
    unit: Literal["s", "bytes", "fraction", "count"]
    predicted: float
    measured: float
    least: float | None = None
    """The seconds that remain if no host is late for its GPU and no rank for the others; null where nothing waits.
    Waits say nothing about GPUs: all agrees from here to as far beyond `predicted`."""
    agrees: bool | None = None
    """True within the tolerance; null where the quantity is shown and not judged."""

    @property
    def error_fraction(self) -> float | None:
        """measured / predicted − 1."""
        return self.measured / self.predicted - 1 if self.predicted else None


def stride_of(exchange: ProbedExchange, run: ProbeRun) -> int | None:
    """The distance in global ranks between neighbours of an exchange; None for ranks that are not evenly spaced: those
    of experts' gradients, and replicas with pipelines between them."""
    axis = exchange.name.split()[0]
    has_gaps = run.dp_outermost and run.pp > 1
    if axis not in ("tp", "cp") and (exchange.size != run.dp * run.cp or has_gaps):
        return None
    return 1 if axis == "tp" else run.tp


def slowest_exchanges(ranks: Sequence[RankResult]) -> list[ProbedExchange]:
    """The slowest rank's measurement of each kind of exchange."""
    slowest: dict[str, ProbedExchange] = {}
    for exchange in (exchange for rank in ranks for exchange in rank.exchanges):
        if exchange.name not in slowest or exchange.seconds > slowest[exchange.name].seconds:
            slowest[exchange.name] = exchange
    return list(slowest.values())


class PlanSlice(Spec):
    """The part of a plan that runs."""

    asked: str
    run: str
    reduced: Texts = ()
    """Sizes that are smaller than in the plan."""
    verified: Texts = ()
    extrapolated: Texts = ()


class ProbeResult(Spec, extra="ignore"):
    """The outcome of running a plan, or a slice of it: predictions beside measurements."""

    schema_version: Literal[1] = 1
    mode: Literal["ranks", "stages"]
    """`ranks`: all ranks of the slice together; `stages`: one stage at a time with its peers emulated."""
    device: str
    torch_version: str
    inputs_sha256: str
    """Hash of the plan's inputs."""
    slice: PlanSlice
    tolerance_fraction: float
    comparisons: tuple[ComparedQuantity, ...]
    checks: tuple[ProbeCheck, ...]
    step_s: float | None = None
    """Median of the measured steps. Where stages ran one by one, the replay of the whole pipeline with measured
    durations."""
    step_spread_s: float = 0.0
    """Longest minus shortest measured step. Where stages ran one by one, the largest such difference of any stage."""
    plan_runtime: str = ""
    """The trainer that the plan is for."""
    plan_step_s: float | None = None
    """Seconds of a step that the plan predicts for that trainer; the run is eager torch and is compared with the price
    of eager torch. Null where the plan's own stages did not run."""
    notes: Texts = ()
    """Sentences on what the comparisons are of, where that is not what the plan said."""
    loss: float | None = None
    conditions: tuple[Condition, ...] = ()
    """Unusual conditions while GPUs were measured. Where the run contradicts the plan, these may be why."""
    run: ProbeRun
    ranks: tuple[RankResult, ...] = ()
    made_to_fit: Texts = ()
    """How what ran differs from the plan because eager torch needs more memory than the plan's trainer."""
    out_of_memory: RankOutOfMemory | None = None
    predicted_bytes: int | None = None
    """Memory that the plan predicts for the stage that ran out of it."""

    @property
    def agrees(self) -> bool:
        """True if every check passed and every judged quantity is within the tolerance."""
        return (
            self.out_of_memory is None
            and all(check.passed for check in self.checks)
            and all(comparison.agrees is not False for comparison in self.comparisons)
        )

    @property
    def uses_tolerance(self) -> bool:
        """True if any quantity is judged by the tolerance; equality of results is not."""
        return any(comparison.agrees is not None for comparison in self.comparisons)


FailureKind = Literal[
    "error",
    "out_of_memory",
    "host_memory",
    "lost_peer",
    "duplicate_gpu",
    "shared_memory",
    "network",
    "device",
    "disagreement",
]
"""`disagreement`: the ranks have not agreed on what runs, and the message names who differs. `out_of_memory` means a
GPU's memory; `host_memory` means the machine's, `shared_memory` its /dev/shm; `device` means that the GPU or its driver
has failed."""


class RankFailure(Spec):
    """The record that a failed rank leaves behind."""

    rank: int
    stage: int
    phase: str
    """The phase in which the rank failed, and the action if it was at one."""
    kind: FailureKind
    message: str
    traceback: str
    time_s: float
    """The time of the failure on the host's monotonic clock."""
    asked_bytes: int | None = None

    def in_words(self, place: Place) -> str:
        if self.kind == "disagreement":
            return self.message
        return f"rank {self.rank} ({place}) failed in {self.phase}: {self.message}"


class StartedStage(Spec):
    """The ranks of a pipeline stage that a probe would start, and the bytes of one of them, in eager torch."""

    stage: int
    num_ranks: int
    layers: tuple[tuple[int, int], ...]
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    moment_bytes: int
    """Bytes of logits, or of a layer's backward."""
    reserved_bytes: int
    total_bytes: int


class ProbeStart(Spec):
    """The start of a probe of all of a plan's ranks, of which nothing has happened."""

    schema_version: Literal[1] = 1
    plan: str
    num_ranks: int
    num_nodes: int
    made_to_fit: Texts
    capacity_bytes: int
    stages: tuple[StartedStage, ...]
    commands: Named
    """By what starts the ranks."""
    environment: Named
    """Variables of each rank, and who sets them."""
