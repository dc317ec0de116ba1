"""Point-to-point exchanges between pipeline ranks: a channel per ordered pair, used in the order of the sender's work.

Both ends derive that order from the sender's action list, so that sends need no tags and never wait for each other:
a send returns at once, and a receiver keeps the next expected message of each sender under way while it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from planner.probe.rank.messages import Message, traffic
from planner.schedule.actions import Schedule


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
        self.groups, self.make = groups, empty
        self.expected = {pair: messages for pair, messages in traffic(schedule).items() if pair[1] == pp_rank}
        self.coming: dict[tuple[int, int], deque[Message]] = {}
        self.posted: dict[tuple[int, int], tuple[Message, Tensor, Any]] = {}
        self.leaving: deque[tuple[Any, Tensor]] = deque()

    def empty(self) -> Tensor:
        """A buffer for one message."""
        return self.make()

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
