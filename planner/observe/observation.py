"""An observed run: its steps, timers, memory and wall time, and how they compare with what was predicted.

Readers of logs, traces and snapshots each fill what their files show; what a file does not show stays None or empty.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.answer import Interval, Plan
from planner.specs.base import Fields, Ints, Spec, Texts


class SavedPart(Spec, extra="ignore"):
    """A part of an observation as files keep it: fields that older versions saved and nobody reads are left out."""


class RankSpread(SavedPart):
    """A number of each rank, of which the log names the least and the most, as `--log-straggler` does; medians."""

    name: Literal["round_trip_s", "power_w", "temperature_c", "utilization_fraction", "clock_mhz", "data_s", "tflops"]
    low: float
    low_rank: int
    """The rank that most often had the least."""
    low_share: float
    """The share of the lines in which it had: near 1 where it is always the same, near 0 where chance decides."""
    high: float
    high_rank: int
    high_share: float
    num_values: int


class Wall(SavedPart):
    """The wall time from the first to the last thing that has a time, and what took it."""

    wall_s: float
    startup_s: float
    """From the first line with a time to the begin of the first step."""
    steps_s: float
    evaluation_s: float
    checkpoint_s: float
    down_s: float
    """From an interruption to the first step made after it."""
    idle_s: float
    """Between those, where nothing was recorded."""
    overlap_s: float
    """Seconds that records claim twice: the items less this are the wall time."""

    @property
    def error_fraction(self) -> float:
        """The share of the wall time that the items miss: 0 where they add up."""
        return self.overlap_s / self.wall_s if self.wall_s else 0.0


OutlierKind = Literal["checkpoint", "evaluation", "periodic", "slow_spell", "unexplained"]


class SourceFile(SavedPart):
    """A file that was read."""

    path: str
    format: str
    """The grammar or format that was recognised, such as `megatron`, `torchtitan`, `kineto`."""
    num_lines: int = 0
    num_bytes: int = 0
    partial: str = ""
    """The reason why only a part was read; empty where all of it was."""


class JobFacts(SavedPart):
    """The job as its own files state it; None where they do not."""

    trainer: str | None = None
    model: str | None = None
    """The model by name."""
    hardware: str | None = None
    """The GPU as the log names it, such as `NVIDIA H100 80GB HBM3`."""
    num_gpus: int | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    num_parameters: int | None = None
    lora_rank: int | None = None
    """Rank of the adapters that are trained in the place of the weights; None where no line says so."""
    num_steps_asked: int | None = None
    """The number of the last step that the run is to make."""
    run: Fields = Field(default_factory=dict)
    """The run in the words of `plan evaluate --runs`, as far as an argument dump or a configuration states it."""
    stated_switches: Texts = ()
    """The features in it that the log names, and `recompute`; the others are what the trainer does unasked."""


class StepSeries(SavedPart):
    """The steps in the order of the log; of very many, every `stride`-th row."""

    steps: Ints = ()
    """Numbers of the optimizer steps, each the last one that its row covers."""
    seconds: tuple[float, ...] = ()
    """Mean seconds of the steps that a row covers."""
    end_s: tuple[float, ...] = ()
    """Seconds from the first timestamp of the log to each row; empty where lines have no time."""
    stride: int = 1


class Outlier(SavedPart):
    """Steps that took longer than the noise of the others, under one name."""

    kind: OutlierKind
    steps: Ints
    """The numbers of the first steps of this kind."""
    num_steps: int
    extra_s: float
    """Seconds of all of them beyond as many steady steps."""
    period_steps: int | None = None
    """Steps from one to the next, where they come regularly."""
    likely: str = ""
    """The likely cause in words, such as garbage collection every 100 steps."""


class Restart(SavedPart):
    """A place where the step number falls back: the run went on from an earlier checkpoint."""

    from_step: int
    """The last step before the interruption."""
    to_step: int
    """The first step after it."""
    lost_steps: int
    lost_s: float
    """Seconds of the steps that had to be made again."""
    down_s: float | None = None
    """Seconds from the last line of a step to the first one made after it, less that step's own; None without times."""


class Timer(SavedPart):
    """A timer that the trainer prints, in seconds of one step; the median over what was printed."""

    name: str
    min_s: float
    max_s: float
    """The least and the most over the ranks; equal where one number is printed."""
    num_values: int


class ObservedMemory(SavedPart):
    """Memory of one rank, the highest that was printed."""

    rank: int | None = None
    allocated_bytes: int | None = None
    max_allocated_bytes: int | None = None
    max_reserved_bytes: int | None = None
    device_bytes: int | None = None
    """Bytes in use on the GPU, of everything."""


class MemorySeries(SavedPart):
    """Memory of one rank in the order of the log, of one kind; of very many lines, every n-th."""

    kind: Literal["allocated", "max_allocated", "max_reserved", "device", "reserved"]
    """Bytes in use at the line, or the highest since the begin or the line before; 0.2 said `reserved` of these."""
    rank: int | None = None
    steps: Ints
    """The step before each line."""
    num_bytes: Ints


class FailedAllocation(SavedPart):
    """An error of memory that ran out, in the words of torch."""

    rank: int | None = None
    requested_bytes: int
    allocated_bytes: int | None = None
    """Bytes that torch had allocated."""
    unused_bytes: int | None = None
    """Bytes that torch had reserved and not allocated."""
    free_bytes: int | None = None
    """Bytes of the GPU that nobody had."""
    total_bytes: int | None = None
    """Bytes of the GPU."""


class HungCollective(SavedPart):
    """A collective that NCCL's watchdog ended, on one rank."""

    rank: int | None = None
    sequence: int
    """Its number; 0 where the watchdog itself stood still, so that it says none."""
    collective: str = ""
    num_elements: int | None = None
    seconds: float | None = None
    """How long the rank had waited."""


Verdict = Literal["expected", "slow", "fast", "memory"]
"""The place of the step to its predicted interval; `memory` if the step is inside and the peak above its own."""


class Observation(SavedPart):
    """A run as its files show it."""

    sources: tuple[SourceFile, ...]
    facts: JobFacts = JobFacts()
    step_s: float | None = None
    """The median of the steps after the warm-up."""
    step_s_spread: Interval | None = None
    """The 10th and the 90th percentile of the same steps."""
    step_s_precision_fraction: float = 0.0
    """Half a unit of the last digit that the trainer prints, as a share of the step."""
    num_steps: int = 0
    num_warmup_steps: int = 0
    warmup_extra_s: float = 0.0
    drift_fraction: float | None = None
    """Change of the step from the begin to the end of the run, by the median slope; None where there are too few."""
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    """The highest that any rank allocated; reserved, or in use on the device, where the trainer prints nothing else."""
    peak_memory_kind: Literal["allocated", "reserved", "device"] | None = None
    mfu: float | None = None
    """By the planner's definition: model FLOPs without recompute over the dense bf16 peak."""
    printed_mfu: float | None = None
    printed_tflops_per_gpu: float | None = None
    """As the trainer prints them, by its own definitions."""
    breakdown: dict[str, float] = Field(default_factory=dict)
    """Seconds of a steady step by term, adding up to it; what no file tells apart is `unattributed_s`."""
    series: StepSeries = StepSeries()
    outliers: tuple[Outlier, ...] = ()
    restarts: tuple[Restart, ...] = ()
    timers: tuple[Timer, ...] = ()
    memory: tuple[ObservedMemory, ...] = ()
    memory_series: tuple[MemorySeries, ...] = ()
    """One for each kind: that of the rank with the highest last value."""
    num_alloc_retries: int | None = None
    """How often the allocator found no memory, freed its cache and tried again, on the rank that says most."""
    num_ooms: int | None = None
    """Errors of allocations that failed in the end."""
    num_host_ooms: int | None = None
    """Lines of Ray, Slurm or a kernel which end processes since a host's memory ran out."""
    failed_allocations: tuple[FailedAllocation, ...] = ()
    """Errors of memory that ran out, as the log has them."""
    hung_collectives: tuple[HungCollective, ...] = ()
    """Collectives that a watchdog ended, as the log has them."""
    not_numbers: tuple[int, int, int] | None = None
    """Lines whose loss or norm of gradients is no number, and the steps of the first and the last of them."""
    rank_spreads: tuple[RankSpread, ...] = ()
    data_s: float | None = None
    """Seconds of a mean step in which the slowest rank waits for its batch, by the timer of that; inside of others."""
    watts_per_gpu: float | None = None
    clock_mhz: float | None = None
    wall: Wall | None = None
    notes: Texts = ()
    """Sentences on what the files leave open or show beside."""
    asks: Texts = ()
    """Options that would say what the files do not, such as `--global-batch-size N`."""


class Prediction(SavedPart):
    """The numbers that the run is held against: the price of its layout and recipe, or an earlier run of the job."""

    kind: Literal["plan", "run"] = "plan"
    source: str
    """The plan's or the earlier run's file, the log's own arguments, or the options."""
    model: str
    hardware: str
    num_gpus: int
    layout: str
    step_s: float
    step_s_interval: Interval | None
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    """Allocated by torch on the fullest rank."""
    total_memory_interval: Interval | None = None
    """With what is reserved beside."""
    breakdown: dict[str, float]


class Term(SavedPart):
    """One term of a difference of seconds."""

    term: str
    seconds: float
    evidence: str
    recoverable_s: float | None = None
    """The most that could be won back; None where nothing tells."""


class GapRemedy(SavedPart):
    """A change of the job, and the step that it would give."""

    options: Texts
    """Words of `plan`'s command line, or of the trainer's environment; empty where neither helps."""
    step_s: float | None = None
    """Seconds of the step with it; None where nothing tells."""
    is_priced: bool = True
    """True where they are by the price of the changed job; else they are the observed step without the cause."""
    says: str = ""


class GapCause(SavedPart):
    """A row of the gap whose mechanism the files show: why the run is not as it should be."""

    name: str
    seconds: float | None = None
    """Seconds of a step that it accounts for, as far as something shows it."""
    evidence: str
    """The numbers of the files that show it."""
    where: str = ""
    """The rank, stage, group, switch or file that it is about."""
    remedy: GapRemedy | None = None


class Observed(SavedPart):
    """The answer of `plan observe`."""

    schema_version: Literal[1] = 1
    observation: Observation
    prediction: Prediction | None = None
    waterfall: tuple[Term, ...] = ()
    """Measured less predicted seconds of a step, the terms adding up to it."""
    beside: tuple[Term, ...] = ()
    """Wall time per step less the steady step, the terms adding up to it."""
    verdict: Verdict | None = None
    """None where nothing was predicted."""
    says: str = ""
    """The verdict in one sentence."""
    causes: tuple[GapCause, ...] = ()
    """The rows of the gap whose mechanism the files show, the one that takes most first."""
    next_test: str = ""
    """The recording that would tell most, where a run is slow, or takes more memory, and no file shows why."""
    plan: Plan | None = None
    """The plan that the run is of: inputs and best layout."""
