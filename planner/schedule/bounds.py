"""Lower bounds on the makespan of a pipeline, whatever its order; they price the distance of an order from the best.

Notation, for rank r with first stage s and last stage e (the same one where a rank holds one stage), in seconds:
work_r = Σ over its stages and micro-batches of f + i + w; head_r = Σ_{q<s} (f_q + c) until the first micro-batch
reaches it; tail_r = Σ_{q<s} (b_q + c) from its last gradient to the front, with b = i + w, or b = i where the backward
is split. D is the trip below the rank: from the end of a forward on e through the stages behind it and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.schedule.graph import B, F, I, W
from planner.schedule.replay import Durations, stage_tables
from planner.schedule.timeline import FloatArray


def any_order_bounds_s(
    durations: Durations, stage_to_rank: Sequence[int], num_microbatches: int, *, splits_backward: bool = False
) -> FloatArray:
    """Per rank, the least makespan that its work and the trips to it and from it allow, in any order.

    Full backward: head_r + work_r + tail_r, since the last action of a rank is a backward on its first stage.
    Split backward: weight gradients may follow the last input gradient, so that only the larger of
    head_r + work_r and head_r + Σ(f + i) + tail_r + (what the last weight gradient of the stages before adds) holds.
    """
    unlimited = [num_microbatches * len(stage_to_rank)] * (max(stage_to_rank) + 1)
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

    Until its first backward a rank can only run k forwards, and after its last forward only k backwards; the rest of
    the trip below it is idle time: [Σf + D − k·max f]⁺ and, with a full backward, [D + Σb − k·max b]⁺, where the sums
    run over the stages from s on. Both count when more chunks pass than k, else the larger. With one stage per rank
    these are [D − (k − 1)·f]⁺ and [D − (k − 1)·b]⁺. Transfers within a rank are free; blocking ones bound as others do.
    """
    num_stages = len(stage_to_rank)
    table, boundaries_s = stage_tables(durations, stage_to_rank)
    sizes = np.ones(num_microbatches) if durations.microbatch_sizes is None else np.asarray(durations.microbatch_sizes)
    hop_s = boundaries_s[0][:-1]
    backward_s = table[I] if splits_backward else table[B]
    bounds_s = []
    for rank, k in enumerate(max_in_flight_chunks):
        held = [stage for stage in range(num_stages) if stage_to_rank[stage] == rank]
        first, last = held[0], held[-1]
        head_s = sizes.min() * float(table[F][:first].sum() + hop_s[:first].sum())
        tail_s = sizes.min() * float(backward_s[:first].sum() + hop_s[:first].sum())
        until_back_s = float(
            table[F][first:].sum() + hop_s[first:].sum() + backward_s[last + 1 :].sum() + hop_s[last:].sum()
        )
        after_out_s = float(
            table[F][last + 1 :].sum() + hop_s[last:].sum() + backward_s[first:].sum() + hop_s[first:].sum()
        )
        before_s = max(0.0, sizes.min() * until_back_s - sizes.max() * k * float(table[F][held].max()))
        forward_backward_s = sizes.sum() * float((table[F] + backward_s)[held].sum())
        if splits_backward:
            weight_s = sizes.sum() * float(table[W][held].sum())
            drain_s = _last_gradients_s(backward_s, table[W], hop_s, first) * sizes.min()
            bounds_s.append(head_s + before_s + forward_backward_s + max(weight_s, drain_s))
        else:
            after_s = max(0.0, sizes.min() * after_out_s - sizes.max() * k * float(backward_s[held].max()))
            waits_s = before_s + after_s if num_microbatches * len(held) > k else max(before_s, after_s)
            bounds_s.append(head_s + waits_s + forward_backward_s + tail_s)
    return np.array(bounds_s)


def _last_gradients_s(input_grad_s: FloatArray, weight_grad_s: FloatArray, hop_s: FloatArray, first: int) -> float:
    """Longest way from the last input gradient of stage `first` over the stages before it to a weight gradient."""
    longest_s, trip_s = float(weight_grad_s[first]), 0.0
    for stage in range(first - 1, -1, -1):
        trip_s += float(hop_s[stage] + input_grad_s[stage])
        longest_s = max(longest_s, trip_s + float(weight_grad_s[stage]))
    return longest_s
