"""Sets of time: sorted spans [start, end) in whole nanoseconds that do not overlap. Lengths of unions, never sums."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.kernels_and_groups import ProcessGroup
from planner.specs.reading import printable

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


MAX_NAME_CHARS = 2000
MAX_NAMES_CHARS = 2**26
"""Names longer than this in total are counted under one: real traces have some thousand kernels."""
NAMELESS = "(further names)"


_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,7})")


def rank_in_name(where: str) -> int | None:
    """The rank that a file's name says, as `rank3_trace.json` and `profile_rank-3.sqlite` do."""
    match = _RANK_IN_NAME.search(Path(where).name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Events:
    """Events of one kind, ordered by start."""

    start_ns: Times
    end_ns: Times
    lane: NDArray[np.int64]
    """An index: a GPU's stream, or a thread of the host."""
    name: NDArray[np.int64]
    """An index in `RankTrace.names`."""
    link: NDArray[np.int64]
    """On the GPU and for calls that launch: the number that the two share, −1 where there is none."""
    call: NDArray[np.int64]
    """An index in `RankTrace.calls` for collectives that say what they exchange, else −1."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def part(self, chosen: slice) -> Events:
        """The events of a slice, without a copy."""
        columns = (self.start_ns, self.end_ns, self.lane, self.name, self.link, self.call)
        return Events(*(column[chosen] for column in columns))

    def where(self, chosen: NDArray[np.bool_]) -> Events:
        """Those events that are chosen."""
        columns = (self.start_ns, self.end_ns, self.lane, self.name, self.link, self.call)
        return Events(*(column[chosen] for column in columns))


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
    copies: NDArray[np.bool_]
    """True where an event of `gpu` is a copy or a fill and no kernel."""
    launches: Events
    """Calls of CUDA's or HIP's runtime and driver."""
    operators: Events
    marks: Events
    """Ranges that the user, the trainer or the profiler annotated, on the host."""
    on_host: bool = False
    """True if the trace holds no GPU's events and `gpu` are operators of the host."""
    lanes: tuple[tuple[int | str, int | str], ...] = ()
    """(device or process, stream or thread) of each lane."""
    warnings: tuple[str, ...] = ()

    @property
    def span_ns(self) -> tuple[int, int]:
        """The first start and the last end of anything that is not bookkeeping."""
        tables = [events for events in (self.gpu, self.launches, self.operators, self.marks) if len(events)]
        if not tables:
            return (0, 0)
        return min(int(t.start_ns[0]) for t in tables), max(int(t.end_ns.max()) for t in tables)


@dataclass(slots=True)
class Names:
    """Text once, and its number afterwards."""

    texts: list[str] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)
    _num_chars: int = 0

    def __call__(self, text: str) -> int:
        index = self._index.get(text)
        if index is None:
            key = text[:MAX_NAME_CHARS] if self._num_chars < MAX_NAMES_CHARS else NAMELESS
            index = self._index.get(key)
            if index is None:
                index = self._index[key] = len(self.texts)
                self.texts.append(printable(key, MAX_NAME_CHARS))
                self._num_chars += len(key) + 100
        return index


@dataclass(slots=True)
class EventColumns:
    """Events while a file is read: 40 bytes each, whatever the file says of them."""

    start_ns: array[int] = field(default_factory=lambda: array("q"))
    end_ns: array[int] = field(default_factory=lambda: array("q"))
    lane: array[int] = field(default_factory=lambda: array("i"))
    name: array[int] = field(default_factory=lambda: array("i"))
    link: array[int] = field(default_factory=lambda: array("q"))
    call: array[int] = field(default_factory=lambda: array("i"))

    def add(self, start_ns: int, end_ns: int, lane: int, name: int, link: int = -1, call: int = -1) -> None:
        """One event more."""
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.lane.append(lane)
        self.name.append(name)
        self.link.append(link)
        self.call.append(call)

    def events(self) -> tuple[Events, NDArray[np.int64]]:
        """The events by start, those that hold others first, and the order in which they were added."""
        start, end = np.array(self.start_ns, np.int64), np.array(self.end_ns, np.int64)
        order = np.lexsort((-end, start))
        others = (np.array(column, np.int64)[order] for column in (self.lane, self.name, self.link, self.call))
        return Events(start[order], end[order], *others), order


NO_EVENTS = EventColumns().events()[0]
