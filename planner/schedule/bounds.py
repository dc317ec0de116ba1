"""Lower bounds on the makespan of a pipeline, for every order; they say how far an order can be from the best.

Notation, for rank r with first stage s and last stage e (the same one where a rank holds one stage), in seconds:
f, b = i + w and c are a stage's forward, its backward and the transfer behind it. Where the backward is split, a
gradient needs only b = i on its way, and weight gradients may follow at any time.

work_r  Σ over the rank's stages and micro-batches of f + i + w
head_r  Σ_{q<s} (f_q + c_q), until the first micro-batch reaches the rank
tail_r  Σ_{q<s} (b_q + c_q), from its last gradient to the front
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.schedule.actions import B, F, I, W
from planner.schedule.replay import Durations, stage_tables
from planner.shape import FloatArray, IntArray, Number


def in_flight_bounds_s(
    durations: Durations,
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    max_in_flight_chunks: Sequence[int] | None = None,
    *,
    splits_backward: bool = False,
) -> FloatArray:
    """The least makespan in seconds, per rank, of any order with at most k = max_in_flight_chunks activations on it,
    or with any number.

    Full backward: head_r + work_r + tail_r, since the last action of a rank is a backward on its first stage.
    Split backward: head_r + the larger of work_r and Σ(f + i) + tail_r, where tail_r ends with the last weight gradient
    on the way.
    Of two more bounds by k the larger one counts.
    Waits: until its first backward a rank can only run k forwards, and after its last forward only k backwards. The
    rest of a micro-batch's trip through the stages below is idle time. With one stage per rank and D the trip below it,
    these two waits are [D − (k − 1)·f]⁺ and, with a full backward, [D − (k − 1)·b]⁺. Both count when more than k chunks
    pass, else the larger one.
    Slots: an activation is held for its whole trip, so that k slots serve M micro-batches in no less than
    head + ⌈M/k⌉ trips (+ tail).
    Transfers within a rank take no time. Blocking transfers are bounded like all others.
    """
    table, boundaries_s = stage_tables(durations, stage_to_rank)
    given = durations.microbatch_sizes
    # a list of ones would take gigabytes where a batch has billions of sequences
    sizes = np.ones(1) if given is None else np.asarray(given, dtype=np.float64)
    return trip_bounds_s(
        (table[F], table[I], table[W]) if splits_backward else (table[F], table[B], np.zeros(len(stage_to_rank))),
        boundaries_s[0][:-1],
        stage_to_rank,
        num_microbatches if given is None else len(sizes),
        max_in_flight_chunks or [num_microbatches * len(stage_to_rank)] * (max(stage_to_rank) + 1),
        splits_backward=splits_backward,
        sizes=(float(sizes.min()), float(sizes.max()), num_microbatches if given is None else float(sizes.sum())),
        hidden_fraction=durations.pair_overlap_fraction,
    )


def trip_bounds_s(
    stages_s: tuple[FloatArray, FloatArray, FloatArray],
    hop_s: FloatArray,
    stage_to_rank: Sequence[int],
    num_microbatches: int | IntArray,
    max_in_flight_chunks: Sequence[int] | FloatArray | IntArray,
    *,
    splits_backward: bool = False,
    sizes: tuple[float, float, Number] | None = None,
    hidden_fraction: float = 0.0,
) -> FloatArray:
    """`in_flight_bounds_s` of many pipelines at once: the last axis is of ranks, those before it of pipelines.

    `stages_s` has f, b (i where the backward is split) and what may follow at any time (0, or w where it is split) of
    each virtual stage (last axis), `hop_s` the seconds of each boundary between two stages. `sizes` are the least, the
    largest and the sum of the micro-batches' relative sizes; overlapped pairs hide `hidden_fraction` of a half.
    """
    forward_s, backward_s, weight_s = stages_s
    least, most, total = sizes or (1.0, 1.0, 1.0 * num_microbatches)
    pp, k = max(stage_to_rank) + 1, np.asarray(max_in_flight_chunks)
    stages = np.argsort(stage_to_rank, kind="stable").reshape(pp, -1)
    first, last = stages[:, 0], stages[:, -1]
    sent, there, back = (_sums(each) for each in (hop_s, forward_s, backward_s))
    of_rank = [each[..., stages].sum(axis=-1) for each in stages_s]

    # seconds from the start of a pass on each stage to the last stage, and from there until one on the stage may start
    rest_s = sent[..., -1:] - sent
    away_s, above_s = (each[..., -1:] - each[..., :-1] + rest_s for each in (there, back))
    home_s, below_s = (each[..., -1:] - each[..., 1:] + rest_s for each in (back, there))
    head_s, tail_s = (least * (each + sent)[..., first] for each in (there[..., :-1], back[..., :-1]))
    before_s = least * (away_s[..., first] + home_s[..., last]) - most * k * forward_s[..., stages].max(axis=-1)
    after_s = least * (above_s[..., first] + below_s[..., last]) - most * k * backward_s[..., stages].max(axis=-1)
    before_s, after_s = np.maximum(before_s, 0.0), np.maximum(after_s, 0.0)
    lives_s = (away_s + home_s + backward_s + weight_s)[..., stages].sum(axis=-1)
    times = num_microbatches / k
    slots_s = least * lives_s * (np.ceil(times) if stages.shape[1] == 1 else times)
    hidden_s = hidden_fraction * np.minimum(of_rank[0], of_rank[1] + of_rank[2])
    chain_s = total * (of_rank[0] + of_rank[1] - hidden_s)
    if splits_backward:
        # the longest way from the last input gradient of the first stage to the end of a weight gradient before it
        way_s = back[..., :-1] + sent
        longest_s = way_s + np.maximum.accumulate(weight_s - way_s, axis=-1)
        later_s = np.maximum(total * of_rank[2], least * longest_s[..., first])
        return np.asarray(head_s + np.maximum(before_s + chain_s + later_s, slots_s))
    both_count = num_microbatches * stages.shape[1] > k
    waits_s = np.where(both_count, before_s + after_s, np.maximum(before_s, after_s))
    return np.asarray(head_s + np.maximum(waits_s + chain_s, slots_s) + tail_s)


def _sums(values: FloatArray) -> FloatArray:
    """Sums of the first 0, 1 … n values along the last axis."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
