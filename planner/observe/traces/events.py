"""The events of one rank, and sets of time: sorted spans [start, end) in whole nanoseconds that do not overlap."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.kernels_and_groups import ProcessGroup

Times = NDArray[np.int64]
Spans = NDArray[np.int64]
"""An array of shape (number of spans, 2)."""

NONE: Spans = np.zeros((0, 2), np.int64)


def union(starts: Times, ends: Times) -> Spans:
    """The time that any of the given spans covers; those without length are left out."""
    keep = ends > starts
    if not keep.any():
        return NONE
    starts, ends = starts[keep], ends[keep]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
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
    names: tuple[str, ...]
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
    warnings: tuple[str, ...] = ()

    @property
    def span_ns(self) -> tuple[int, int]:
        """The first start and the last end of anything that is not bookkeeping."""
        tables = [events for events in (self.gpu, self.launches, self.operators, self.marks) if len(events)]
        if not tables:
            return (0, 0)
        return min(int(t["start"][0]) for t in tables), max(int(t["end"].max()) for t in tables)

    def launch(self) -> NDArray[np.int64]:
        """The index in `launches` of the call that launched each of `gpu`, or −1."""
        return launch_of(self.gpu, self.launches)


def launch_of(gpu: Events, launches: Events) -> NDArray[np.int64]:
    """The index in `launches` of the call that launched each of `gpu`, or −1."""
    if not len(launches):
        return np.full(len(gpu), -1, np.int64)
    order = np.argsort(launches["link"], kind="stable")
    links = launches["link"][order]
    at = np.minimum(np.searchsorted(links, gpu["link"]), len(links) - 1)
    return np.where((gpu["link"] >= 0) & (links[at] == gpu["link"]), order[at], -1)
