"""One rank's action list on real tensors: it receives, computes, sends, and records when it did what.

There is a channel for each ordered pair of pipeline ranks, used in the order of the sender's actions. Both ends derive
that order from the action lists, so that sends need no tags and never wait for each other: a send returns at once, and
a receiver keeps the next expected message of each sender under way while it computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import AttentionTables
from planner.probe.model.chunk import Chunk
from planner.probe.model.peers import Surroundings
from planner.probe.rank.clock import RankClock, StepRecord
from planner.probe.run import Message, SleepSeconds, message_of, needed_by, traffic
from planner.schedule.actions import Action, Schedule


class Wires:
    """The exchanges of a rank without neighbours. It can send messages to its own stages; a message from elsewhere is
    an error."""

    def __init__(self) -> None:
        self.kept: dict[Message, Tensor] = {}

    def begin(self) -> None:
        """A new step."""

    def send(self, message: Message, tensor: Tensor) -> None:
        self.kept[message] = tensor

    def receive(self, message: Message) -> Tensor:
        return self.kept.pop(message)

    def finish(self) -> None:
        """Wait until all messages of the step have been sent."""


class EmulatedWires(Wires):
    """Emulated neighbours: received tensors are made on the device, and tensors sent to other ranks are dropped."""

    def __init__(self, stages: tuple[int, ...], make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.stages, self.make = stages, make

    def send(self, message: Message, tensor: Tensor) -> None:
        if message.stage in self.stages:
            super().send(message, tensor)

    def receive(self, message: Message) -> Tensor:
        return super().receive(message) if message in self.kept else self.make(message.kind)


class GroupWires(Wires):
    """Exchanges with other ranks by torch.distributed."""

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        global_rank: Callable[[int], int],
        groups: Mapping[tuple[int, int], Any],
        empty: Callable[[], Tensor],
    ) -> None:
        """`global_rank` of a pipeline rank beside this one; `groups` by (sender, receiver); `empty` makes a message."""
        super().__init__()
        self.schedule, self.pp_rank, self.global_rank = schedule, pp_rank, global_rank
        self.groups, self.empty = groups, empty
        self.expected = {pair: messages for pair, messages in traffic(schedule).items() if pair[1] == pp_rank}
        self.coming: dict[tuple[int, int], deque[Message]] = {}
        self.posted: dict[tuple[int, int], tuple[Message, Tensor, Any]] = {}
        self.leaving: deque[tuple[Any, Tensor]] = deque()

    def open(self) -> None:
        """Exchange one message on every channel, in the same order on all ranks.

        NCCL connects two ranks when both ask for it. Without this exchange, ranks would wait for each other in a circle
        in the first step.
        """
        for pair in sorted(self.groups):
            if pair[0] == self.pp_rank:
                dist.send(self.empty(), self.global_rank(pair[1]), group=self.groups[pair])
            else:
                dist.recv(self.empty(), self.global_rank(pair[0]), group=self.groups[pair])

    def begin(self) -> None:
        self.coming = {pair: deque(messages) for pair, messages in self.expected.items()}
        for pair in self.coming:
            self._post(pair)

    def send(self, message: Message, tensor: Tensor) -> None:
        to = self.schedule.stage_to_rank[message.stage]
        if to == self.pp_rank:
            super().send(message, tensor)
            return
        while self.leaving and self.leaving[0][0].is_completed():
            self.leaving.popleft()
        tensor = tensor.contiguous()
        expected = self.empty()
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise RuntimeError(f"{message} is {tensor.dtype} {tuple(tensor.shape)}, not {tuple(expected.shape)}")
        work = dist.isend(tensor, self.global_rank(to), group=self.groups[self.pp_rank, to])
        self.leaving.append((work, tensor))

    def receive(self, message: Message) -> Tensor:
        sender = message.stage - 1 if message.kind == "F" else message.stage + 1
        pair = (self.schedule.stage_to_rank[sender], self.pp_rank)
        while message not in self.kept:
            self._take(pair)
        return super().receive(message)

    def finish(self) -> None:
        while self.leaving:
            self.leaving.popleft()[0].wait()

    def _post(self, pair: tuple[int, int]) -> None:
        if self.coming[pair]:
            message, buffer = self.coming[pair].popleft(), self.empty()
            work = dist.irecv(buffer, self.global_rank(pair[0]), group=self.groups[pair])
            self.posted[pair] = (message, buffer, work)

    def _take(self, pair: tuple[int, int]) -> None:
        message, buffer, work = self.posted.pop(pair)
        work.wait()
        self.kept[message] = buffer
        self._post(pair)


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
        clock: RankClock,
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
