"""Events of a memory snapshot played back: who is allocated when, and what is reserved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import SpecError
from planner.observe.traces.memory.frames import CATEGORIES, ROUNDING, Categories
from planner.specs.reading import printable

BLOCK_BYTES = 512
"""torch's CUDACachingAllocator rounds every request up to a multiple of this (kMinBlockSize)."""
NUM_LARGEST = 10
_NEVER = 2**62
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_PYTHON = (".py", "<string>")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a segment when the snapshot was written."""

    device: int
    address: int
    size: int
    requested_size: int
    state: str
    frames: Any
    expandable: bool


@dataclass(slots=True)
class Allocation:
    """Memory from its first event to the one that frees it."""

    requested: int
    size: int
    category: int
    frames: Any
    born: int
    died: int = _NEVER


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which most is allocated."""

    num_bytes: int
    parts: tuple[tuple[str, int, int], ...]
    """(category, bytes, allocations), the largest first."""
    largest: tuple[tuple[str, int, str], ...]
    time_us: int | None
    reserved_bytes: int


def rounded(requested: int) -> int:
    """The block that a request takes at least."""
    return -(-requested // BLOCK_BYTES) * BLOCK_BYTES


class Replay:
    """One device's events, from the baseline on."""

    def __init__(self, where: str, device: int, events: Sequence[Any], blocks: Sequence[Block]) -> None:
        self._where, self._device = where, device
        self._categories = Categories()
        self.allocations: list[Allocation] = []
        self._live: dict[int, Allocation] = {}
        self._reserved_change = np.zeros(len(events) + 1, np.int64)
        self._times: list[int | None] = [None] * (len(events) + 1)
        self.out_of_memory: tuple[int, int | None] | None = None
        self._num_twice = 0
        for number, event in enumerate(events, 1):
            self._play(number, event)
        self._num_unknown = self._meet(blocks)
        self.reserved_bytes = sum(block.size for block in blocks)
        reserves = sum(abs(change) for change in self._reserved_change.tolist())
        if sum(a.size for a in self.allocations) + self.reserved_bytes + reserves >= _NEVER:  # 63 bits
            raise self._broken(len(events), "no GPU has that many bytes in all")
        later = np.cumsum(self._reserved_change[::-1])[::-1] - self._reserved_change
        self._reserved = self.reserved_bytes - later
        self.peak_reserved_bytes = int(self._reserved.max())
        self._allocated = self._allocated_bytes(len(events))
        self.baseline_bytes, self.end_bytes = int(self._allocated[0]), int(self._allocated[-1])

    def _play(self, number: int, event: Any) -> None:
        if not isinstance(event, dict):
            raise self._broken(number, "is no mapping")
        action, time_us = event.get("action"), event.get("time_us")
        self._times[number] = time_us if isinstance(time_us, int) else None
        if action == "alloc":
            address, requested = self._number(number, event, "addr"), self._number(number, event, "size")
            if (old := self._live.pop(address, None)) is not None:  # the ring lost what freed it
                old.died = number
                self._num_twice += 1
            self._live[address] = self._allocation(requested, rounded(requested), event.get("frames"), number)
        elif action == "free_requested" or action == "free_completed":
            address = self._number(number, event, "addr")
            if (freed := self._live.pop(address, None)) is not None:
                freed.died = number
            elif action == "free_requested":  # allocated before the first event
                requested = self._number(number, event, "size")
                self._allocation(requested, rounded(requested), None, 0).died = number
        elif isinstance(action, str) and action in _RESERVES:
            self._reserved_change[number] = _RESERVES[action] * self._number(number, event, "size")
        elif action == "oom":
            free = event.get("device_free")
            self.out_of_memory = (self._number(number, event, "size"), free if isinstance(free, int) else None)

    def _allocation(self, requested: int, size: int, frames: Any, born: int) -> Allocation:
        allocation = Allocation(requested, size, self._categories.of(frames), frames, born)
        self.allocations.append(allocation)
        return allocation

    def _meet(self, blocks: Sequence[Block]) -> int:
        """Take the blocks in use that no event allocated as baseline; the number that events leave and no block has."""
        in_use = {block.address: block for block in blocks if block.state == "active_allocated"}
        for address, block in in_use.items():
            live = self._live.get(address)
            if live is None:
                self._allocation(block.requested_size, block.size, block.frames, 0)
            else:  # the block itself says its size
                live.size = max(live.size, block.size)
        return sum(address not in in_use for address in self._live) if blocks else 0

    def _allocated_bytes(self, num_events: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Allocated after each event; entry 0 is the baseline."""
        change = np.zeros(num_events + 1, np.int64)
        for allocation in self.allocations:
            change[allocation.born] += allocation.size
            if allocation.died < _NEVER:
                change[allocation.died] -= allocation.size
        return np.cumsum(change)

    def peak(self) -> Peak:
        """The largest moment, the first of several, with all that lives then."""
        at = int(self._allocated.argmax())
        live = [a for a in self.allocations if a.born <= at < a.died]
        num_bytes: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for allocation in live:
            num_bytes[CATEGORIES[allocation.category]] += allocation.requested
            count[CATEGORIES[allocation.category]] += 1
        rounding = sum(a.size - a.requested for a in live)
        if rounding:
            num_bytes[ROUNDING] = rounding
        largest = sorted(live, key=lambda a: -a.requested)[:NUM_LARGEST]
        return Peak(
            int(self._allocated[at]),
            tuple((category, size, count[category]) for category, size in num_bytes.most_common()),
            tuple((CATEGORIES[a.category], a.requested, _innermost(a.frames)) for a in largest),
            self._times[at],
            int(self._reserved[at]),
        )

    def warnings(self) -> tuple[str, ...]:
        """Sentences on what makes the replay less than certain."""
        told = []
        if self._num_twice:
            told.append(f"{self._num_twice:,} addresses were allocated twice: events between are missing")
        if self._num_unknown:
            told.append(f"{self._num_unknown:,} allocations are in no segment at the end: the events stop before it")
        if self.baseline_bytes:
            told.append("recording began after allocations were made, or its ring was full: the baseline has no frames")
        return tuple(told)

    def _number(self, number: int, event: dict[str, Any], key: str) -> int:
        value = event.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48 + (key == "addr") * 2**63:
            return value
        raise self._broken(number, f"{key}: {printable(repr(value)[:60], 40)} is no number of bytes")

    def _broken(self, number: int, problem: str) -> SpecError:
        place = f"device_traces[{self._device}][{number - 1}]"
        return SpecError(
            f"{self._where}: {place}: {problem}", "name a file that torch.cuda.memory._dump_snapshot wrote"
        )


def _innermost(frames: Any) -> str:
    """File, line and function of the innermost frame that is Python."""
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        if isinstance(frame, dict) and str(frame.get("filename", "")).endswith(_PYTHON):
            file = str(frame["filename"]).rpartition("/")[2]
            return printable(f"{file}:{frame.get('line')}:{frame.get('name')}"[:120], 120)
    return ""
