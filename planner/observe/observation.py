"""An observed run: its steps, timers, memory and wall time, and how they compare with what was predicted.

Readers of logs, traces and snapshots each fill what their files show; what a file does not show stays None or empty.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.answer import Interval, Plan
from planner.observe.measured import (
    JobFacts,
    Link,
    MemorySeries,
    Outlier,
    RankMemory,
    RankPasses,
    RankSpread,
    Restart,
    Source,
    StepSeries,
    Timer,
    Wall,
)
from planner.specs.base import Spec

Verdict = Literal["expected", "slow", "fast", "memory"]
"""The place of the step to its predicted interval; `memory` if the step is inside and the peak above its own."""


class Observation(Spec):
    """A run as its files show it."""

    sources: tuple[Source, ...]
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
    memory: tuple[RankMemory, ...] = ()
    memory_series: tuple[MemorySeries, ...] = ()
    """One for each kind: that of the rank with the highest last value."""
    num_alloc_retries: int | None = None
    """How often the allocator found no memory, freed its cache and tried again, on the rank that says most."""
    num_ooms: int | None = None
    """Errors of allocations that failed in the end."""
    num_skipped_steps: int | None = None
    """Steps whose update was left out, mostly because the loss scale was too high."""
    num_nan_steps: int | None = None
    passes: tuple[RankPasses, ...] = ()
    links: tuple[Link, ...] = ()
    rank_spreads: tuple[RankSpread, ...] = ()
    data_s: float | None = None
    """Seconds of a mean step in which the slowest rank waits for its batch, by the timer of that; inside of others."""
    watts_per_gpu: float | None = None
    clock_mhz: float | None = None
    wall: Wall | None = None
    notes: tuple[str, ...] = ()
    """Sentences on what the files leave open or show beside."""
    asks: tuple[str, ...] = ()
    """Options that would say what the files do not, such as `--global-batch-size N`."""


class Prediction(Spec):
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


class Term(Spec):
    """One term of a difference of seconds."""

    term: str
    seconds: float
    evidence: str
    recoverable_s: float | None = None
    """The most that could be won back; None where nothing tells."""


class WhatIf(Spec):
    """The step replayed with one thing idealised."""

    kind: Literal["operation", "rank", "stage"]
    name: str
    """The thing: `backward`, `rank 3`, `stage 2`."""
    step_s: float
    recoverable_s: float
    """The replayed step as observed, less this one."""


class Replayed(Spec):
    """The step replayed from what its ranks were seen to compute."""

    step_s: float
    measured_s: float
    """The step that the same files show: of a profiled run, the profiled one."""
    even_s: float | None
    """The step if every rank, stage and operation were as its peers; None where none has any."""
    notes: tuple[str, ...] = ()
    """Sentences on what was taken from elsewhere, and on how much the replay leaves open."""


class Remedy(Spec):
    """A change of the job, and the step that it would give."""

    options: tuple[str, ...]
    """Words of `plan`'s command line, or of the trainer's environment; empty where neither helps."""
    step_s: float | None = None
    """Seconds of the step with it; None where nothing tells."""
    is_priced: bool = True
    """True where they are by the price of the changed job; else they are the observed step without the cause."""
    says: str = ""


class Cause(Spec):
    """A hypothesis why the run is not as it should be."""

    name: str
    likelihood: float
    """Probability by the signs that were seen, among all hypotheses and none of them."""
    evidence: str
    remedy: Remedy | None = None
    where: str = ""
    """The rank, stage, group or file that it is about."""
    seconds: float | None = None
    """Seconds of a step that it accounts for, as far as something shows it."""
    test: str = ""
    """A measurement that would tell it from the cause that is next in likelihood."""


class Observed(Spec):
    """The answer of `plan observe`."""

    schema_version: Literal[1] = 1
    observation: Observation
    prediction: Prediction | None = None
    waterfall: tuple[Term, ...] = ()
    """Measured less predicted seconds of a step, the terms adding up to it."""
    beside: tuple[Term, ...] = ()
    """Wall time per step less the steady step, the terms adding up to it."""
    what_if: tuple[WhatIf, ...] = ()
    """Changes of the replayed step, the most winning first."""
    replayed: Replayed | None = None
    verdict: Verdict | None = None
    """None where nothing was predicted."""
    says: str = ""
    """The verdict in one sentence."""
    causes: tuple[Cause, ...] = ()
    """The likeliest first."""
    next_test: str = ""
    """The measurement that would tell most, where a run is slow, or takes more memory, and no file shows why."""
    plan: Plan | None = None
    """The plan that the run is of: inputs and best layout."""
