"""Lower bounds on the makespan of a pipeline, for every order; they say how far an order can be from the best.

Notation, for rank r with first stage s and last stage e (the same one where a rank holds one stage), in seconds:
f, b = i + w and c are a stage's forward, its backward and the transfer behind it. Where the backward is split, a
gradient needs only b = i on its way, and weight gradients may follow at any time.

work_r  Σ over the rank's stages and micro-batches of f + i + w
head_r  Σ_{q<s} (f_q + c_q), until the first micro-batch reaches the rank
tail_r  Σ_{q<s} (b_q + c_q), from its last gradient to the front
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedule.actions import B, F, I, W
from planner.schedule.replay import Durations, stage_tables
from planner.schedule.timeline import FloatArray


def any_order_bounds_s(
    durations: Durations, stage_to_rank: Sequence[int], num_microbatches: int, *, splits_backward: bool = False
) -> FloatArray:
    """The least makespan in seconds that each rank's work and the trips to it and from it allow, in any order.

    Full backward: head_r + work_r + tail_r, since the last action of a rank is a backward on its first stage.
    Split backward: head_r + the larger of work_r and Σ(f + i) + tail_r, where tail_r ends with the last weight gradient
    on the way.
    """
    num_ranks = max(stage_to_rank) + 1
    unlimited = [num_microbatches * len(stage_to_rank)] * num_ranks
    return in_flight_bounds_s(durations, stage_to_rank, num_microbatches, unlimited, splits_backward=splits_backward)


def in_flight_bounds_s(
    durations: Durations,
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    max_in_flight_chunks: Sequence[int],
    *,
    splits_backward: bool = False,
) -> FloatArray:
    """The least makespan in seconds, per rank, of any order with at most k = max_in_flight_chunks activations on it.

    The larger of two bounds counts.
    Waits: until its first backward a rank can only run k forwards, and after its last forward only k backwards. The
    rest of a micro-batch's trip through the stages below is idle time. With one stage per rank and D the trip below it,
    these two waits are [D − (k − 1)·f]⁺ and, with a full backward, [D − (k − 1)·b]⁺. Both count when more than k chunks
    pass, else the larger one.
    Slots: an activation is held for its whole trip, so that k slots serve M micro-batches in no less than
    head + ⌈M/k⌉ trips (+ tail).
    Transfers within a rank take no time. Blocking transfers are bounded like all others.
    """
    trips = _Trips.through(durations, stage_to_rank, num_microbatches, splits_backward)
    return np.array([trips.bound_s(rank, k) for rank, k in enumerate(max_in_flight_chunks)])


def trip_bounds_s(
    stages_s: tuple[FloatArray, FloatArray, FloatArray],
    hop_s: FloatArray,
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    max_in_flight_chunks: Sequence[int],
    *,
    splits_backward: bool = False,
) -> FloatArray:
    """`in_flight_bounds_s` of many pipelines at once: rows are ranks, columns the pipelines.

    `stages_s` has f, b and what may follow at any time (0, or w where the backward is split) of each pipeline (rows)
    and virtual stage (columns), `hop_s` the seconds of each boundary between two stages.
    """
    forward_s, backward_s, weight_s = stages_s
    trips = _Trips(
        stage_to_rank=stage_to_rank,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        hop_s=hop_s,
        num_microbatches=num_microbatches,
        size_least=1.0,
        size_most=1.0,
        size_total=float(num_microbatches),
        hidden_fraction=0.0,
        splits_backward=splits_backward,
    )
    return np.array([trips.bound_s(rank, k) for rank, k in enumerate(max_in_flight_chunks)])


@dataclass(frozen=True, slots=True)
class _Trips:
    stage_to_rank: Sequence[int]
    forward_s: FloatArray
    backward_s: FloatArray
    """Seconds that each stage adds to a gradient's way: b, or i where the backward is split."""
    weight_s: FloatArray
    """Seconds of each stage that may follow at any time: 0, or w where the backward is split."""
    hop_s: FloatArray
    num_microbatches: int
    size_least: float
    """The smallest relative size of a micro-batch."""
    size_most: float
    size_total: float
    hidden_fraction: float
    splits_backward: bool

    @classmethod
    def through(
        cls, durations: Durations, stage_to_rank: Sequence[int], num_microbatches: int, splits_backward: bool
    ) -> _Trips:
        table, boundaries_s = stage_tables(durations, stage_to_rank)
        given = durations.microbatch_sizes
        # a list of ones would take gigabytes where a batch has billions of sequences
        sizes = np.ones(1) if given is None else np.asarray(given, dtype=np.float64)
        return cls(
            stage_to_rank=stage_to_rank,
            forward_s=table[F],
            backward_s=table[I] if splits_backward else table[B],
            weight_s=table[W] if splits_backward else np.zeros(len(stage_to_rank)),
            hop_s=boundaries_s[0][:-1],
            num_microbatches=num_microbatches if given is None else len(sizes),
            size_least=float(sizes.min()),
            size_most=float(sizes.max()),
            size_total=float(num_microbatches) if given is None else float(sizes.sum()),
            hidden_fraction=durations.pair_overlap_fraction,
            splits_backward=splits_backward,
        )

    def bound_s(self, rank: int, k: int) -> FloatArray:
        stages = [stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank]
        first, last = stages[0], stages[-1]
        least, most, total = self.size_least, self.size_most, self.size_total
        hops_s = self.hop_s[..., :first].sum(axis=-1)
        head_s = least * (self.forward_s[..., :first].sum(axis=-1) + hops_s)
        tail_s = least * (self.backward_s[..., :first].sum(axis=-1) + hops_s)
        before_s = least * self._below_s(first, last) - most * k * self.forward_s[..., stages].max(axis=-1)
        after_s = least * self._above_s(first, last) - most * k * self.backward_s[..., stages].max(axis=-1)
        before_s, after_s = np.maximum(before_s, 0.0), np.maximum(after_s, 0.0)
        chain_s = total * self._unhidden_s(stages)
        if self.splits_backward:
            weights_s = total * self.weight_s[..., stages].sum(axis=-1)
            rest_s = np.maximum(weights_s, least * self._last_weight_gradient_s(first))
            return np.asarray(
                np.maximum(head_s + before_s + chain_s + rest_s, head_s + least * self._slots_s(stages, k))
            )
        both_count = self.num_microbatches * len(stages) > k
        waits_s = before_s + after_s if both_count else np.maximum(before_s, after_s)
        return np.asarray(head_s + np.maximum(waits_s + chain_s, least * self._slots_s(stages, k)) + tail_s)

    def _unhidden_s(self, stages: list[int]) -> FloatArray:
        """Seconds of forward and backward of one micro-batch on the rank, less the most that overlapped pairs hide."""
        forward_s = self.forward_s[..., stages].sum(axis=-1)
        backward_s = self.backward_s[..., stages].sum(axis=-1)
        full_backward_s = backward_s + self.weight_s[..., stages].sum(axis=-1)
        return np.asarray(forward_s + backward_s - self.hidden_fraction * np.minimum(forward_s, full_backward_s))

    def _below_s(self, first: int, last: int) -> FloatArray:
        """Seconds from the start of a forward on stage `first` to the start of its backward on stage `last`."""
        down_s = self.forward_s[..., first:].sum(axis=-1) + self.hop_s[..., first:].sum(axis=-1)
        back_s = self.backward_s[..., last + 1 :].sum(axis=-1) + self.hop_s[..., last:].sum(axis=-1)
        return np.asarray(down_s + back_s)

    def _above_s(self, first: int, last: int) -> FloatArray:
        """Seconds from the end of a forward on stage `last` to the end of its backward on stage `first`."""
        down_s = self.forward_s[..., last + 1 :].sum(axis=-1) + self.hop_s[..., last:].sum(axis=-1)
        back_s = self.backward_s[..., first:].sum(axis=-1) + self.hop_s[..., first:].sum(axis=-1)
        return np.asarray(down_s + back_s)

    def _slots_s(self, stages: list[int], k: int) -> FloatArray:
        """The least seconds that k slots need to hold all activations of the rank, one after the other."""
        lives_s = [
            self._below_s(stage, stage) + self.backward_s[..., stage] + self.weight_s[..., stage] for stage in stages
        ]
        if len(stages) == 1:
            return np.asarray(math.ceil(self.num_microbatches / k) * lives_s[0])
        return np.asarray(self.num_microbatches * np.sum(lives_s, axis=0) / k)

    def _last_weight_gradient_s(self, first: int) -> FloatArray:
        """Seconds of the longest way from the last input gradient of stage `first` to the end of a weight gradient.

        The weight gradient may be of `first` or of a stage before it.
        """
        longest_s, trip_s = self.weight_s[..., first], np.zeros(self.weight_s.shape[:-1])
        for stage in range(first - 1, -1, -1):
            trip_s = trip_s + self.hop_s[..., stage] + self.backward_s[..., stage]
            longest_s = np.maximum(longest_s, trip_s + self.weight_s[..., stage])
        return np.asarray(longest_s)
