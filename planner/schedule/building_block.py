"""V-Half and V-Min: one block of slots is repeated for every micro-batch, and the gaps at both ends are closed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedule.actions import HELD, Action, Schedule
from planner.schedule.builders import v_placement
from planner.schedule.replay import Durations, replay

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
    return Schedule(name, lists, v_placement(pp), num_microbatches, splits_backward=True)


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
    schedule = Schedule("", lists, v_placement(len(lists)), num_microbatches, splits_backward=True)
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
