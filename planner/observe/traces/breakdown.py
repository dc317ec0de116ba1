"""Steps of one rank's trace, cut so that the parts add up to the wall time.

A step is from its first GPU operation to the next step's first one. Every nanosecond is computing, else exposed
communication, else a copy, else idle. Inside computing it belongs to the first family of the table that runs, inside
communication to the first group. Idle time is told by the launch of what ends it: a host gap if that came after the GPU
ran dry, a dependency if it came before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.events import (
    COMMUNICATION,
    FAMILIES,
    NO_EVENTS,
    NONE,
    POINT_TO_POINT,
    UNKNOWN,
    Events,
    FamilyTime,
    GroupTime,
    RankTrace,
    Spans,
    Times,
    TraceStep,
    axis_of,
    axis_of_description,
    families_of,
    intersect,
    length_ns,
    merge,
    subtract,
    union,
    window,
)

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
    numbers, starts, ends = _marked(trace)
    if not numbers:
        start, end = trace.span_ns
        return (StepWindow(None, start, end),) if end > start else ()
    bounds = _on_gpu(trace, starts, ends)
    windows = list(zip(numbers, bounds[:-1], bounds[1:], strict=True))
    capturing = _captures(trace, starts, ends)
    lengths = [end - start for _, start, end in windows]
    slow_start = len(windows) > 2 and lengths[0] > _SLOW_START * float(np.median(lengths[1:]))
    warm_ups = [bool(captures) for captures in capturing]
    warm_ups[0] = warm_ups[0] or slow_start
    if all(warm_ups):
        warm_ups = [False] * len(windows)
    return tuple(
        StepWindow(number, int(start), int(end), warm_up)
        for (number, start, end), warm_up in zip(windows, warm_ups, strict=True)
        if end > start
    )


def _marked(trace: RankTrace) -> tuple[list[int], list[int], list[int]]:
    """Number, start and end of every step's annotation; of several with one number the longest."""
    steps: dict[int, tuple[int, int]] = {}
    number_of = {index: int(match[1]) for index, name in enumerate(trace.names) if (match := _STEP.match(name))}
    chosen = np.flatnonzero(np.isin(trace.marks["name"], list(number_of)))
    for start, end, name in zip(
        trace.marks["start"][chosen].tolist(), trace.marks["end"][chosen].tolist(),
        trace.marks["name"][chosen].tolist(), strict=True,
    ):  # fmt: skip
        number = number_of[name]
        old = steps.get(number)
        if old is None or end - start > old[1] - old[0]:
            steps[number] = (start, end)
    ordered = sorted((start, end, number) for number, (start, end) in steps.items())
    return [n for _, _, n in ordered], [s for s, _, _ in ordered], [e for _, e, _ in ordered]


def _on_gpu(trace: RankTrace, starts: list[int], ends: list[int]) -> list[int]:
    """Boundaries of steps: where the GPU starts what each launched, if all launched something, else the host's."""
    on_host = [*starts, ends[-1]]
    launch = trace.launch()
    known = launch >= 0
    if trace.on_host or not known.any():
        return on_host
    launched_ns = trace.launches["start"][launch[known]]
    began, ended = trace.gpu["start"][known], trace.gpu["end"][known]
    step: NDArray[np.int64] = np.searchsorted(np.array(starts), launched_ns, side="right") - 1
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


def _captures(trace: RankTrace, starts: list[int], ends: list[int]) -> list[bool]:
    """True for each step in which the host captures or instantiates a graph."""
    names = [index for index, name in enumerate(trace.names) if _CAPTURE.search(name)]
    at = trace.launches["start"][np.isin(trace.launches["name"], names)]
    return [bool(((at >= start) & (at < end)).any()) for start, end in zip(starts, ends, strict=True)]


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
    family: NDArray[np.int64]
    group: NDArray[np.int64]
    """An index in `labels`, −1 for what does not communicate."""
    labels: tuple[str, ...]
    launch: NDArray[np.int64]
    waits: tuple[tuple[str, Spans], ...]
    """Times at which the host waits or is busy with something else, by name."""
    reach_ns: Times
    """The latest end of an event and all before it."""

    @classmethod
    def of(cls, trace: RankTrace) -> Sorted:
        """Sort a trace's events."""
        family = families_of(trace.names)[trace.gpu["name"]] if len(trace.gpu) else np.zeros(0, np.int64)
        label_of_call = [
            axis_of(trace.groups[call.group]) if call.group in trace.groups else UNKNOWN for call in trace.calls
        ]
        of_name = [_label_of_name(name) for name in trace.names]
        labels = tuple(sorted({*label_of_call, *of_name}))
        by_call = np.array([labels.index(label) for label in label_of_call] or [0], np.int64)
        by_name = np.array([labels.index(label) for label in of_name] or [0], np.int64)
        said = trace.gpu["call"] >= 0
        group = np.where(said, by_call[np.where(said, trace.gpu["call"], 0)], by_name[trace.gpu["name"]])
        communicates = ((family == COMMUNICATION) | said) & (trace.gpu["copy"] == 0)
        family = np.where(communicates, COMMUNICATION, family)
        launch = trace.launch()
        reach = np.maximum.accumulate(trace.gpu["end"]) if len(trace.gpu) else trace.gpu["end"]
        group = np.where(communicates, group, -1)
        return cls(trace, family, group, labels, launch, _waits_of(trace), reach)

    def exchanges(self) -> Sorted:
        """The communication alone: what is kept of a rank while the next one's file is read."""
        chosen = self.group >= 0
        trace = replace(
            self.trace, gpu=self.trace.gpu[chosen], launches=NO_EVENTS,
            operators=NO_EVENTS, marks=NO_EVENTS,
        )  # fmt: skip
        cut = (self.family[chosen], self.group[chosen], self.labels, self.launch[chosen])
        return Sorted(trace, *cut, (), self.reach_ns[chosen])

    def near(self, step: StepWindow) -> Sorted:
        """The events that may run in a step, and the one behind it: a step costs what is in it, not in the trace."""
        first = int(np.searchsorted(self.reach_ns, step.start_ns, side="right"))
        part = slice(first, int(np.searchsorted(self.trace.gpu["start"], step.end_ns)) + 1)
        trace = replace(self.trace, gpu=self.trace.gpu[part])
        cut = (self.family[part], self.group[part], self.labels, self.launch[part])
        return Sorted(trace, *cut, self.waits, self.reach_ns[part])


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
    gpu, kernels = events.trace.gpu, events.trace.gpu["copy"] == 0
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
        compute_s=length_ns(compute) * NS,
        exposed_communication_s=length_ns(subtract(communicating, compute)) * NS,
        copies_s=length_ns(copies) * NS,
        host_gaps_s=length_ns(gaps) * NS,
        dependencies_s=length_ns(dependencies) * NS,
        idle_s=length_ns(unknown) * NS,
        long_gaps_s=length_ns(gaps[gaps[:, 1] - gaps[:, 0] > LONG * (step.end_ns - step.start_ns)]) * NS,
        families=_families(events, computing, inside),
        groups=groups,
        waits=_waits(events, merge(gaps, unknown)),
    )


def _union(gpu: Events, chosen: NDArray[np.bool_]) -> Spans:
    return union(gpu["start"][chosen], gpu["end"][chosen])


def _families(events: Sorted, computing: NDArray[np.bool_], inside: Spans) -> tuple[FamilyTime, ...]:
    taken, rows = NONE, []
    for index in np.unique(events.family[computing]).tolist():
        spans = intersect(_union(events.trace.gpu, computing & (events.family == index)), inside)
        rows.append(FamilyTime(family=FAMILIES[index].name, seconds=length_ns(subtract(spans, taken)) * NS))
        taken = merge(taken, spans)
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _groups(
    events: Sorted, near: NDArray[np.bool_], inside: Spans, compute: Spans
) -> tuple[tuple[GroupTime, ...], Spans]:
    """Communication by group, and all of it."""
    times, all_of_it = [], NONE
    for index, label in enumerate(events.labels):
        chosen = near & (events.group == index)
        if not chosen.any():
            continue
        spans = intersect(_union(events.trace.gpu, chosen), inside)
        exposed = subtract(subtract(spans, compute), all_of_it)
        busy, hidden, shown = (length_ns(part) * NS for part in (spans, intersect(spans, compute), exposed))
        times.append(GroupTime(group=label, busy_s=busy, hidden_s=hidden, exposed_s=shown))
        all_of_it = merge(all_of_it, spans)
    return tuple(times), all_of_it


def _idle(events: Sorted, idle: Spans) -> tuple[Spans, Spans, Spans]:
    """Idle time as host gaps, dependencies and what cannot be told."""
    gpu, launches = events.trace.gpu, events.trace.launches
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
    covered = ((name, length_ns(intersect(gaps, spans)) * NS) for name, spans in events.waits)
    return tuple(sorted((item for item in covered if item[1] > 0), key=lambda item: -item[1])[:MAX_NAMES])


_TOGETHER = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.IGNORECASE)
"""Collectives that end on all ranks at once."""
_TRANSFER = re.compile("send|recv", re.IGNORECASE)
Shared = list[tuple[int, int]]
"""The rank's place and the event's index of one exchange on each of its ranks."""


def late_by_peers(ranks: Sequence[Sorted]) -> list[dict[str, int]]:
    """Nanoseconds for which each rank waited in exchanges of each group, as far as its peers' traces tell.

    The n-th collective of a group is the same one on all of its ranks, and moves no data before its last rank has come.
    """
    shared = [entries for entries in _matched(ranks) if len(entries) > 1]
    offsets, late = _clocks(ranks, shared), [defaultdict[str, int](int) for _ in ranks]
    for entries in shared:
        starts = [int(ranks[rank].trace.gpu["start"][index]) + offsets[rank] for rank, index in entries]
        for (rank, index), start in zip(entries, starts, strict=True):
            gpu = ranks[rank].trace.gpu
            label = ranks[rank].labels[ranks[rank].group[index]]
            late[rank][label] += min(max(starts) - start, int(gpu["end"][index] - gpu["start"][index]))
    return [dict(of_rank) for of_rank in late]


def _matched(ranks: Sequence[Sorted]) -> Iterable[Shared]:
    """Exchanges that several traces have, of groups whose ranks did equally many."""
    found: dict[object, list[Shared]] = defaultdict(list)
    for place, events in enumerate(ranks):
        mine: dict[object, Shared] = defaultdict(list)
        for index in np.flatnonzero(events.group >= 0).tolist():
            if (key := _shared_key(events.trace, index)) is not None:
                mine[key].append((place, index))
        for key, entries in mine.items():
            found[key].append(entries)
    for lists in found.values():
        if len(set(map(len, lists))) == 1:
            yield from map(list, zip(*lists, strict=True))


def _shared_key(trace: RankTrace, index: int) -> object:
    """The key that ranks share of one exchange; None where the trace does not say its ranks."""
    if trace.gpu["call"][index] < 0:  # of all ranks where every group holds all of them
        size = trace.world_size or 0
        groups = [group.ranks for group in trace.groups.values() if group.size != 1]
        all_in_one = size == 2 or (bool(groups) and all(ranks == tuple(range(size)) for ranks in groups))
        return trace.names[trace.gpu["name"][index]] if all_in_one else None
    call = trace.calls[trace.gpu["call"][index]]
    group = trace.groups.get(call.group)
    if group is None or len(group.ranks) < 2:
        return None
    if _TRANSFER.search(call.collective):  # whose peer is whose is said, or plain
        return (group.ranks, group.description, call.peers) if call.peers or len(group.ranks) == 2 else None
    return group.ranks, group.description, call.collective, call.num_elements


def _clocks(ranks: Sequence[Sorted], shared: Sequence[Shared]) -> list[int]:
    """Nanoseconds to add to each rank's times so that shared collectives end together.

    Clocks that are no further apart than ends scatter are taken as one: ranks of one host have one, and the scatter
    would be added to every wait.
    """
    offsets = [events.trace.origin_ns - ranks[0].trace.origin_ns for events in ranks]
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (first, index), *others in shared:
        if _TOGETHER.search(_name(ranks[first].trace, index)):
            end = int(ranks[first].trace.gpu["end"][index])
            for place, other in others:
                ends[first, place].append(end - int(ranks[place].trace.gpu["end"][other]))
    known: set[int] = set()
    for root in range(len(ranks)):  # one of each part of the ranks that no collective joins to those before
        known.add(root)
        for _ in ranks:  # every round reaches the ranks that share a group with those known
            for (a, b), apart in ends.items():
                if (a in known) != (b in known):
                    middle = int(np.median(apart))
                    other, clock = (b, offsets[a] + middle) if a in known else (a, offsets[b] - middle)
                    if abs(clock - offsets[other]) > float(np.median(np.abs(np.array(apart) - middle))):
                        offsets[other] = clock
                    known |= {a, b}
    return offsets


def _name(trace: RankTrace, index: int) -> str:
    call = int(trace.gpu["call"][index])
    return trace.calls[call].collective if call >= 0 else trace.names[trace.gpu["name"][index]]


def stage_of(trace: RankTrace) -> int | None:
    """The pipeline stage of a rank: its place in its pipeline group; None where that is not known.

    A trace that describes its groups, and none of a pipeline, is of a job with one stage.
    """
    if trace.rank is None:
        return None
    for group in trace.groups.values():
        if group.label == "pp" and trace.rank in group.ranks:
            return group.ranks.index(trace.rank)
    described = any(axis_of_description(group.description) for group in trace.groups.values())
    return 0 if described or trace.world_size == 1 else None
