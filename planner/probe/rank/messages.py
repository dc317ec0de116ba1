"""The messages that a schedule's actions send to each other; both ends derive their order from it."""

from __future__ import annotations

from typing import NamedTuple

from planner.schedule.actions import Action, Schedule


class Message(NamedTuple):
    """What the virtual stage `stage` needs for a micro-batch: an activation (F) or a gradient (B)."""

    kind: str
    stage: int
    microbatch: int


def message_of(schedule: Schedule, action: Action) -> Message | None:
    """What an action sends on: a forward to the next stage, a backward (or input gradient) to the one before."""
    local, n = action.stage % schedule.num_model_stages, schedule.num_model_stages
    if action.kind == "F" and local < n - 1:
        return Message("F", action.stage + 1, action.microbatch)
    if action.kind in "BI" and local > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


def needed_by(schedule: Schedule, action: Action) -> Message | None:
    """What an action waits for: the mirror of `message_of`."""
    local, n = action.stage % schedule.num_model_stages, schedule.num_model_stages
    if action.kind == "F" and local > 0:
        return Message("F", action.stage, action.microbatch)
    if action.kind in "BI" and local < n - 1:
        return Message("B", action.stage, action.microbatch)
    return None


def traffic(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Messages of a step by (sender, receiver) pipeline rank, in the order of the sender's actions; none to oneself."""
    wires: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            message = message_of(schedule, action)
            if message is not None and schedule.stage_to_rank[message.stage] != rank:
                wires.setdefault((rank, schedule.stage_to_rank[message.stage]), []).append(message)
    return wires
