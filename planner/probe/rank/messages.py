"""The messages between a schedule's actions. Sender and receiver both derive the order of messages from the
schedule."""

from __future__ import annotations

from typing import NamedTuple

from planner.schedule.actions import Action, Schedule


class Message(NamedTuple):
    """The tensor that virtual stage `stage` needs for a micro-batch: an activation (F) or a gradient (B)."""

    kind: str
    stage: int
    microbatch: int


def message_of(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action sends: a forward sends to the next stage, a backward (or input gradient) to the one
    before."""
    local, n = action.stage % schedule.num_model_stages, schedule.num_model_stages
    if action.kind == "F" and local < n - 1:
        return Message("F", action.stage + 1, action.microbatch)
    if action.kind in "BI" and local > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


def needed_by(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action waits for, which another action's `message_of` is."""
    local, n = action.stage % schedule.num_model_stages, schedule.num_model_stages
    if action.kind == "F" and local > 0:
        return Message("F", action.stage, action.microbatch)
    if action.kind in "BI" and local < n - 1:
        return Message("B", action.stage, action.microbatch)
    return None


def traffic(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Messages of a step between two different pipeline ranks, by (sender, receiver), in the order of the sender's
    actions."""
    wires: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            message = message_of(schedule, action)
            if message is not None and schedule.stage_to_rank[message.stage] != rank:
                wires.setdefault((rank, schedule.stage_to_rank[message.stage]), []).append(message)
    return wires
