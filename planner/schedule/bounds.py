"""Lower bounds on the makespan of a pipeline, whatever its order; they price the distance of an order from the best.

Notation, for rank r with first stage s and last stage e (the same one where a rank holds one stage), in seconds:
f, b = i + w and c are a stage's forward, its backward and the transfer behind it. Where the backward is split, the
gradient travels at b = i and weight gradients follow when they like.

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
    """Per rank, the least makespan that its work and the trips to it and from it allow, in any order.

    Full backward: head_r + work_r + tail_r, since the last action of a rank is a backward on its first stage.
    Split backward: head_r + the larger of work_r and Σ(f + i) + tail_r with the last weight gradient on the way.
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
    """Per rank, the least makespan of any order that holds at most k = max_in_flight_chunks activations on the rank.

    Waits: until its first backward a rank can only run k forwards, and after its last forward only k backwards; what
    is left of a micro-batch's trip through the stages below is idle time. With one stage per rank and D the trip below
    it, these are [D − (k − 1)·f]⁺ and, with a full backward, [D − (k − 1)·b]⁺; both count when more chunks pass than k,
    else the larger. Slots: an activation is held for its whole trip, so that k slots serve M micro-batches in no less
    than head + ⌈M/k⌉ trips (+ tail). Transfers within a rank are free; blocking ones are bounded as others are.
    """
    trips = _Trips.through(durations, stage_to_rank, num_microbatches, splits_backward)
    return np.array([trips.bound_s(rank, k) for rank, k in enumerate(max_in_flight_chunks)])


@dataclass(frozen=True, slots=True)
class _Trips:
    stage_to_rank: Sequence[int]
    forward_s: FloatArray
    backward_s: FloatArray
    """What a stage adds to a gradient's way: b, or i where the backward is split."""
    weight_s: FloatArray
    """What follows when it likes: 0, or w where the backward is split."""
    hop_s: FloatArray
    sizes: FloatArray
    """Relative sizes of the micro-batches."""
    hidden_fraction: float
    splits_backward: bool

    @classmethod
    def through(
        cls, durations: Durations, stage_to_rank: Sequence[int], num_microbatches: int, splits_backward: bool
    ) -> _Trips:
        table, boundaries_s = stage_tables(durations, stage_to_rank)
        sizes = durations.microbatch_sizes
        return cls(
            stage_to_rank=stage_to_rank,
            forward_s=table[F],
            backward_s=table[I] if splits_backward else table[B],
            weight_s=table[W] if splits_backward else np.zeros(len(stage_to_rank)),
            hop_s=boundaries_s[0][:-1],
            sizes=np.ones(num_microbatches) if sizes is None else np.asarray(sizes, dtype=np.float64),
            hidden_fraction=durations.pair_overlap_fraction,
            splits_backward=splits_backward,
        )

    def bound_s(self, rank: int, k: int) -> float:
        held = [stage for stage, where in enumerate(self.stage_to_rank) if where == rank]
        first, last = held[0], held[-1]
        least, most, total = float(self.sizes.min()), float(self.sizes.max()), float(self.sizes.sum())
        head_s = least * float(self.forward_s[:first].sum() + self.hop_s[:first].sum())
        tail_s = least * float(self.backward_s[:first].sum() + self.hop_s[:first].sum())
        before_s = least * self._below_s(first, last) - most * k * float(self.forward_s[held].max())
        after_s = least * self._above_s(first, last) - most * k * float(self.backward_s[held].max())
        chain_s = total * self._unhidden_s(held)
        if self.splits_backward:
            rest_s = max(total * float(self.weight_s[held].sum()), least * self._last_weight_gradient_s(first))
            waits_s = head_s + max(0.0, before_s) + chain_s + rest_s
            return max(waits_s, head_s + least * self._slots_s(held, k))
        both = len(self.sizes) * len(held) > k
        waits_s = max(0.0, before_s) + max(0.0, after_s) if both else max(0.0, before_s, after_s)
        return head_s + max(waits_s + chain_s, least * self._slots_s(held, k)) + tail_s

    def _unhidden_s(self, held: list[int]) -> float:
        """Forward and backward of one micro-batch on the rank, less what overlapped pairs may hide."""
        forward_s, backward_s = float(self.forward_s[held].sum()), float(self.backward_s[held].sum())
        whole_backward_s = backward_s + float(self.weight_s[held].sum())
        return forward_s + backward_s - self.hidden_fraction * min(forward_s, whole_backward_s)

    def _below_s(self, first: int, last: int) -> float:
        """From the start of a forward on the first stage to the start of its backward on the last."""
        down_s = float(self.forward_s[first:].sum() + self.hop_s[first:].sum())
        return down_s + float(self.backward_s[last + 1 :].sum() + self.hop_s[last:].sum())

    def _above_s(self, first: int, last: int) -> float:
        """From the end of a forward on the last stage to the end of its backward on the first."""
        down_s = float(self.forward_s[last + 1 :].sum() + self.hop_s[last:].sum())
        return down_s + float(self.backward_s[first:].sum() + self.hop_s[first:].sum())

    def _slots_s(self, held: list[int], k: int) -> float:
        """Time in which k slots see all activations of the rank through."""
        lives_s = [self._below_s(stage, stage) + float(self.backward_s[stage] + self.weight_s[stage]) for stage in held]
        num_microbatches = len(self.sizes)
        if len(held) == 1:
            return math.ceil(num_microbatches / k) * lives_s[0]
        return num_microbatches * sum(lives_s) / k

    def _last_weight_gradient_s(self, first: int) -> float:
        """Longest way from the last input gradient of stage `first` over the stages before it to a weight gradient."""
        longest_s, trip_s = float(self.weight_s[first]), 0.0
        for stage in range(first - 1, -1, -1):
            trip_s += float(self.hop_s[stage] + self.backward_s[stage])
            longest_s = max(longest_s, trip_s + float(self.weight_s[stage]))
        return longest_s
