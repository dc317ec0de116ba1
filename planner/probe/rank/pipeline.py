"""Runs one rank's action list on real tensors: receives, computes, sends, and records when it did what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.probe.model.attention_tables import AttentionTables
from planner.probe.model.chunk import Chunk
from planner.probe.model.surroundings import Surroundings
from planner.probe.rank.clock import Clock, StepRecord
from planner.probe.rank.messages import message_of, needed_by
from planner.probe.rank.wires import Wires
from planner.probe.run import SleepSeconds
from planner.schedule.actions import Action, Schedule


class SavedForward(NamedTuple):
    """The tensors that a forward saves for its backward."""

    source: Tensor | None
    output: Tensor


class RankPipeline:
    """The stages of one pipeline rank, and the loop over its actions."""

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        chunks: Mapping[int, Chunk],
        wires: Wires,
        around: Surroundings,
        tables: AttentionTables | None,
        clock: Clock,
    ) -> None:
        self.schedule, self.actions = schedule, tuple(schedule.ranks[pp_rank])
        self.chunks, self.wires, self.around, self.tables, self.clock = chunks, wires, around, tables, clock
        self.saved: dict[tuple[int, int], SavedForward] = {}
        self.postponed: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def step(
        self, batches: Sequence[tuple[Tensor, Tensor]], loss_weight: float, on_action: Callable[[str], None]
    ) -> StepRecord:
        """All actions of the list once; `batches`: tokens and labels per micro-batch; losses times `loss_weight`."""
        record = StepRecord()
        self.wires.begin()
        for action in self.actions:
            on_action(f"{action} (waiting)")
            ready = self.clock.mark()
            needed = needed_by(self.schedule, action)
            received = None if needed is None else self.wires.receive(needed)
            on_action(f"{action} (computing)")
            start = self.clock.mark()
            sent = self.run(action, received, batches, loss_weight)
            record.peak_in_flight = max(record.peak_in_flight, len(self.saved) + len(self.postponed))
            record.marks.append((action, ready, start, self.clock.mark()))
            message = message_of(self.schedule, action)
            if message is not None:
                assert sent is not None
                self.wires.send(message, sent)
            elif action.kind == "F" and sent is not None:
                record.losses.append(sent)
        self.wires.finish()
        return record

    def run(
        self, action: Action, received: Tensor | None, batches: Sequence[tuple[Tensor, Tensor]], loss_weight: float
    ) -> Tensor | None:
        """Do one action. Returns the tensor to send: hidden states, the loss of a last stage, a gradient, or None."""
        key = (action.stage, action.microbatch)
        if action.kind == "F":
            return self._forward(key, received, *batches[action.microbatch], loss_weight)
        if action.kind == "W":
            with torch.no_grad():
                for compute_gradient in self.postponed.pop(key):
                    compute_gradient()
            return None
        saved = self.saved.pop(key)
        self.around.postponed = [] if action.kind == "I" else None
        torch.autograd.backward(saved.output, received)
        if self.around.postponed is not None:
            self.postponed[key], self.around.postponed = self.around.postponed, None
        return None if saved.source is None else saved.source.grad

    def _forward(
        self, key: tuple[int, int], received: Tensor | None, tokens: Tensor, labels: Tensor, loss_weight: float
    ) -> Tensor:
        chunk = self.chunks[key[0]]
        assert self.tables is not None
        source = None if received is None else received.requires_grad_()
        output: Tensor = chunk(source, tokens, labels, self.tables)
        if chunk.head is not None:
            output = output * loss_weight
        self.saved[key] = SavedForward(source, output)
        return output.detach()


class SleepingPipeline(RankPipeline):
    """A pipeline that sleeps instead of computing. Its messages have the right shape and no meaning."""

    def __init__(
        self, *args: Any, durations: Sequence[SleepSeconds], empty: Callable[[], Tensor], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.durations, self.empty = durations, empty

    def run(
        self, action: Action, received: Tensor | None, batches: Sequence[tuple[Tensor, Tensor]], loss_weight: float
    ) -> Tensor | None:
        forward_s, input_grad_s, weight_grad_s = self.durations[action.stage % len(self.durations)]
        seconds = {"F": forward_s, "B": input_grad_s + weight_grad_s, "I": input_grad_s, "W": weight_grad_s}
        time.sleep(seconds[action.kind])
        key, nothing = (action.stage, action.microbatch), self.empty()
        if action.kind == "F":
            self.saved[key] = SavedForward(None, nothing)
        elif action.kind == "W":
            self.postponed.pop(key)
        else:
            self.saved.pop(key)
            if action.kind == "I":
                self.postponed[key] = []
        return None if message_of(self.schedule, action) is None else nothing
