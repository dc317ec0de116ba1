"""Steps in a trace: from a step's first GPU operation to the next step's first one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.events import (
    Events,
    RankTrace,
    Times,
    intersect,
    length_ns,
    union,
    window,
)
from planner.observe.traces.kineto import launch_of
from planner.observe.traces.results import PhaseTime

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
    chosen = np.flatnonzero(np.isin(trace.marks.name, list(number_of)))
    for start, end, name in zip(
        trace.marks.start_ns[chosen].tolist(), trace.marks.end_ns[chosen].tolist(),
        trace.marks.name[chosen].tolist(), strict=True,
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
    launch = launch_of(trace.gpu, trace.launches)
    known = launch >= 0
    if trace.on_host or not known.any():
        return on_host
    launched_ns = trace.launches.start_ns[launch[known]]
    began, ended = trace.gpu.start_ns[known], trace.gpu.end_ns[known]
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
    at = trace.launches.start_ns[np.isin(trace.launches.name, names)]
    return [bool(((at >= start) & (at < end)).any()) for start, end in zip(starts, ends, strict=True)]


ANNOTATIONS = (
    ("forward", r"^(forward_step(_func)?|forward-compute|Forward \d+|\d+F\d+|F_\w+|## forward ##|forward)$"),
    (
        "backward",
        r"^(backward_step(_func)?|backward(-wgrad)?-compute|Backward \d+|\d+[BIW]\d+|B_\w+|## backward ##|backward)$",
    ),
    ("optimizer", r"^(Optimizer\.step#.*|optimizer([-_]step)?|## optimizer ##)$"),
)
"""(phase, pattern of its annotation)."""
AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")
_PATTERNS = tuple((phase, re.compile(pattern)) for phase, pattern in ANNOTATIONS)
_NEVER = np.iinfo(np.int64).min
NS = 1e-9


@dataclass(frozen=True)
class StepPhases:
    """The phase of each GPU event of a rank, and the range of it that launched the event."""

    trace: RankTrace
    source: str
    masks: dict[str, NDArray[np.bool_]]
    ranges: dict[str, NDArray[np.int64]]

    @classmethod
    def of(cls, trace: RankTrace, launch: NDArray[np.int64]) -> StepPhases | None:
        """Sort a rank's GPU events into phases, or None where nothing tells them apart."""
        at_ns = _launched(trace, launch)
        marks = {phase: _outermost(trace.marks, trace, pattern) for phase, pattern in _PATTERNS}
        ranges = {phase: _range_of(events, at_ns) for phase, events in marks.items()}
        if (ranges["forward"] >= 0).any() and (ranges["backward"] >= 0).any():
            source, forward = "annotations", ranges["forward"] >= 0
        else:
            marks["backward"] = _outermost(trace.operators, trace, AUTOGRAD)
            ranges["backward"] = _range_of(marks["backward"], at_ns)
            if not (ranges["backward"] >= 0).any():
                return None
            source, forward = "autograd", at_ns > _NEVER
        optimizer = ranges["optimizer"] >= 0
        backward = (ranges["backward"] >= 0) & ~optimizer
        masks = {"forward": forward & ~backward & ~optimizer, "backward": backward, "optimizer": optimizer}
        return cls(trace, source, masks, ranges)

    def part(self, trace: RankTrace, chosen: slice) -> StepPhases:
        """The phases of a slice of the events, which `trace` holds."""
        masks = {phase: mask[chosen] for phase, mask in self.masks.items()}
        ranges = {phase: of[chosen] for phase, of in self.ranges.items()}
        return StepPhases(trace, self.source, masks, ranges)

    def times(self, computing: NDArray[np.bool_], step: StepWindow) -> tuple[PhaseTime, ...]:
        """Computing time by phase in one step."""
        inside, times, gpu = window(step.start_ns, step.end_ns), [], self.trace.gpu
        for phase, mask in self.masks.items():
            mine = mask & computing
            spans = intersect(union(gpu.start_ns[mine], gpu.end_ns[mine]), inside)
            if length_ns(spans):
                said = self.source != "autograd" or phase == "optimizer"
                lengths = self._lengths_ns(_by_range(mine, self.ranges[phase]) if said else [])
                times.append(
                    PhaseTime(
                        phase=phase,
                        seconds=length_ns(spans) * NS,
                        num_ranges=len(lengths),
                        median_s=float(np.median(lengths)) * NS if lengths else None,
                        source=self.source if phase != "optimizer" else "annotations",
                    )
                )
        return tuple(times)

    def _lengths_ns(self, parts: Sequence[NDArray[np.int64]]) -> list[int]:
        """Computing time of each range."""
        gpu = self.trace.gpu
        return [length_ns(union(gpu.start_ns[part], gpu.end_ns[part])) for part in parts]


def _by_range(mine: NDArray[np.bool_], range_of: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The events of each range, by start."""
    chosen = np.flatnonzero(mine)
    chosen = chosen[np.argsort(range_of[chosen], kind="stable")]
    return np.split(chosen, np.flatnonzero(np.diff(range_of[chosen])) + 1)


def _launched(trace: RankTrace, launch: NDArray[np.int64]) -> Times:
    """When each GPU event was launched; on a host, when it began."""
    if trace.on_host:
        return trace.gpu.start_ns
    if not len(trace.launches):
        return np.full(len(trace.gpu), _NEVER, np.int64)
    return np.where(launch >= 0, trace.launches.start_ns[launch], _NEVER)


def _outermost(events: Events, trace: RankTrace, pattern: re.Pattern[str]) -> Events:
    """The events of a name, without those that begin inside an earlier one."""
    names = [index for index, name in enumerate(trace.names) if pattern.match(name)]
    chosen = events.where(np.isin(events.name, names))
    if not len(chosen):
        return chosen
    reach = np.maximum.accumulate(chosen.end_ns)
    return chosen.where(np.concatenate([[True], chosen.start_ns[1:] >= reach[:-1]]))


def _range_of(ranges: Events, at_ns: Times) -> NDArray[np.int64]:
    """The index of the range that each time is inside of, or −1."""
    if not len(ranges):
        return np.full(len(at_ns), -1, np.int64)
    index = np.searchsorted(ranges.start_ns, at_ns, side="right") - 1
    return np.where((index >= 0) & (at_ns < ranges.end_ns[index]), index, -1)
