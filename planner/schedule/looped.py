"""Orders in which the stages of a rank are pp apart: GPipe, 1F1B and its descendants, breadth-first."""

from __future__ import annotations

import numpy as np

from planner.schedule.actions import ActionList, B, F, IntArray, Schedule


def gpipe(pp: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe")."""
    return breadth_first(pp, 1, num_microbatches, reverse=False, name="gpipe")


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """1F1B: pp − rank − 1 forwards ahead, then one forward and one backward in turn.

    Source: Narayanan et al. 2019, "PipeDream", with the flush of Megatron-LM
    `forward_backward_pipelining_without_interleaving`.
    """
    return interleaved_one_f_one_b(pp, 1, num_microbatches)


def interleaved_one_f_one_b(
    pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None
) -> Schedule:
    """1F1B over vpp chunks per rank, micro-batches in groups that go through the chunks one after the other.

    Warm-up on rank r: (pp − r − 1)·2 + (vpp − 1)·microbatch_group_size chunk forwards (pp − r − 1 when vpp is 1), then
    a forward before each backward. `microbatch_group_size` (pp unless given) is Megatron-LM's
    `microbatch_group_size_per_vp_stage`.
    Source: Narayanan et al. 2021, §2.2; Megatron-LM `get_pp_rank_microbatches` and `get_schedule_table`.
    """
    group = microbatch_group_size or pp
    chunk, microbatch = grouped_visits(vpp, num_microbatches, group)
    ranks = tuple(
        _one_forward_one_backward(
            chunk * pp + rank, (vpp - 1 - chunk) * pp + rank, microbatch, warm_up_chunks(pp, vpp, rank, group)
        )
        for rank in range(pp)
    )
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    return Schedule(name, ranks, tuple(range(pp)) * vpp, num_microbatches)


def warm_up_chunks(pp: int, vpp: int, rank: int, microbatch_group_size: int) -> int:
    """Number of chunk forwards that a rank runs before it alternates, not limited by the number of micro-batches."""
    return pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * microbatch_group_size


def breadth_first(
    pp: int, vpp: int, num_microbatches: int, *, reverse: bool = True, name: str = "breadth-first"
) -> Schedule:
    """Each chunk runs all its micro-batches before the next chunk begins.

    Backwards take the last micro-batch first (`reverse`), as torch's ScheduleLoopedBFS does.
    Source: Lamy-Poirier 2023, "Breadth-first pipeline parallelism".
    """
    microbatches = np.arange(num_microbatches, dtype=np.int32)
    down = np.tile(microbatches, vpp)
    up = np.tile(microbatches[::-1] if reverse else microbatches, vpp)
    chunk = np.repeat(np.arange(vpp, dtype=np.int32), num_microbatches)
    kind = np.repeat(np.array([F, B], dtype=np.int32), len(down))
    ranks = tuple(
        ActionList(kind, np.concatenate((chunk, chunk[::-1])) * pp + rank, np.concatenate((down, up)))
        for rank in range(pp)
    )
    return Schedule(name, ranks, tuple(range(pp)) * vpp, num_microbatches)


def pipedream_2bw(pp: int, num_microbatches: int) -> Schedule:
    """1F1B whose steps follow each other without a flush, on two versions of the weights: gradients are one step stale.

    The list holds one step, filled and drained; `replay.steady_step_s` gives the seconds that one more step adds.
    Source: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training".
    """
    order = one_f_one_b(pp, num_microbatches)
    return Schedule(
        "pipedream-2bw",
        order.ranks,
        order.stage_to_rank,
        num_microbatches,
        num_weight_copies=2,
        asynchronous=True,
        staleness_steps=1,
    )


def forward_only(pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Forwards without backwards, for evaluation, in the order of interleaved 1F1B's forwards."""
    chunk, microbatch = grouped_visits(vpp, num_microbatches, pp)
    kind = np.full(len(chunk), F, dtype=np.int32)
    ranks = tuple(ActionList(kind, chunk * pp + rank, microbatch) for rank in range(pp))
    return Schedule("forward-only", ranks, tuple(range(pp)) * vpp, num_microbatches, forward_only=True)


def no_pipeline(num_microbatches: int) -> Schedule:
    """One rank holds the whole model: each micro-batch's forward and backward, one after the other."""
    order = one_f_one_b(1, num_microbatches)
    return Schedule("none", order.ranks, order.stage_to_rank, num_microbatches)


def grouped_visits(vpp: int, num_microbatches: int, group: int) -> tuple[IntArray, IntArray]:
    """Chunks and micro-batches in the order of Megatron-LM's schedule table; the last group may be smaller."""
    chunk = np.repeat(np.arange(vpp, dtype=np.int32), num_microbatches)
    microbatch = np.tile(np.arange(num_microbatches, dtype=np.int32), vpp)
    order = np.lexsort((microbatch, chunk, microbatch // group))
    return chunk[order], microbatch[order]


def _one_forward_one_backward(
    forward_stage: IntArray, backward_stage: IntArray, microbatch: IntArray, ahead: int
) -> ActionList:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    total = len(microbatch)
    ahead = min(ahead, total)
    is_forward = np.concatenate(
        (np.ones(ahead, dtype=bool), np.tile([True, False], total - ahead), np.zeros(ahead, dtype=bool))
    )
    stage, mb = np.empty(2 * total, dtype=np.int32), np.empty(2 * total, dtype=np.int32)
    stage[is_forward], stage[~is_forward] = forward_stage, backward_stage
    mb[is_forward], mb[~is_forward] = microbatch, microbatch
    return ActionList(np.where(is_forward, F, B).astype(np.int32), stage, mb)
