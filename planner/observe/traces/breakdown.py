"""Steps of one rank's trace, cut so that the parts add up to the wall time.

A step is from its first GPU operation to the next step's first one. Every nanosecond is computing, else exposed
communication, else a copy, else idle. Inside computing it belongs to the first family of the table that runs, inside
communication to the first group. Idle time is told by the launch of what ends it: a host gap if that came after the GPU
ran dry, a dependency if it came before.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from planner.observe.traces.events import (
    COMMUNICATION,
    NAMES,
    NO_EVENTS,
    NONE,
    OTHER,
    POINT_TO_POINT,
    UNKNOWN,
    Events,
    FamilyTime,
    Grid,
    GroupTime,
    RankTrace,
    Spans,
    Times,
    TraceStep,
    axis_of,
    family_of,
    intersect,
    launch_of,
    length_ns,
    merge,
    subtract,
    union,
    window,
)
from planner.shape import BoolArray, IntArray
from planner.specs.base import Texts

_STEP = re.compile(r"^(?:ProfilerStep#|(?:train_)?step[ _#:]*|iteration[ _#:]*)(\d{1,12})$", re.IGNORECASE)
_CAPTURE = re.compile(r"(cuda|hip)StreamBeginCapture|(cu|hip|cuda)Graph(Exec)?Instantiate", re.IGNORECASE)
_SLOW_START = 1.2
"""A first step longer than the others' median by this factor holds the profiler's start."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step of a rank, in nanoseconds of its trace."""

    number: int | None
    start_ns: int
    end_ns: int
    warm_up: bool = False


def step_windows(trace: RankTrace) -> tuple[StepWindow, ...]:
    """The steps that the trace marks, without gaps between neighbours; one of all of it where it marks none."""
    marks = _marked(trace)
    if not marks:
        start, end = trace.span_ns
        return (StepWindow(None, start, end),) if end > start else ()
    bounds = _on_gpu(trace, [start for start, _, _ in marks], [end for _, end, _ in marks])
    lengths = np.diff(bounds)
    warm_ups = _captures(trace, marks)
    warm_ups[0] = warm_ups[0] or (len(marks) > 2 and lengths[0] > _SLOW_START * float(np.median(lengths[1:])))
    return tuple(
        StepWindow(number, int(start), int(end), bool(warm_up) and not all(warm_ups))
        for (_, _, number), warm_up, start, end in zip(marks, warm_ups, bounds[:-1], bounds[1:], strict=True)
        if end > start
    )


def _marked(trace: RankTrace) -> list[tuple[int, int, int]]:
    """Start, end and number of every step's annotation, by start; of several with one number the longest."""
    steps: dict[int, tuple[int, int, int]] = {}
    number_of = {index: int(match[1]) for index, name in enumerate(trace.names) if (match := _STEP.match(name))}
    chosen = trace.marks[np.isin(trace.marks["name"], list(number_of))]
    for start, end, name in zip(*(chosen[field].tolist() for field in ("start", "end", "name")), strict=True):
        number = number_of[name]
        if number not in steps or end - start > steps[number][1] - steps[number][0]:
            steps[number] = (start, end, number)
    return sorted(steps.values())


def _on_gpu(trace: RankTrace, starts: list[int], ends: list[int]) -> list[int]:
    """Boundaries of steps: where the GPU starts what each launched, if all launched something, else the host's."""
    on_host = [*starts, ends[-1]]
    launch = launch_of(trace.gpu, trace.launches)
    known = launch >= 0
    if trace.on_host or not known.any():
        return on_host
    launched_ns = trace.launches["start"][launch[known]]
    began = trace.gpu["start"][known]
    ended = trace.gpu["end"][known]
    step: IntArray = np.searchsorted(np.array(starts), launched_ns, side="right") - 1
    inside = (step >= 0) & (launched_ns < np.array(ends)[np.maximum(step, 0)])
    bounds = []
    for index in range(len(starts)):
        mine = inside & (step == index)
        if not mine.any():
            return on_host
        bounds.append(int(began[mine].min()))
    if len(bounds) > 1:  # the next step's first operation is not in the trace: the GPU is as late as before this one
        bounds.append(ends[-1] + bounds[-1] - starts[-1])
    else:
        bounds.append(max(int(ended[mine].max()), ends[-1]))
    return bounds if bounds == sorted(set(bounds)) else on_host


def _captures(trace: RankTrace, marks: list[tuple[int, int, int]]) -> list[bool]:
    """True for each step in which the host captures or instantiates a graph."""
    names = [index for index, name in enumerate(trace.names) if _CAPTURE.search(name)]
    at = trace.launches["start"][np.isin(trace.launches["name"], names)]
    return [bool(((at >= start) & (at < end)).any()) for start, end, _ in marks]


NS = 1e-9
MAX_NAMES = 3
LONG = 0.01
"""A gap of this share of a step is no launch: of those there are hundreds in a step."""
_SYNCHRONISES = re.compile(r"Synchronize$")
_BUSY = re.compile(r"[Dd]ata_?[Ll]oad|batch.generator|(get|next)_batch|[Cc]heckpoint|\b(gc|garbage)\b")


@dataclass(frozen=True)
class Sorted:
    """A rank's GPU events with the family and the group of each."""

    trace: RankTrace
    family: IntArray
    group: IntArray
    """An index in `labels`, −1 for what does not communicate."""
    labels: Texts
    launch: IntArray
    waits: tuple[tuple[str, Spans], ...]
    """Times at which the host waits or is busy with something else, by name."""
    reach_ns: Times
    """The latest end of an event and all before it."""

    @classmethod
    def of(cls, trace: RankTrace, grid: Grid | None = None) -> Sorted:
        """Sort a trace's events; `grid` names the axes of groups that the trace leaves undescribed."""
        family = np.array([family_of(name) for name in trace.names], np.int64)[trace.gpu["name"]]
        label_of_call = [
            axis_of(trace.groups[call.group], grid) if call.group in trace.groups else UNKNOWN for call in trace.calls
        ]
        of_name = [_label_of_name(name) for name in trace.names]
        labels = tuple(sorted({*label_of_call, *of_name}))
        by_call = np.array([labels.index(label) for label in label_of_call] or [0], np.int64)
        by_name = np.array([labels.index(label) for label in of_name] or [0], np.int64)
        said = trace.gpu["call"] >= 0
        group = np.where(said, by_call[np.where(said, trace.gpu["call"], 0)], by_name[trace.gpu["name"]])
        communicates = ((family == COMMUNICATION) | said) & (trace.gpu["copy"] == 0)
        family = np.where(communicates, COMMUNICATION, family)
        launch = launch_of(trace.gpu, trace.launches)
        reach = np.maximum.accumulate(trace.gpu["end"]) if len(trace.gpu) else trace.gpu["end"]
        group = np.where(communicates, group, -1)
        return cls(trace, family, group, labels, launch, _waits_of(trace), reach)

    def exchanges(self) -> Sorted:
        """The communication alone: what is kept of a rank while the next one's file is read."""
        kept = self._only(self.group >= 0)
        trace = replace(kept.trace, launches=NO_EVENTS, operators=NO_EVENTS, marks=NO_EVENTS)
        return replace(kept, trace=trace, waits=())

    def near(self, step: StepWindow) -> Sorted:
        """The events that may run in a step, and the one behind it: a step costs what is in it, not in the trace."""
        first = int(np.searchsorted(self.reach_ns, step.start_ns, side="right"))
        return self._only(slice(first, int(np.searchsorted(self.trace.gpu["start"], step.end_ns)) + 1))

    def _only(self, part: slice | BoolArray) -> Sorted:
        trace = replace(self.trace, gpu=self.trace.gpu[part])
        cut = {name: getattr(self, name)[part] for name in ("family", "group", "launch", "reach_ns")}
        return replace(self, trace=trace, **cut)


def _label_of_name(name: str) -> str:
    """The group of a communication kernel that says nothing but its name."""
    lowered = name.lower()
    if any(word in lowered for word in ("deepep", "deep_ep", "hybridep", "hybrid_ep", "internode::", "intranode::")):
        return "ep"
    return POINT_TO_POINT if any(word in lowered for word in ("sendrecv", ":send", ":recv")) else UNKNOWN


def break_down(events: Sorted, step: StepWindow) -> TraceStep:
    """The parts of one step."""
    origin_ns = events.trace.span_ns[0]
    events = events.near(step)
    inside = window(step.start_ns, step.end_ns)
    gpu = events.trace.gpu
    kernels = events.trace.gpu["copy"] == 0
    near = (gpu["start"] < step.end_ns) & (gpu["end"] > step.start_ns)
    computing = near & kernels & (events.group < 0)
    compute = intersect(_union(gpu, computing), inside)
    groups, communicating = _groups(events, near, inside, compute)
    busy = merge(compute, communicating)
    copies = subtract(intersect(_union(gpu, near & ~kernels), inside), busy)
    idle = subtract(inside, merge(busy, copies))
    gaps, dependencies, unknown = _idle(events, idle)
    return TraceStep(
        number=step.number,
        start_s=(step.start_ns - origin_ns) * NS,
        wall_s=(step.end_ns - step.start_ns) * NS,
        warm_up=step.warm_up,
        compute_s=_seconds(compute),
        exposed_communication_s=_seconds(subtract(communicating, compute)),
        copies_s=_seconds(copies),
        host_gaps_s=_seconds(gaps),
        dependencies_s=_seconds(dependencies),
        idle_s=_seconds(unknown),
        long_gaps_s=_seconds(gaps[gaps[:, 1] - gaps[:, 0] > LONG * (step.end_ns - step.start_ns)]),
        families=_families(events, computing, inside),
        groups=groups,
        waits=_waits(events, merge(gaps, unknown)),
    )


def _seconds(spans: Spans) -> float:
    return length_ns(spans) * NS


def _union(gpu: Events, chosen: BoolArray) -> Spans:
    return union(gpu["start"][chosen], gpu["end"][chosen])


def _families(events: Sorted, computing: BoolArray, inside: Spans) -> tuple[FamilyTime, ...]:
    taken = NONE
    times = []
    for index, name in enumerate(NAMES):
        chosen = computing & (events.family == index)
        if not chosen.any():
            continue
        spans = intersect(_union(events.trace.gpu, chosen), inside)
        times.append((name, length_ns(subtract(spans, taken)), int(chosen.sum()), _largest(events, chosen, index)))
        taken = merge(taken, spans)
    total = sum(nanoseconds for _, nanoseconds, _, _ in times) or 1
    rows = [
        FamilyTime(family=name, seconds=ns * NS, share_fraction=ns / total, num_kernels=count, longest=longest)
        for name, ns, count, longest in times
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _largest(events: Sorted, chosen: BoolArray, family: int) -> Texts:
    """The names that take most time, for kernels that no pattern knows."""
    if NAMES[family] != OTHER:
        return ()
    gpu = events.trace.gpu
    total: Counter[int] = Counter()
    for name, length in zip(gpu["name"][chosen].tolist(), (gpu["end"] - gpu["start"])[chosen].tolist(), strict=True):
        total[name] += length
    return tuple(events.trace.names[name][:80] for name, _ in total.most_common(MAX_NAMES))


def _groups(events: Sorted, near: BoolArray, inside: Spans, compute: Spans) -> tuple[tuple[GroupTime, ...], Spans]:
    """Communication by group, and all of it."""
    times = []
    all_of_it = NONE
    for index, label in enumerate(events.labels):
        chosen = near & (events.group == index)
        if not chosen.any():
            continue
        spans = intersect(_union(events.trace.gpu, chosen), inside)
        exposed = subtract(subtract(spans, compute), all_of_it)
        times.append(
            GroupTime(
                group=label,
                busy_s=_seconds(spans),
                hidden_s=_seconds(intersect(spans, compute)),
                exposed_s=_seconds(exposed),
            )
        )
        all_of_it = merge(all_of_it, spans)
    return tuple(times), all_of_it


def _idle(events: Sorted, idle: Spans) -> tuple[Spans, Spans, Spans]:
    """Idle time as host gaps, dependencies and what cannot be told."""
    gpu = events.trace.gpu
    launches = events.trace.launches
    if events.trace.on_host:  # between operators the host itself is what works
        return idle, NONE, NONE
    if not len(idle) or not len(gpu):
        return NONE, NONE, idle
    following = np.minimum(np.searchsorted(gpu["start"], idle[:, 1], side="left"), len(gpu) - 1)
    launch = events.launch[following]
    known = (launch >= 0) & (gpu["start"][following] >= idle[:, 1])
    late = known & (launches["start"][launch] > idle[:, 0]) if len(launches) else known
    return idle[late], idle[known & ~late], idle[~known]


def _waits_of(trace: RankTrace) -> tuple[tuple[str, Spans], ...]:
    """Calls and annotations whose name says that the host waits or does something else than launch."""
    spans = []
    for events, wanted in ((trace.launches, _SYNCHRONISES), (trace.marks, _BUSY)):
        for index in np.unique(events["name"]):
            if wanted.search(trace.names[index]):
                chosen = events[events["name"] == index]
                spans.append((trace.names[index][:80], union(chosen["start"], chosen["end"])))
    return tuple(spans)


def _waits(events: Sorted, gaps: Spans) -> tuple[tuple[str, float], ...]:
    """Seconds of idle time that each of the waits covers, the longest first."""
    covered = ((name, _seconds(intersect(gaps, spans))) for name, spans in events.waits)
    return tuple(sorted((item for item in covered if item[1] > 0), key=lambda item: -item[1])[:MAX_NAMES])
