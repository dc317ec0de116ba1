"""Answers of the trace readers: frozen, in seconds and bytes, ready for JSON."""

from __future__ import annotations

import re

from planner.specs.base import Spec

DATA_RANGES = re.compile(r"data_?load|batch.?generator|(get|next)_batch|data.?iter", re.IGNORECASE)
"""Annotations of waiting for a batch: those of torch's loader and of Megatron-LM's timers."""
HOST = "host"
"""The device of a trace without a GPU's events."""


class FamilyTime(Spec):
    """Time that kernels of one family alone account for; families above it in the table take what they share."""

    family: str
    seconds: float
    share_fraction: float
    """Share of the step's computing time."""
    num_kernels: int
    longest: tuple[str, ...] = ()
    """Names of the longest kernels, for the family `other`."""


class GroupTime(Spec):
    """One group's communication on one rank in one step.

    busy_s = hidden_s + exposed_s + the time when another group's exposed communication, earlier in the list, ran too.
    """

    group: str
    busy_s: float
    """Length of the union; kernels hold waiting for other ranks too."""
    hidden_s: float
    """The part while this rank computed."""
    exposed_s: float
    """The part while it computed nothing and no group above communicated: these add up over groups."""


class TraceStep(Spec):
    """One step of one rank: computing, exposed communication, copies and idle time add up to `wall_s` exactly."""

    number: int | None
    """As the profiler counts; None if the trace marks no steps and this is all of it."""
    start_s: float
    """From the trace's first event."""
    wall_s: float
    warm_up: bool
    """True for steps that capture graphs or start the profiler; medians leave them out."""
    compute_s: float
    exposed_communication_s: float
    copies_s: float
    host_gaps_s: float
    """Idle, and the next kernel was not launched yet when the GPU ran dry."""
    dependencies_s: float
    """Idle, with the next kernel launched: it waited for another stream, a copy or another rank."""
    idle_s: float
    """Idle, and nothing in the trace tells why."""
    long_gaps_s: float = 0.0
    """The part of the host gaps that are each longer than 1% of the step: a host that stands still, not one that is
    slow."""
    families: tuple[FamilyTime, ...]
    groups: tuple[GroupTime, ...]
    waits: tuple[tuple[str, float], ...] = ()
    """(what the host did while nothing ran, seconds), the longest first."""


class CollectiveTime(Spec):
    """One kind of exchange in one group on one rank."""

    group: str
    collective: str
    num_bytes: int | None
    """Bytes of the larger side; None where the trace does not say it."""
    group_size: int | None
    count: int
    median_s: float
    """Median duration: transfer and wait."""
    transfer_s: float | None = None
    """Median from the latest rank's start to the end; None without peers' traces."""
    wait_s: float | None = None
    """Mean wait for the latest rank; None without peers' traces."""
    bus_gb_per_s: float | None = None
    """Bytes × the ring's factor ÷ transfer_s, or ÷ median_s, and then the link is at least as fast."""
    at_least: bool = True


class RankReport(Spec):
    """Steps and exchanges of one rank's trace."""

    file: str
    rank: int | None
    stage: int | None = None
    world_size: int | None = None
    device: str
    steps: tuple[TraceStep, ...]
    collectives: tuple[CollectiveTime, ...] = ()
    warnings: tuple[str, ...] = ()


class TraceReport(Spec):
    """Traces of one run, one entry a rank, and what they cannot show."""

    ranks: tuple[RankReport, ...]
    clock_error_s: float | None = None
    """How far apart ends of shared collectives are after clocks were aligned (median); None without peers."""
    not_shown: tuple[str, ...] = ()
