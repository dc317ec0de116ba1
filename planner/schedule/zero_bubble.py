"""Orders that split the backward and move weight gradients into the bubbles: ZB-H1, ZB-H2, ZB-V."""

from __future__ import annotations

from collections.abc import Sequence

from planner.schedule.actions import Action, Schedule
from planner.schedule.looped import grouped_visits
from planner.schedule.tape import Tape


def zb_h1(pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None) -> Schedule:
    """ZB-H1: 1F1B in which rank r delays its weight gradients by r micro-batches.

    Every rank then uses the memory of the first rank of 1F1B (Qi et al. 2023, §3; for vpp > 1 the order of torch's
    ScheduleInterleavedZeroBubble).
    """
    group = microbatch_group_size or pp
    ahead = [(vpp - 1) * group + pp - 1 - rank for rank in range(pp)]
    return _split_one_forward_one_backward("zb-h1", vpp, num_microbatches, group, ahead, delay=range(pp))


def zb_h2(pp: int, num_microbatches: int) -> Schedule:
    """ZB-H2: like ZB-H1, with twice the warm-up and twice the delay.

    When f = i = w, ranks idle only because they start and end one after the other; up to 2·pp − 1 micro-batches are in
    flight (Qi et al. 2023, §3).
    """
    ahead = [2 * (pp - 1 - rank) for rank in range(pp)]
    return _split_one_forward_one_backward("zb-h2", 1, num_microbatches, pp, ahead, delay=range(0, 2 * pp, 2))


def _split_one_forward_one_backward(
    name: str, vpp: int, num_microbatches: int, group: int, ahead: Sequence[int], delay: Sequence[int]
) -> Schedule:
    """A 1F1B order with split backwards.

    Rank r runs ahead[r] forwards, then F and I in turn, each pair followed by a W once more than delay[r] weight
    gradients are owed; the W that are left run at the end.
    """
    pp = len(ahead)
    visits = list(zip(*(array.tolist() for array in grouped_visits(vpp, num_microbatches, group)), strict=True))
    ranks = []
    for rank in range(pp):
        forwards = iter([Action("F", chunk * pp + rank, mb) for chunk, mb in visits])
        gradients = [((vpp - 1 - chunk) * pp + rank, mb) for chunk, mb in visits]
        actions = [action for _, action in zip(range(ahead[rank]), forwards, strict=False)]
        for index, (stage, microbatch) in enumerate(gradients):
            actions.extend(action for _, action in zip(range(1), forwards, strict=False))
            actions.append(Action("I", stage, microbatch))
            if index >= delay[rank]:
                actions.append(Action("W", *gradients[index - delay[rank]]))
        owed = gradients[max(0, len(gradients) - delay[rank]) :]
        ranks.append((*actions, *(Action("W", stage, mb) for stage, mb in owed)))
    return Schedule(name, tuple(ranks), tuple(range(pp)) * vpp, num_microbatches, splits_backward=True)


def v_placement(pp: int) -> tuple[int, ...]:
    """Rank of each of 2·pp virtual stages when the model goes down the ranks and back up: 0 … pp − 1, pp − 1 … 0."""
    return (*range(pp), *reversed(range(pp)))


def zb_v(pp: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks per rank in a V, so that first and last stage share a rank.

    Every rank uses the memory of 1F1B's first rank. When f = i = w, ranks idle only because they start and end one
    after the other (Qi et al. 2024, §6; order of torch's ScheduleZBVZeroBubble).
    """
    padded = max(2 * pp - 1, num_microbatches)
    ranks = []
    for rank in range(pp):
        tape = Tape((rank, 2 * pp - 1 - rank))
        tape.add("F0", 2 * (pp - rank) - 1)
        tape.add("F1 F0", rank)
        tape.add("F1 I1 W1", pp - rank)
        while tape.count("F", 1) < tape.count("F", 0) or tape.count("F", 0) < padded:
            tape.add("F0", int(tape.count("F", 0) < padded))
            tape.add("I0 W0 F1 I1 W1")
        tape.add("I0 I1", rank)
        tape.add("I0 W0", pp - rank)
        tape.add("W1", tape.count("I", 1) - tape.count("W", 1))
        tape.add("W0", tape.count("I", 0) - tape.count("W", 0))
        ranks.append(tuple(action for action in tape.actions if action.microbatch < num_microbatches))
    return Schedule("zb-v", tuple(ranks), v_placement(pp), num_microbatches, splits_backward=True)
