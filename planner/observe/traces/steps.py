"""Steps in a trace: from a step's first GPU operation to the next step's first one."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.kineto import launch_of
from planner.observe.traces.trace import RankTrace

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
    windows = list(zip(numbers, bounds[:-1], ends if trace.is_timeline else bounds[1:], strict=True))
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
