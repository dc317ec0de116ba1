"""Orders in which the stages of a rank are pp apart: GPipe, 1F1B and what grew out of it, breadth-first."""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.actions import Action, Schedule


def gpipe(pp: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe")."""
    return breadth_first(pp, 1, num_microbatches, reverse=False, name="gpipe")


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """pp − rank − 1 forwards ahead, then one forward and one backward in turn (Narayanan et al. 2019, "PipeDream";
    with the flush of Megatron-LM `forward_backward_pipelining_without_interleaving`)."""
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
    visits = list(grouped_visits(vpp, num_microbatches, group))
    ranks = []
    for rank in range(pp):
        forwards = [Action("F", chunk * pp + rank, mb) for chunk, mb in visits]
        backwards = [Action("B", (vpp - 1 - chunk) * pp + rank, mb) for chunk, mb in visits]
        ahead = min(len(visits), warm_up_chunks(pp, vpp, rank, group))
        ranks.append(_one_forward_one_backward(forwards, backwards, ahead))
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    return Schedule(name, tuple(ranks), tuple(range(pp)) * vpp, num_microbatches)


def warm_up_chunks(pp: int, vpp: int, rank: int, microbatch_group_size: int) -> int:
    """Chunk forwards that rank runs before its first backward's partner (interleaved or not), uncapped."""
    return pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * microbatch_group_size


def breadth_first(
    pp: int, vpp: int, num_microbatches: int, *, reverse: bool = True, name: str = "breadth-first"
) -> Schedule:
    """Each chunk runs all its micro-batches before the next chunk begins (Lamy-Poirier 2023, "Breadth-first pipeline
    parallelism"); backwards take the last micro-batch first, as torch's ScheduleLoopedBFS does."""
    microbatches = range(num_microbatches)
    backward_microbatches = microbatches[::-1] if reverse else microbatches
    ranks = []
    for rank in range(pp):
        stages = range(rank, pp * vpp, pp)
        forwards = [Action("F", stage, mb) for stage in stages for mb in microbatches]
        backwards = [Action("B", stage, mb) for stage in stages[::-1] for mb in backward_microbatches]
        ranks.append((*forwards, *backwards))
    return Schedule(name, tuple(ranks), tuple(range(pp)) * vpp, num_microbatches)


def pipedream_2bw(pp: int, num_microbatches: int) -> Schedule:
    """1F1B whose steps follow each other without a flush, on two versions of the weights: gradients are one step stale.

    The list holds one step, filled and drained; `replay.steady_step_s` gives what a step adds to a run of many.
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
    """Forwards alone, for evaluation, in the order of interleaved 1F1B's forwards."""
    visits = list(grouped_visits(vpp, num_microbatches, pp))
    ranks = tuple(tuple(Action("F", chunk * pp + rank, mb) for chunk, mb in visits) for rank in range(pp))
    return Schedule("forward-only", ranks, tuple(range(pp)) * vpp, num_microbatches, forward_only=True)


def no_pipeline(num_microbatches: int) -> Schedule:
    """One rank holds the whole model: each micro-batch's forward and backward, one after the other."""
    order = one_f_one_b(1, num_microbatches)
    return Schedule("none", order.ranks, order.stage_to_rank, num_microbatches)


def grouped_visits(vpp: int, num_microbatches: int, group: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order of Megatron's schedule table; the last group may be smaller."""
    for first in range(0, num_microbatches, group):
        for chunk in range(vpp):
            for microbatch in range(first, min(first + group, num_microbatches)):
                yield chunk, microbatch


def _one_forward_one_backward(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])
