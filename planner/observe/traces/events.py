"""A rank's trace: kernels by family, process groups, events, sets of time; and the answers made of them, in seconds.

The names that they have are tables of `names.yaml`; the first row that matches wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from planner.observe.observation import SavedPart
from planner.specs.base import Fields, Ints, Texts
from planner.specs.reading import shipped_table

TABLES: Fields = shipped_table("observe/traces/names.yaml")
OPTIMIZER, OTHER = "optimizer", "other"
"""The family `other` is of names that no row knows; its share is told, with the largest of them."""
NAMES = tuple(TABLES["families"])
_PATTERNS = [re.compile("|".join(parts), re.IGNORECASE) for parts in TABLES["families"].values()]
COMMUNICATION = 0
"""The index of the one family that communicates."""


def family_of(name: str) -> int:
    """The index in NAMES of a kernel's name."""
    return next(index for index, pattern in enumerate(_PATTERNS) if pattern.search(name))


_AXIS_PATTERNS = [(axis, re.compile(pattern)) for axis, pattern in TABLES["axes"]]
GRID_ORDER = ("tp", "cp", "dp", "pp")
"""From ranks beside each other to ranks far apart, as Megatron and torchtitan lay them out."""
Grid = Mapping[str, int]
"""Sizes of tp, cp, dp and pp, which name the process groups that a trace leaves undescribed."""
UNKNOWN = "unknown"
POINT_TO_POINT = "point to point"
PLANNED = {
    "tp": "tp", "cp": "cp", "ep": "ep", "etp": "ep", "dp": "dp", "edp": "dp", "pp": "pp", POINT_TO_POINT: "pp",
}  # fmt: skip
"""The group of a plan's step that a group of a trace counts to: a plan has expert tensor parallelism with ep."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group as a trace says it: ranks are unknown where the list was truncated and no stride is said."""

    name: str
    description: str = ""
    ranks: Ints = ()
    size: int | None = None

    @property
    def stride(self) -> int | None:
        """The distance of neighbours, where it is one number."""
        steps = {b - a for a, b in pairwise(self.ranks)}
        return steps.pop() if len(steps) == 1 else None

    @property
    def label(self) -> str:
        """The group in a report: its axis, or its size and stride."""
        axis = axis_of_description(self.description)
        if axis:
            return axis
        size = f"{self.size} ranks" if self.size else "ranks unknown"
        return f"group {self.name or '?'} ({size}{f', stride {self.stride}' if self.stride else ''})"


def axis_of_description(description: str) -> str | None:
    """The axis that a description names, or None."""
    lowered = description.strip().lower()
    return next((axis for axis, pattern in _AXIS_PATTERNS if pattern.search(lowered)), None)


def axis_of(group: ProcessGroup, grid: Grid | None = None) -> str:
    """The axis of a group: as described, else as its size and stride are in `grid` (sizes of tp, cp, dp and pp)."""
    described = axis_of_description(group.description)
    if described and described != "world":
        return described
    stride = 1
    for axis in GRID_ORDER if grid else ():
        size = (grid or {}).get(axis, 1)
        if size > 1 and group.size == size and group.stride == stride:
            return axis
        stride *= size
    return group.label


def is_whole(value: object, most: int = 2**62) -> TypeGuard[int]:
    """True for a whole number below `most`, of whatever a file may hold."""
    return type(value) is int and 0 <= value < most


def mappings(values: object) -> list[Fields]:
    """The mappings in a list; none where it is something else."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def ranks_of(text: object) -> Ints:
    """The ranks in a list, or in text such as `[0, 1]`; none where it was truncated or is something else."""
    if isinstance(text, str):
        if "..." in text or not re.fullmatch(r"\[[\d,\s]*\]", text) or len(text) > 10**6:
            return ()
        text = [int(word) for word in re.findall(r"\d{1,9}", text)]
    return tuple(text) if isinstance(text, list) and all(is_whole(rank, 10**7) for rank in text) else ()


def ranks_by_stride(*said: object) -> Ints:
    """The ranks of `Global rank start`, `Global rank stride` and `Group size`."""
    start, stride, size = (number if is_whole(number, 10**7) else -1 for number in said)
    return tuple(start + stride * index for index in range(min(size, 10**6))) if start >= 0 < stride else ()


Times = NDArray[np.int64]
Spans = NDArray[np.int64]
"""An array of shape (number of spans, 2)."""

NONE: Spans = np.zeros((0, 2), np.int64)


def union(starts: Times, ends: Times) -> Spans:
    """The time that any of the given spans covers; those without length are left out."""
    keep = ends > starts
    if not keep.any():
        return NONE
    starts = starts[keep]
    ends = ends[keep]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reach = np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], reach[last]], axis=1)


def length_ns(spans: Spans) -> int:
    """Nanoseconds of a set."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def intersect(a: Spans, b: Spans) -> Spans:
    """The time that is in both sets."""
    if not len(a) or not len(b):
        return NONE
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    of_a = np.repeat(np.arange(len(a)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return np.stack([np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1])], axis=1)


def subtract(a: Spans, b: Spans) -> Spans:
    """The time that is in `a` and not in `b`."""
    if not len(a) or not len(b):
        return a
    edges = np.concatenate([[min(a[0, 0], b[0, 0]) - 1], b.ravel(), [max(a[-1, 1], b[-1, 1]) + 1]])
    return intersect(a, edges.reshape(-1, 2))


def merge(a: Spans, b: Spans) -> Spans:
    """The time that is in either set."""
    both = np.concatenate([a, b])
    return union(both[:, 0], both[:, 1])


def window(start_ns: int, end_ns: int) -> Spans:
    """The set of one span."""
    return np.array([[start_ns, end_ns]], np.int64) if end_ns > start_ns else NONE


EVENT = np.dtype([(name, np.int64) for name in ("start", "end", "lane", "name", "link", "call", "copy")])
"""One event, ordered by start: nanoseconds; a stream, or a thread of the host; an index in `RankTrace.names`; the
number that a GPU's event and its launch share and an index in `RankTrace.calls`, −1 for none; 1 for a copy or fill."""
Events = NDArray[Any]
"""An array of `EVENT`."""
NO_EVENTS: Events = np.zeros(0, EVENT)
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,7})")


def rank_in_name(where: str) -> int | None:
    """The rank that a file's name says, as `rank3_trace.json` and `profile_rank-3.sqlite` do."""
    match = _RANK_IN_NAME.search(Path(where).name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Call:
    """One form of collective: what it exchanges, and in which group."""

    collective: str
    """As the trace spells it, in lower case: `allreduce`, `_allgather_base`, `send` …"""
    group: str
    """The process group's name, or nothing."""
    num_elements: int
    """The larger of what goes in and what comes out."""
    dtype: str
    peers: tuple[int, int] | None = None
    """Source and destination of a transfer, where they are said."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Events that one process saw of one device.

    `origin_ns` is the time of nanosecond 0 on the clock that the file says its times are of.
    """

    where: str
    rank: int | None
    world_size: int | None
    device: str
    origin_ns: int
    names: Texts
    groups: dict[str, ProcessGroup]
    calls: tuple[Call, ...]
    gpu: Events
    """Kernels, copies and fills; on a host without a GPU its innermost operators."""
    launches: Events
    """Calls of CUDA's or HIP's runtime and driver."""
    operators: Events
    marks: Events
    """Ranges that the user, the trainer or the profiler annotated, on the host."""
    on_host: bool = False
    """True if the trace holds no GPU's events and `gpu` are operators of the host."""
    warnings: Texts = ()

    @property
    def span_ns(self) -> tuple[int, int]:
        """The first start and the last end of anything that is not bookkeeping."""
        tables = [events for events in (self.gpu, self.launches, self.operators, self.marks) if len(events)]
        if not tables:
            return (0, 0)
        return min(int(t["start"][0]) for t in tables), max(int(t["end"].max()) for t in tables)


def launch_of(gpu: Events, launches: Events) -> NDArray[np.int64]:
    """The index in `launches` of the call that launched each of `gpu`, or −1."""
    if not len(launches):
        return np.full(len(gpu), -1, np.int64)
    order = np.argsort(launches["link"], kind="stable")
    links = launches["link"][order]
    at = np.minimum(np.searchsorted(links, gpu["link"]), len(links) - 1)
    return np.where((gpu["link"] >= 0) & (links[at] == gpu["link"]), order[at], -1)


DATA_RANGES = re.compile(r"data_?load|batch.?generator|(get|next)_batch|data.?iter", re.IGNORECASE)
"""Annotations of waiting for a batch: those of torch's loader and of Megatron-LM's timers."""
HOST = "host"
"""The device of a trace without a GPU's events."""


class FamilyTime(SavedPart):
    """Time that kernels of one family alone account for; families above it in the table take what they share."""

    family: str
    seconds: float
    share_fraction: float
    """Share of the step's computing time."""
    num_kernels: int
    longest: Texts = ()
    """Names of the longest kernels, for the family `other`."""


class GroupTime(SavedPart):
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


class TraceStep(SavedPart):
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


class CollectiveTime(SavedPart):
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


class RankReport(SavedPart):
    """Steps and exchanges of one rank's trace."""

    file: str
    rank: int | None
    stage: int | None = None
    world_size: int | None = None
    device: str
    steps: tuple[TraceStep, ...]
    collectives: tuple[CollectiveTime, ...] = ()
    warnings: Texts = ()


class TraceReport(SavedPart):
    """Traces of one run, one entry a rank, and what they cannot show."""

    ranks: tuple[RankReport, ...]
    clock_error_s: float | None = None
    """How far apart ends of shared collectives are after clocks were aligned (median); None without peers."""
    not_shown: Texts = ()
