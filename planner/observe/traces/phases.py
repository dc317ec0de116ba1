"""Forward, backward and optimizer of a step: the computing time of what each launched.

Told by annotations where a trainer leaves them (Megatron's `forward_step`, torch's pipelining `Forward 3`, and NVTX
ranges of these names), else by autograd: what its engine launches is backward, `Optimizer.step#…` the optimizer, and
the rest forward. Layers that are recomputed count as backward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.intervals import Times, intersect, length_ns, union, window
from planner.observe.traces.results import PhaseTime
from planner.observe.traces.steps import StepWindow
from planner.observe.traces.trace import Events, RankTrace

ANNOTATIONS = (
    ("forward", r"^(forward_step(_func)?|forward-compute|Forward \d+|\d+F\d+|F_\w+|## forward ##|forward)$"),
    ("backward", r"^(backward_step(_func)?|backward-compute|Backward \d+|\d+[BIW]\d+|B_\w+|## backward ##|backward)$"),
    ("optimizer", r"^(Optimizer\.step#.*|optimizer([-_]step)?|## optimizer ##)$"),
)
"""(phase, pattern of its annotation)."""
AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")
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

    @classmethod
    def of(cls, trace: RankTrace, launch: NDArray[np.int64]) -> Phases | None:
        """Sort a rank's GPU events into phases, or None where nothing tells them apart."""
        at_ns = _launched(trace, launch)
        ranges = {phase: _range_of(_outermost(trace.marks, trace, pattern), at_ns) for phase, pattern in _PATTERNS}
        if (ranges["forward"] >= 0).any() and (ranges["backward"] >= 0).any():
            source, forward = "annotations", ranges["forward"] >= 0
        else:
            ranges["backward"] = _range_of(_outermost(trace.operators, trace, AUTOGRAD), at_ns)
            if not (ranges["backward"] >= 0).any():
                return None
            source, forward = "autograd", at_ns > _NEVER
        optimizer = ranges["optimizer"] >= 0
        backward = (ranges["backward"] >= 0) & ~optimizer
        masks = {"forward": forward & ~backward & ~optimizer, "backward": backward, "optimizer": optimizer}
        return cls(trace, source, masks, ranges)

    def part(self, trace: RankTrace, chosen: slice) -> Phases:
        """The phases of a slice of the events, which `trace` holds."""
        masks = {phase: mask[chosen] for phase, mask in self.masks.items()}
        return Phases(trace, self.source, masks, {phase: of[chosen] for phase, of in self.ranges.items()})

    def times(self, computing: NDArray[np.bool_], step: StepWindow) -> tuple[PhaseTime, ...]:
        """Computing time by phase in one step."""
        inside, times = window(step.start_ns, step.end_ns), []
        for phase, mask in self.masks.items():
            mine = mask & computing
            spans = intersect(union(self.trace.gpu.start_ns[mine], self.trace.gpu.end_ns[mine]), inside)
            if length_ns(spans):
                said = self.source == "annotations" or phase == "optimizer"
                lengths = self._lengths_ns(mine, self.ranges[phase]) if said else []
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

    def _lengths_ns(self, mine: NDArray[np.bool_], range_of: NDArray[np.int64]) -> list[int]:
        """Computing time of each range."""
        chosen = np.flatnonzero(mine)
        chosen = chosen[np.argsort(range_of[chosen], kind="stable")]
        cuts = np.flatnonzero(np.diff(range_of[chosen])) + 1
        gpu = self.trace.gpu
        return [length_ns(union(gpu.start_ns[part], gpu.end_ns[part])) for part in np.split(chosen, cuts)]


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
