"""The parts of an observation: its files and facts, steps, timers, memory, links of single ranks, and the wall time."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from planner.specs.base import Spec


class RankSpread(Spec):
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
    per_rank: dict[int, float] = Field(default_factory=dict)
    """The last value of single ranks, where the log lists some."""


class Wall(Spec):
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


class Source(Spec):
    """A file that was read."""

    path: str
    format: str
    """The grammar or format that was recognised, such as `megatron`, `torchtitan`, `kineto`."""
    num_lines: int = 0
    num_bytes: int = 0
    partial: str = ""
    """The reason why only a part was read; empty where all of it was."""


class JobFacts(Spec):
    """The job as its own files state it; None where they do not."""

    trainer: str | None = None
    trainer_version: str | None = None
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
    run: dict[str, Any] = Field(default_factory=dict)
    """The run in the words of `plan evaluate --runs`, as far as an argument dump or a configuration states it."""
    stated_switches: tuple[str, ...] = ()
    """The features in it that the log names, and `recompute`; the others are what the trainer does unasked."""


class StepSeries(Spec):
    """The steps in the order of the log; of very many, every `stride`-th row."""

    steps: tuple[int, ...] = ()
    """Numbers of the optimizer steps, each the last one that its row covers."""
    seconds: tuple[float, ...] = ()
    """Mean seconds of the steps that a row covers."""
    end_s: tuple[float, ...] = ()
    """Seconds from the first timestamp of the log to each row; empty where lines have no time."""
    stride: int = 1


class Outlier(Spec):
    """Steps that took longer than the noise of the others, under one name."""

    kind: OutlierKind
    steps: tuple[int, ...]
    """The numbers of the first steps of this kind."""
    num_steps: int
    extra_s: float
    """Seconds of all of them beyond as many steady steps."""
    period_steps: int | None = None
    """Steps from one to the next, where they come regularly."""
    likely: str = ""
    """The likely cause in words, such as garbage collection every 100 steps."""


class Restart(Spec):
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


class Timer(Spec):
    """A timer that the trainer prints, in seconds of one step; the median over what was printed."""

    name: str
    min_s: float
    max_s: float
    """The least and the most over the ranks; equal where one number is printed."""
    num_values: int
    per_rank_s: dict[int, float] = Field(default_factory=dict)
    mean_s: float | None = None
    """The mean of the most over the ranks: far above `max_s` where the timer is long now and then."""


class RankMemory(Spec):
    """Memory of one rank, the highest that was printed."""

    rank: int | None = None
    allocated_bytes: int | None = None
    max_allocated_bytes: int | None = None
    max_reserved_bytes: int | None = None
    device_bytes: int | None = None
    """Bytes in use on the GPU, of everything."""


class MemorySeries(Spec):
    """Memory of one rank in the order of the log, of one kind; of very many lines, every n-th."""

    kind: Literal["allocated", "reserved", "device"]
    is_peak: bool = False
    """True for the highest since the begin or since the line before, false for the bytes in use at the line."""
    rank: int | None = None
    steps: tuple[int, ...]
    """The step before each line."""
    num_bytes: tuple[int, ...]


class RankPasses(Spec):
    """Seconds that one rank computes for one micro-batch, forward and backward, through all of its chunks."""

    rank: int | None
    stage: int | None
    """The pipeline stage; None where neither the layout nor the trace says it."""
    pipeline: int | None = None
    """The number of its pipeline, one for all ranks that wait for each other in its passes and between them."""
    forward_s: float | None
    backward_s: float | None
    holds_exchanges: bool = False
    """True where they hold the tp, cp and ep exchanges of the pass, and waits for those groups' other ranks."""
    exchanges_s: float | None = None
    """Exposed seconds of such exchanges in a micro-batch, waits among them, where the passes do not hold them."""
    num_microbatches: int | None = None
    """Micro-batches of a step, as far as the files show them."""
    microbatch_sizes: tuple[float, ...] = ()
    """Seconds of each micro-batch of one step over their mean; empty where they are alike, or of several steps."""
    source: str
    """The timer or the annotations that say so."""


class Link(Spec):
    """A collective that a log times with its size: a measured rate."""

    op: str
    message_bytes: float
    seconds: float
    bus_bytes_per_s: float
    num_values: int
