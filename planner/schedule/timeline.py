"""A replayed schedule: start and end of each action, idle time by cause, activations in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.schedule.actions import B, F, IntArray, Schedule, W
from planner.schedule.graph import Graph
from planner.shape import BoolArray
from planner.shape import FloatArray as FloatArray

IDLE_CAUSES = ("fill", "activation", "gradient", "imbalance", "transfer", "drain")
"""Causes of a rank's idle time. fill: before its first action. activation, gradient: waits for an activation or a
gradient that would be there with equally long stages too. imbalance: the rest of such waits, which unequal stages
cause. transfer: the transfers themselves. drain: after its last action, until the last rank is done."""


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """Seconds of all actions of a graph, as arrays of shape (n,) along its actions."""

    start_s: FloatArray
    end_s: FloatArray
    gap_s: FloatArray
    """Idle seconds of the rank right before the action."""
    hop_s: FloatArray
    """Seconds to transfer the result that the action consumes."""
    arrival_s: FloatArray
    """Time when that transfer is done; 0 for none."""
    transfer_s: FloatArray
    """Seconds of gap_s in which a transfer is under way."""
    compute_s: FloatArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of all actions of a replayed schedule.

    Per-rank tuples hold one array along `schedule.ranks[rank]`. Most properties are computed when they are first read.
    """

    schedule: Schedule
    graph: Graph
    timing: Timing
    evened: Callable[[], Timing]
    """Gives the timing of the same schedule with every stage as long as the average one."""
    saved_bytes: FloatArray | None
    """Bytes that each action's micro-batch keeps on its stage, along the graph; None to count activations instead."""

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from time 0 to the end of the last action of any rank."""
        return float(self.timing.end_s.max(initial=0.0))

    @cached_property
    def start_s(self) -> tuple[FloatArray, ...]:
        """Time when each action starts."""
        return self._by_rank(self.timing.start_s)

    @cached_property
    def end_s(self) -> tuple[FloatArray, ...]:
        """Time when each action ends."""
        return self._by_rank(self.timing.end_s)

    @cached_property
    def hop_s(self) -> tuple[FloatArray, ...]:
        """Seconds to transfer the result that each action consumes; 0 where there is none or it is on the same rank."""
        return self._by_rank(self.timing.hop_s)

    @cached_property
    def arrival_s(self) -> tuple[FloatArray, ...]:
        """Time when each action's input has arrived; 0 for the first stage's forwards and for weight gradients."""
        return self._by_rank(self.timing.arrival_s)

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds of computation per rank."""
        return self._sums(self.timing.compute_s, np.ones(len(self.graph.kind), dtype=bool))

    @cached_property
    def transfer_s(self) -> FloatArray:
        """Seconds per rank in which it waits for a transfer that is under way."""
        return self._sums(self.timing.transfer_s, self.graph.previous != 0)

    @cached_property
    def idle_s(self) -> Mapping[str, FloatArray]:
        """Idle seconds per rank for each of IDLE_CAUSES; with busy_s they add up to makespan_s."""
        timing, even = self.timing, self.evened()
        first, forward = self.graph.previous == 0, self.graph.kind == F
        wait_s = np.maximum(0.0, timing.gap_s - timing.transfer_s)
        expected_s = np.minimum(wait_s, np.maximum(0.0, even.gap_s - even.transfer_s))
        last_end_s = np.array([end_s.max(initial=0.0) for end_s in self.end_s])
        return {
            "fill": self._sums(timing.gap_s, first),
            "activation": self._sums(expected_s, ~first & forward),
            "gradient": self._sums(expected_s, ~first & ~forward),
            "imbalance": self._sums(wait_s - expected_s, ~first),
            "transfer": self.transfer_s,
            "drain": self.makespan_s - last_end_s,
        }

    @cached_property
    def peak_in_flight_chunks(self) -> IntArray:
        """The most (virtual stage, micro-batch) activations held at once, per rank."""
        if self.schedule.forward_only:
            return np.ones(self.schedule.pp, dtype=np.int32)
        return np.array([np.cumsum(change).max(initial=0) for change in self._by_rank(self._changes)], dtype=np.int32)

    @property
    def peak_in_flight_microbatches(self) -> FloatArray:
        """The most activations held per rank, in micro-batches: all that a pp-th of the model saves of one is 1."""
        return self.peak_in_flight_chunks / self.schedule.vpp

    @cached_property
    def peak_activation_bytes(self) -> FloatArray:
        """The most activation bytes held at once, per rank; they depend on the order alone."""
        saved = self._by_rank(self._changes * self._unit)
        return np.array([np.cumsum(change).max(initial=0.0) for change in saved])

    @cached_property
    def activation_times_s(self) -> tuple[FloatArray, ...]:
        """Times, per rank, when its activations change: at the start of a forward or the end of a weight gradient."""
        return tuple(times_s for times_s, _ in self._activation_curves)

    @cached_property
    def activation_held_bytes(self) -> tuple[FloatArray, ...]:
        """Bytes held, per rank, from each of these times on; a number of activations where no bytes were given."""
        return tuple(held for _, held in self._activation_curves)

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
        """Seconds from first start to last end, per rank; a run without flushes repeats after the longest of them."""
        return np.array([end[-1] - start[0] for start, end in zip(self.start_s, self.end_s, strict=True)])

    @cached_property
    def _changes(self) -> FloatArray:
        """Change of the activations held, along the graph: +1 at a forward, −1 where one is freed.

        Runs without backwards keep nothing.
        """
        kind = self.graph.kind
        appears = (kind == F) & (not self.schedule.forward_only)
        changes: FloatArray = appears.astype(np.float64) - ((kind == B) | (kind == W))
        return changes

    @property
    def _unit(self) -> FloatArray:
        return np.ones(len(self.graph.kind)) if self.saved_bytes is None else self.saved_bytes

    @cached_property
    def _activation_curves(self) -> list[tuple[FloatArray, FloatArray]]:
        """Times and held bytes per rank.

        A backward that ends at the time when a forward starts frees its activation before the forward takes memory.
        """
        curves = []
        for positions in self.graph.position:
            change = self._changes[positions - 1]
            index = positions[change != 0] - 1
            change = self._changes[index]
            times_s = np.where(change > 0, self.timing.start_s[index], self.timing.end_s[index])
            in_time = np.lexsort((change, times_s))
            curves.append((times_s[in_time], np.cumsum((change * self._unit[index])[in_time])))
        return curves

    def _by_rank(self, values: FloatArray) -> tuple[FloatArray, ...]:
        return tuple(values[positions - 1] for positions in self.graph.position)

    def _sums(self, seconds: FloatArray, where: BoolArray) -> FloatArray:
        total_s = np.zeros(self.schedule.pp)
        np.add.at(total_s, self.graph.rank[where], seconds[where])
        return total_s
