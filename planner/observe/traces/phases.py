"""Forward, backward and optimizer of a step: the computing time of what each launched.

Told by annotations where a trainer leaves them (Megatron's `forward_step`, torch's pipelining `Forward 3`, and NVTX
ranges of these names), else by autograd: what its engine launches is backward, `Optimizer.step#…` the optimizer, and
the rest forward. Layers that are recomputed count as backward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.intervals import (
    NONE,
    Spans,
    Times,
    intersect,
    length_ns,
    merge,
    subtract,
    union,
    window,
)
from planner.observe.traces.results import PhaseTime
from planner.observe.traces.steps import StepWindow
from planner.observe.traces.trace import Events, RankTrace

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
ALIKE = 0.05
"""Ranges whose computing differs by less are alike."""
MOST_LENGTHS = 1024
_PATTERNS = tuple((phase, re.compile(pattern)) for phase, pattern in ANNOTATIONS)
_NEVER = np.iinfo(np.int64).min
NS = 1e-9


@dataclass(frozen=True)
class Phases:
    """The phase of each GPU event of a rank, and the range of it that launched the event."""

    trace: RankTrace
    source: str
    masks: dict[str, NDArray[np.bool_]]
    ranges: dict[str, NDArray[np.int64]]
    marks: dict[str, Events]
    """The ranges themselves, on the host."""

    @classmethod
    def of(cls, trace: RankTrace, launch: NDArray[np.int64]) -> Phases | None:
        """Sort a rank's GPU events into phases, or None where nothing tells them apart."""
        at_ns = _launched(trace, launch)
        marks = {phase: _outermost(trace.marks, trace, pattern) for phase, pattern in _PATTERNS}
        ranges = {phase: _range_of(events, at_ns) for phase, events in marks.items()}
        if (ranges["forward"] >= 0).any() and (ranges["backward"] >= 0).any():
            source, forward = "operators" if trace.is_timeline else "annotations", ranges["forward"] >= 0
        else:
            marks["backward"] = _outermost(trace.operators, trace, AUTOGRAD)
            ranges["backward"] = _range_of(marks["backward"], at_ns)
            if not (ranges["backward"] >= 0).any():
                return None
            source, forward = "autograd", at_ns > _NEVER
        optimizer = ranges["optimizer"] >= 0
        backward = (ranges["backward"] >= 0) & ~optimizer
        masks = {"forward": forward & ~backward & ~optimizer, "backward": backward, "optimizer": optimizer}
        return cls(trace, source, masks, ranges, marks)

    def part(self, trace: RankTrace, chosen: slice) -> Phases:
        """The phases of a slice of the events, which `trace` holds."""
        masks = {phase: mask[chosen] for phase, mask in self.masks.items()}
        ranges = {phase: of[chosen] for phase, of in self.ranges.items()}
        return Phases(trace, self.source, masks, ranges, self.marks)

    def times(self, computing: NDArray[np.bool_], exchanging: Spans, step: StepWindow) -> tuple[PhaseTime, ...]:
        """Computing time by phase in one step; `exchanging` is when the rank communicates."""
        inside, times, gpu = window(step.start_ns, step.end_ns), [], self.trace.gpu
        for phase, mask in self.masks.items():
            mine, others = mask & computing, ~mask & computing
            spans = intersect(union(gpu.start_ns[mine], gpu.end_ns[mine]), inside)
            if length_ns(spans):
                said = self.source != "autograd" or phase == "optimizer"
                parts = _by_range(mine, self.ranges[phase]) if said else []
                lengths = self._lengths_ns(parts)
                taken = subtract(merge(exchanging, union(gpu.start_ns[others], gpu.end_ns[others])), spans)
                ranges = intersect(self._spans(parts, phase), inside) if parts else NONE
                times.append(
                    PhaseTime(
                        phase=phase,
                        seconds=length_ns(spans) * NS,
                        num_ranges=len(lengths),
                        median_s=float(np.median(lengths)) * NS if lengths else None,
                        each_s=_uneven(lengths),
                        own_s=length_ns(subtract(ranges, taken)) * NS if parts else None,
                        source=self.source if phase != "optimizer" else "annotations",
                    )
                )
        return tuple(times)

    def _spans(self, parts: Sequence[NDArray[np.int64]], phase: str) -> Spans:
        """The ranges of a phase: on a host as they are marked, on a GPU from the first kernel of each to its last."""
        if self.trace.on_host and len(marks := self.marks[phase]):
            chosen = [self.ranges[phase][part[0]] for part in parts]
            return union(marks.start_ns[chosen], marks.end_ns[chosen])
        gpu = self.trace.gpu
        return union(gpu.start_ns[[part[0] for part in parts]], np.array([gpu.end_ns[part].max() for part in parts]))

    def _lengths_ns(self, parts: Sequence[NDArray[np.int64]]) -> list[int]:
        """Computing time of each range."""
        gpu = self.trace.gpu
        return [length_ns(union(gpu.start_ns[part], gpu.end_ns[part])) for part in parts]


def _uneven(lengths_ns: Sequence[int]) -> tuple[float, ...]:
    """The lengths in seconds; empty where they are alike, or too many to be kept."""
    if not 1 < len(lengths_ns) <= MOST_LENGTHS or max(lengths_ns) - min(lengths_ns) <= ALIKE * max(lengths_ns):
        return ()
    return tuple(length * NS for length in lengths_ns)


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
