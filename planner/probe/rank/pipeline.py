"""One rank's action list on real tensors, and its clock: it receives, computes, sends, and records when it did what.

There is a channel for each ordered pair of pipeline ranks, used in the order of the sender's actions. Both ends derive
that order from the action lists, so that sends need no tags and never wait for each other: a send returns at once, and
a receiver keeps the next expected message of each sender under way while it computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import AttentionTables
from planner.probe.model.chunk import Chunk
from planner.probe.model.peers import Surroundings
from planner.probe.result import TimedAction
from planner.probe.run import Message, Place, ProbeRun, Purpose, message_of, needed_by, traffic
from planner.schedule.actions import Action, Schedule
from planner.specs.base import Ints


class RankClock:
    """The clock of a rank: the host's seconds, or on a GPU events on its stream, which are read after the step."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")
        self.origin: Any = None
        """The mark of time zero."""

    def mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Set the time zero from which marks count."""
        if self.is_cuda:
            torch.cuda.synchronize()
        self.origin = self.mark()

    def seconds(self, mark: Any) -> float:
        """Seconds from time zero to a mark; waits for the GPU."""
        if not self.is_cuda:
            return float(mark - self.origin)
        mark.synchronize()
        return float(self.origin.elapsed_time(mark)) / 1e3


@dataclass(slots=True)
class StepRecord:
    """The record of one step of a rank."""

    marks: list[tuple[Action, Any, Any, Any]] = field(default_factory=list)
    """Each action with the clock's marks of when it was ready, started and ended."""
    actions: list[TimedAction] = field(default_factory=list)
    """The same actions in seconds, filled when the marks are read."""
    losses: list[Tensor] = field(default_factory=list)
    """The weighted loss of each micro-batch, on a rank that holds the head."""
    peak_in_flight: int = 0
    """The largest number of (virtual stage, micro-batch) activations held at once."""

    @property
    def loss(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0

    def read(self, clock: RankClock, on_action: Callable[[str], None]) -> None:
        """Wait for the marks and read them. If a GPU never reaches a mark, `on_action` was last called with that mark's
        action."""
        for action, ready, start, end in self.marks:
            on_action(f"{action} (waiting)")
            ready_s = clock.seconds(ready)
            start_s = clock.seconds(start)
            on_action(f"{action} (computing)")
            end_s = clock.seconds(end)
            self.actions.append(TimedAction(action=str(action), ready_s=ready_s, start_s=start_s, end_s=end_s))


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

    def __init__(self, stages: Ints, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.stages = stages
        self.make = make

    def send(self, message: Message, tensor: Tensor) -> None:
        if message.stage in self.stages:
            super().send(message, tensor)

    def receive(self, message: Message) -> Tensor:
        return super().receive(message) if message in self.kept else self.make(message.kind)


class GroupWires(Wires):
    """Exchanges with other ranks by torch.distributed."""

    def __init__(
        self,
        run: ProbeRun,
        place: Place,
        joined: Mapping[Purpose, Any],
        empty: Callable[[], Tensor],
    ) -> None:
        """`joined` holds the groups of its channels; `empty` makes a message."""
        super().__init__()
        self.run, self.place, self.empty = run, place, empty
        self.groups = {pair: group for (kind, pair), group in joined.items() if kind == "wire"}
        self.expected = {pair: messages for pair, messages in traffic(run.order).items() if pair[1] == place.pp}
        self.coming: dict[Ints, deque[Message]] = {}
        self.posted: dict[Ints, tuple[Message, Tensor, Any]] = {}
        self.leaving: deque[tuple[Any, Tensor]] = deque()

    def open(self) -> None:
        """Exchange one message on every channel, in the same order on all ranks.

        NCCL connects two ranks when both ask for it. Without this exchange, ranks would wait for each other in a circle
        in the first step.
        """
        for pair in sorted(self.groups):
            if pair[0] == self.place.pp:
                dist.send(self.empty(), self._beside(pair[1]), group=self.groups[pair])
            else:
                dist.recv(self.empty(), self._beside(pair[0]), group=self.groups[pair])

    def begin(self) -> None:
        self.coming = {pair: deque(messages) for pair, messages in self.expected.items()}
        for pair in self.coming:
            self._post(pair)

    def send(self, message: Message, tensor: Tensor) -> None:
        to = self.run.stage_to_rank[message.stage]
        if to == self.place.pp:
            super().send(message, tensor)
            return
        while self.leaving and self.leaving[0][0].is_completed():
            self.leaving.popleft()
        tensor = tensor.contiguous()
        expected = self.empty()
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise RuntimeError(f"{message} is {tensor.dtype} {tuple(tensor.shape)}, not {tuple(expected.shape)}")
        work = dist.isend(tensor, self._beside(to), group=self.groups[self.place.pp, to])
        self.leaving.append((work, tensor))

    def receive(self, message: Message) -> Tensor:
        sender = message.stage - 1 if message.kind == "F" else message.stage + 1
        pair = (self.run.stage_to_rank[sender], self.place.pp)
        while message not in self.kept:
            self._take(pair)
        return super().receive(message)

    def _beside(self, pp_rank: int) -> int:
        """Global rank of the same coordinates on another pipeline rank."""
        return self.run.rank(self.place._replace(pp=pp_rank))

    def finish(self) -> None:
        while self.leaving:
            self.leaving.popleft()[0].wait()

    def _post(self, pair: Ints) -> None:
        if self.coming[pair]:
            message = self.coming[pair].popleft()
            buffer = self.empty()
            work = dist.irecv(buffer, self._beside(pair[0]), group=self.groups[pair])
            self.posted[pair] = (message, buffer, work)

    def _take(self, pair: Ints) -> None:
        message, buffer, work = self.posted.pop(pair)
        work.wait()
        self.kept[message] = buffer
        self._post(pair)


class SavedForward(NamedTuple):
    """The tensors that a forward saves for its backward."""

    source: Tensor | None
    output: Tensor


@dataclass(eq=False)
class RankPipeline:
    """The stages of one pipeline rank, and the loop over its actions."""

    schedule: Schedule
    actions: Sequence[Action]
    chunks: Mapping[int, Chunk]
    wires: Wires
    around: Surroundings
    tables: AttentionTables
    clock: RankClock
    saved: dict[tuple[int, int], SavedForward] = field(init=False, default_factory=dict)
    postponed: dict[tuple[int, int], list[Callable[[], None]]] = field(init=False, default_factory=dict)

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
        source = None if received is None else received.requires_grad_()
        output: Tensor = chunk(source, tokens, labels, self.tables)
        if chunk.head is not None:
            output = output * loss_weight
        self.saved[key] = SavedForward(source, output)
        return output.detach()
