"""Orders in which micro-batches travel in both directions: DualPipe, its V form, Chimera."""

from __future__ import annotations

from planner.schedule.actions import Action, Schedule
from planner.schedule.tape import Tape
from planner.schedule.zero_bubble import v_placement


def dualpipe(pp: int, num_microbatches: int) -> Schedule:
    """DualPipe: half of the micro-batches enter at each end of the pipeline.

    Each of the pp ranks holds two stages, and forwards of one direction overlap backwards of the other.
    Micro-batches 0 … M/2 − 1 belong to the first copy of the model, the others to the second.
    Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", §3.2.1; github.com/deepseek-ai/DualPipe.
    """
    half = num_microbatches // 2
    tapes = []
    for rank in range(pp):
        near, far = (rank, 0), (2 * pp - 1 - rank, half)
        if rank >= pp // 2:
            near, far = far, near
        tape = Tape((near[0], far[0]), (near[1], far[1]))
        _dualpipe_rank(tape, depth=pp // 2, position=min(rank, pp - 1 - rank), num_microbatches=half)
        tapes.append(tape)
    placement = (*range(pp), *reversed(range(pp)))
    return _dual("dualpipe", tapes, placement, num_microbatches, num_directions=2)


def dualpipe_v(pp: int, num_microbatches: int) -> Schedule:
    """DualPipe folded in half: one copy of the model in a V over pp ranks ("Cut-in-half", Qi et al. 2025;
    torch's ScheduleDualPipeV)."""
    tapes = [Tape((rank, 2 * pp - 1 - rank)) for rank in range(pp)]
    for rank, tape in enumerate(tapes):
        _dualpipe_rank(tape, depth=pp, position=rank, num_microbatches=num_microbatches)
    return _dual("dualpipe-v", tapes, v_placement(pp), num_microbatches, num_directions=1)


def _dual(
    name: str, tapes: list[Tape], stage_to_rank: tuple[int, ...], num_microbatches: int, num_directions: int
) -> Schedule:
    return Schedule(
        name,
        tuple(tuple(tape.actions) for tape in tapes),
        stage_to_rank,
        num_microbatches,
        num_directions=num_directions,
        num_weight_copies=num_directions,
        splits_backward=True,
        overlapped=tuple(tuple(tape.overlapped) for tape in tapes),
    )


def _dualpipe_rank(tape: Tape, depth: int, position: int, num_microbatches: int) -> None:
    """Writes the eight steps of DualPipe on one rank.

    The rank is `position` away from the end where micro-batches of chunk 0 enter, and `depth` ranks lie between that
    end and the place where both directions meet. `num_microbatches` are those of one direction.
    """
    beyond = depth - position - 1
    main = num_microbatches - 2 * depth + position + 1
    tape.add("F0", 2 * beyond)
    tape.add("F0 F1", position + 1)
    tape.add("I1 W F1", beyond)
    for step in range(main):
        tape.add("F0 B1" if step == 0 and beyond == 0 else "F0&B1")  # not overlapped at the turn: a smaller bubble
        tape.add("F1&B0")
    tape.add("B1 F1&B0", beyond)
    split_from = 2 * ((position + 1) // 2) + (0 if position % 2 else 1)
    for turn in range(2 * (position + 1)):
        tape.add(f"{'I' if turn >= split_from else 'B'}{1 - turn % 2}")
    tape.add("W I0", beyond)
    tape.add("W", position + 1)


def chimera(pp: int, num_microbatches: int) -> Schedule:
    """Two 1F1B pipelines in opposite directions, each with half of the micro-batches.

    The micro-batches run in units of pp that follow each other without a gap (Li and Hoefler 2021, "Chimera", direct
    concatenation). A slot is the time of one forward or backward. Micro-batch m of a unit's direction is at stage s in
    slot s + 2m on the way down and in slot 2·pp − 1 − s + 2m on the way back, and the next unit is 2·pp slots later: no
    two actions of a rank need the same slot. The first half of a unit's micro-batches belongs to the first copy of the
    model.
    """
    ranks = []
    for rank in range(pp):
        slots: dict[int, Action] = {}
        for unit in range(num_microbatches // pp):
            for direction, stage in enumerate((rank, pp - 1 - rank)):
                for m in range(pp // 2):
                    where = (direction * pp + stage, unit * pp + direction * (pp // 2) + m)
                    first = 2 * pp * unit + 2 * m
                    slots[first + stage] = Action("F", *where)
                    slots[first + 2 * pp - 1 - stage] = Action("B", *where)
        ranks.append(tuple(slots[slot] for slot in sorted(slots)))
    placement = (*range(pp), *reversed(range(pp)))
    return Schedule("chimera", tuple(ranks), placement, num_microbatches, num_directions=2, num_weight_copies=2)
