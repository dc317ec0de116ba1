"""A replayed schedule: start and end of each action, idle time by cause, activations in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedule.actions import Schedule
from planner.schedule.graph import B, F, Graph, IntArray, W

FloatArray = NDArray[np.float64]

IDLE_CAUSES = ("fill", "activation", "gradient", "imbalance", "transfer", "drain")
"""Why a rank idles: before its first action; waiting for an activation or a gradient that would also have kept it
waiting were all stages equally long; the rest of such waits, which unequal stages cause; the transfers themselves;
after its last action until the last rank is done."""


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """One pass over a graph, arrays of shape (n,) along its actions."""

    start_s: FloatArray
    end_s: FloatArray
    gap_s: FloatArray
    """Idle time of the rank right before the action."""
    hop_s: FloatArray
    """Transfer of what the action consumes."""
    arrival_s: FloatArray
    """When that transfer is done; 0 for none."""
    transfer_s: FloatArray
    """The part of it in which the transfer is under way."""
    compute_s: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When each rank did what. Per-rank tuples hold one array along `schedule.ranks[rank]`."""

    schedule: Schedule
    start_s: tuple[FloatArray, ...]
    end_s: tuple[FloatArray, ...]
    hop_s: tuple[FloatArray, ...]
    """Transfer of what each action consumes; 0 where it needs none or the result is on the rank already."""
    arrival_s: tuple[FloatArray, ...]
    """When what each action consumes is there; 0 for the first stage's forwards and for weight gradients."""
    makespan_s: float
    """From time 0 to the end of the last action of any rank."""
    busy_s: FloatArray
    """Seconds of computation per rank."""
    idle_s: Mapping[str, FloatArray]
    """Idle seconds per rank for each of IDLE_CAUSES; with busy_s they add up to makespan_s."""
    peak_in_flight_chunks: IntArray
    """Most (virtual stage, micro-batch) activations held at once, per rank."""
    activation_times_s: tuple[FloatArray, ...]
    """Per rank: when the activations held change (at the start of a forward, the end of a weight gradient)."""
    activation_held_bytes: tuple[FloatArray, ...]
    """Per rank: bytes held from that time on; counted in activations where no bytes were given."""

    @property
    def peak_in_flight_microbatches(self) -> FloatArray:
        """Most activations held per rank, in units of what a pp-th of the model saves for one micro-batch."""
        return self.peak_in_flight_chunks / self.schedule.vpp

    @property
    def peak_activation_bytes(self) -> FloatArray:
        """Most activation bytes held at once, per rank."""
        return np.array([held.max(initial=0.0) for held in self.activation_held_bytes])

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step, over all ranks: 1 − Σ busy_s / (pp · makespan_s)."""
        return 1 - float(self.busy_s.mean()) / self.makespan_s if self.makespan_s else 0.0

    @property
    def bubble_of_useful_fraction(self) -> float:
        """Idle time over useful time, (pp · makespan_s − Σ busy_s) / Σ busy_s: the ratio that papers print."""
        busy_s = float(self.busy_s.mean())
        return self.makespan_s / busy_s - 1 if busy_s else 0.0

    @property
    def span_s(self) -> FloatArray:
        """From the first start to the last end, per rank; a run without flushes repeats after the longest of them."""
        return np.array([end[-1] - start[0] for start, end in zip(self.start_s, self.end_s, strict=True)])


def build_timeline(
    schedule: Schedule, graph: Graph, timing: Timing, even: Timing, saved_bytes: FloatArray | None
) -> Timeline:
    """Lay a pass over the graph out by rank; `even` is the same pass with all stages equally long."""
    order = [positions - 1 for positions in graph.position]
    makespan_s = float(timing.end_s.max(initial=0.0))
    unit = np.ones(len(graph.kind)) if saved_bytes is None else saved_bytes
    curves = [_activation_curve(graph, timing, index, unit, schedule.forward_only) for index in order]
    return Timeline(
        schedule=schedule,
        start_s=tuple(timing.start_s[index] for index in order),
        end_s=tuple(timing.end_s[index] for index in order),
        hop_s=tuple(timing.hop_s[index] for index in order),
        arrival_s=tuple(timing.arrival_s[index] for index in order),
        makespan_s=makespan_s,
        busy_s=_per_rank(schedule, graph.rank, timing.compute_s),
        idle_s=_idle_by_cause(schedule, graph, timing, even, makespan_s),
        peak_in_flight_chunks=np.array([_peak_chunks(graph.kind[index], schedule.forward_only) for index in order]),
        activation_times_s=tuple(times for times, _ in curves),
        activation_held_bytes=tuple(held for _, held in curves),
    )


def _per_rank(schedule: Schedule, rank: IntArray, seconds: FloatArray) -> FloatArray:
    total_s = np.zeros(schedule.pp)
    np.add.at(total_s, rank, seconds)
    return total_s


def _idle_by_cause(
    schedule: Schedule, graph: Graph, timing: Timing, even: Timing, makespan_s: float
) -> dict[str, FloatArray]:
    def per_rank(seconds: FloatArray, where: NDArray[np.bool_]) -> FloatArray:
        return _per_rank(schedule, graph.rank[where], seconds[where])

    first = graph.previous == 0
    wait_s = np.maximum(0.0, timing.gap_s - timing.transfer_s)
    even_wait_s = np.maximum(0.0, even.gap_s - even.transfer_s)
    expected_s = np.minimum(wait_s, even_wait_s)
    forward = graph.kind == F
    last_end_s = np.zeros(schedule.pp)
    np.maximum.at(last_end_s, graph.rank, timing.end_s)
    return {
        "fill": per_rank(timing.gap_s, first),
        "activation": per_rank(expected_s, ~first & forward),
        "gradient": per_rank(expected_s, ~first & ~forward),
        "imbalance": per_rank(wait_s - expected_s, ~first),
        "transfer": per_rank(timing.transfer_s, ~first),
        "drain": makespan_s - last_end_s,
    }


def _changes(kind: IntArray, forward_only: bool) -> IntArray:
    """+1 where an activation appears, −1 where it goes (forward-only runs keep nothing)."""
    appears = (kind == F) & (not forward_only)
    goes = (kind == B) | (kind == W)
    changes: IntArray = appears.astype(np.int32) - goes.astype(np.int32)
    return changes


def _peak_chunks(kind: IntArray, forward_only: bool) -> int:
    if forward_only:
        return min(1, len(kind))
    return int(np.cumsum(_changes(kind, forward_only)).max(initial=0))


def _activation_curve(
    graph: Graph, timing: Timing, index: IntArray, unit: FloatArray, forward_only: bool
) -> tuple[FloatArray, FloatArray]:
    """Held bytes over time; a backward that ends as a forward starts frees before the forward allocates."""
    change = _changes(graph.kind[index], forward_only)
    index, change = index[change != 0], change[change != 0]
    times_s = np.where(change > 0, timing.start_s[index], timing.end_s[index])
    in_time = np.lexsort((change, times_s))
    return times_s[in_time], np.cumsum((change * unit[index])[in_time])
