"""Builders of the action lists of named schedules.

Stages of a rank that are pp apart: GPipe, 1F1B and its descendants, breadth-first. Split backwards, whose weight
gradients fill the bubbles: ZB-H1, ZB-H2, ZB-V, V-Half, V-Min. Both directions: DualPipe, its V form, Chimera.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.schedule.actions import HELD, Action, ActionList, B, F, IntArray, Schedule
from planner.schedule.replay import Durations, replay


class Tape:
    """The action list of one rank while it is being written.

    A pattern names kinds and local chunks: `F0` is the next forward of chunk 0, `B1` the next full backward of chunk 1,
    `W` without a chunk the oldest weight gradient still owed, and `F0&B1` a forward that runs together with a backward.
    """

    def __init__(self, stages: tuple[int, ...], first_microbatches: tuple[int, ...] = (0, 0)) -> None:
        self.actions: list[Action] = []
        self.overlapped: list[int] = []
        self._stages = stages
        self._first = first_microbatches
        self._count: Counter[tuple[str, int]] = Counter()
        self._owed: deque[tuple[int, int]] = deque()

    def count(self, kind: str, chunk: int) -> int:
        """Number of actions of this kind that the chunk has run; a full backward counts as I and as W."""
        return self._count[kind, chunk]

    def add(self, pattern: str, times: int = 1) -> None:
        """Append the pattern `times` times."""
        for _ in range(times):
            for token in pattern.split():
                forward, ampersand, backward = token.partition("&")
                if ampersand:
                    self.overlapped.append(len(self.actions))
                    self._append(forward)
                    self._append(backward)
                else:
                    self._append(token)

    def _append(self, token: str) -> None:
        if token == "W":
            if self._owed:
                chunk, microbatch = self._owed.popleft()
                self.actions.append(Action("W", self._stages[chunk], microbatch))
            return
        kind, chunk = token[0], int(token[1:])
        counted = "I" if kind == "B" else kind
        microbatch = self._first[chunk] + self._count[counted, chunk]
        self._count[counted, chunk] += 1
        if kind == "B":
            self._count["W", chunk] += 1
        if kind == "I":
            self._owed.append((chunk, microbatch))
        self.actions.append(Action(kind, self._stages[chunk], microbatch))


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

    The list holds one step, filled and drained; `compare` prices the seconds that one more step adds.
    Source: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training".
    """
    order = one_f_one_b(pp, num_microbatches)
    return replace(order, name="pipedream-2bw", num_weight_copies=2, asynchronous=True, staleness_steps=1)


def forward_only(pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Forwards without backwards, for evaluation, in the order of interleaved 1F1B's forwards."""
    chunk, microbatch = grouped_visits(vpp, num_microbatches, pp)
    kind = np.full(len(chunk), F, dtype=np.int32)
    ranks = tuple(ActionList(kind, chunk * pp + rank, microbatch) for rank in range(pp))
    return Schedule("forward-only", ranks, tuple(range(pp)) * vpp, num_microbatches, forward_only=True)


def no_pipeline(pp: int, num_microbatches: int) -> Schedule:
    """One rank holds the whole model: each micro-batch's forward and backward, one after the other."""
    return replace(one_f_one_b(pp, num_microbatches), name="none")


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
    return Schedule(name, tuple(ranks), tuple(range(pp)) * vpp, num_microbatches)


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
    return Schedule("zb-v", tuple(ranks), v_placement(pp), num_microbatches)


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


BLOCK = 6
"""Number of slots that one micro-batch takes on a rank with two chunks: F, I and W of each chunk."""

Slots = dict[int, Action]
"""One rank's actions by slot."""


def v_half(pp: int, num_microbatches: int) -> Schedule:
    """V-Half: about half the activations of 1F1B's first rank, and less than half its bubble.

    Source: Qi et al. 2024, "Pipeline parallelism with controllable memory".
    """
    gap = 3 if pp % 2 == 0 else 0
    block = [(2 * r, 3 * pp - r - 2, 3 * pp + gap + 2 * r - 1, 6 * pp + gap - r - 2) for r in range(pp)]
    return _repeat_block("v-half", block, num_microbatches)


def v_min(pp: int, num_microbatches: int) -> Schedule:
    """V-Min: about a third of the activations of 1F1B's first rank, the least that a V placement needs.

    Ranks wait in every period where F, I and W are not equally long.
    Source: Qi et al. 2024, "Pipeline parallelism with controllable memory".
    """
    gap = 2 if pp % 3 == 0 else 0
    block = [(r, 2 * pp - r - 1, 2 * pp + gap + r, 4 * pp + gap - r - 1) for r in range(pp)]
    return _repeat_block("v-min", block, num_microbatches)


def _repeat_block(name: str, block: Sequence[Sequence[int]], num_microbatches: int) -> Schedule:
    """Start the same block every BLOCK slots, and let weight gradients take the slots that stay free.

    A block gives each rank's slots for the first micro-batch: F of the chunk on the way down and of the chunk on the
    way up, then I of the chunk on the way up and of the chunk on the way down. The repetition leaves gaps at both ends.
    Replaying the lists closes the gaps at the start. At the end, actions behind the last forward of rank 0 move into
    earlier free slots, as long as no rank then holds more activations than the fullest rank held before.
    """
    pp = len(block)
    ranks = []
    for rank, slots in enumerate(block):
        steps = list(zip(slots, "FFII", (rank, 2 * pp - 1 - rank, 2 * pp - 1 - rank, rank), strict=True))
        placed = {
            slot + BLOCK * microbatch: Action(kind, stage, microbatch)
            for microbatch in range(num_microbatches)
            for slot, kind, stage in steps
        }
        ranks.append(_with_weight_gradients(placed)[0])
    lists = _lists(_end_pulled(_squeezed(_lists(ranks), num_microbatches), num_microbatches))
    return Schedule(name, lists, v_placement(pp), num_microbatches)


def _lists(ranks: Sequence[Slots]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(slots[slot] for slot in sorted(slots)) for slots in ranks)


def _with_weight_gradients(
    slots: Slots, slot: int = 0, held: int = 0, owed: Sequence[Action] = ()
) -> tuple[Slots, int]:
    """Put each weight gradient into the first free slot behind its input gradient, beginning at `slot`.

    At `slot` the rank holds `held` activations and has still to run the `owed` weight gradients. Returns all actions by
    slot, and the most activations that the rank holds.
    """
    filled: Slots = {}
    waiting = deque(owed)
    left = {slot: action for slot, action in slots.items() if action.kind != "W"}
    most = held
    while left or waiting:
        action = left.pop(slot, None)
        if action is None and waiting:
            filled[slot] = waiting.popleft()
            held -= 1
        elif action is not None:
            filled[slot] = action
            held += action.kind == "F"
            most = max(most, held)
            if action.kind == "I":
                waiting.append(Action("W", action.stage, action.microbatch))
        slot += 1
    return filled, most


def _squeezed(lists: tuple[tuple[Action, ...], ...], num_microbatches: int) -> list[Slots]:
    """Slots of the actions of `lists` when every action runs as early as it can."""
    ones = [1.0] * (2 * len(lists))
    schedule = Schedule("", lists, v_placement(len(lists)), num_microbatches)
    timeline = replay(schedule, Durations(ones, ones, ones))
    return [
        dict(zip((int(start) for start in starts), actions, strict=True))
        for starts, actions in zip(timeline.start_s, lists, strict=True)
    ]


def _end_pulled(ranks: Sequence[Slots], num_microbatches: int) -> list[Slots]:
    placement = v_placement(len(ranks))
    slot_of = {action: slot for slots in ranks for slot, action in slots.items()}
    last = slot_of[Action("F", 0, num_microbatches - 1)]
    tails = [_Tail.split(slots, last) for slots in ranks]
    limit = max(_most_held(slots) for slots in ranks)
    movable = sorted((slot, action) for tail in tails for slot, action in tail.slots.items())
    for slot, action in movable:
        tail = tails[placement[action.stage]]
        first = max(last, *(slot_of[other] for other in _before(action, len(placement)))) + 1
        for free in range(first, slot):
            if free not in tail.slots and tail.peak_after(action, slot, free) <= limit:
                del tail.slots[slot]
                tail.slots[free] = action
                slot_of[action] = free
                break
    return [tail.with_head() for tail in tails]


def _before(action: Action, num_stages: int) -> list[Action]:
    """Actions that must have run at least one slot before `action`.

    These are the one whose result it takes, and the same kind on the same stage for the micro-batch before.
    """
    kind, stage, microbatch = action
    if kind == "F":
        inputs = [Action("F", stage - 1, microbatch)]
    elif stage == num_stages - 1:
        inputs = [Action("F", stage, microbatch)]
    else:
        inputs = [Action("I", stage + 1, microbatch)]
    return inputs + ([Action(kind, stage, microbatch - 1)] if microbatch else [])


def _most_held(slots: Slots) -> int:
    return int(np.cumsum([HELD[slots[slot].kind] for slot in sorted(slots)]).max())


@dataclass(slots=True)
class _Tail:
    """Actions of a rank behind some slot, without weight gradients, and the rank's state at that slot."""

    head: Slots
    """Actions up to the slot."""
    slots: Slots
    first: int
    """First slot of the tail."""
    held: int
    """Number of activations held at the start of the tail."""
    owed: list[Action]
    """Weight gradients whose input gradient is in the head."""

    @classmethod
    def split(cls, slots: Slots, last: int) -> _Tail:
        head = {slot: action for slot, action in sorted(slots.items()) if slot <= last}
        tail = {slot: action for slot, action in slots.items() if slot > last and action.kind != "W"}
        done = {action[1:] for action in head.values() if action.kind == "W"}
        gradients = [action for action in head.values() if action.kind == "I" and action[1:] not in done]
        owed = [Action("W", action.stage, action.microbatch) for action in gradients]
        return cls(head, tail, last + 1, sum(HELD[action.kind] for action in head.values()), owed)

    def peak_after(self, action: Action, slot: int, free: int) -> int:
        moved = {t: other for t, other in self.slots.items() if t != slot} | {free: action}
        return _with_weight_gradients(moved, self.first, self.held, self.owed)[1]

    def with_head(self) -> Slots:
        """All actions of the rank, weight gradients included."""
        return self.head | _with_weight_gradients(self.slots, self.first, self.held, self.owed)[0]
