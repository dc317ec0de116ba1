"""Allocations by what they hold, told from the stack frames that the allocator recorded with each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import Field

from planner.errors import SpecError
from planner.observe.traces.source import Progress, load_plain
from planner.specs.base import Spec
from planner.specs.reading import label, printable


@dataclass(frozen=True, slots=True)
class FramePattern:
    """A category, the pattern of one of its frames (`file:function`), and whether a forward pass must be below it."""

    category: str
    pattern: str
    in_forward: bool = False


UNATTRIBUTED = "unattributed"
"""Allocations without frames, such as those made before recording began."""
OTHER = "other"
"""Allocations with frames that no row knows."""
ROUNDING = "allocator rounding"
"""The allocator hands out multiples of 512 bytes."""

_FORWARD = r":(forward\w*|__call__|_call_impl|_wrapped_call_impl|call_\w*|.*::forward)$"
FRAME_PATTERNS = (
    FramePattern(
        "optimizer", r"(distrib\w*_)?optimizer\w*\.py:|/optim/|fused_adam|/muon|adamw?\.py:|emerging_optimizers"
    ),
    FramePattern(
        "gradients", r"param_and_grad_buffer|accumulate_?grad|AccumulateGrad|grad_buffer|main_grad|foreach_reduce"
    ),
    FramePattern(
        "gathered parameters", r"foreach_all_gather|_fsdp_param\w*\.py:(init_)?all_gather|unshard|fully_shard_param"
    ),
    FramePattern("communication", r"nccl|c10d|deep_ep|fused_a2a|nvshmem|symm_mem"),
    FramePattern(
        "activations: loss and logits", r"cross_entropy|vocab_parallel|nll_loss|lm_head|output_layer|logits", True
    ),
    FramePattern("activations: MoE", r"moe|experts?[_.:/]|router|token_dispatch", True),
    FramePattern("activations: attention", r"attention|attn|scaled_dot_product|rotary|rope|sdpa", True),
    FramePattern("activations: MLP", r"mlp|feed_?forward|ffn|swiglu|silu", True),
    FramePattern("activations: norm", r"norm", True),
    FramePattern("activations: embedding", r"embedding", True),
    FramePattern("activations: other modules", r".", True),
    FramePattern(
        "parameters", r":(__init__|_apply|reset_parameters|load_state_dict|to_empty|get_model|build_model|to)$"
    ),
    FramePattern("backward", r"Engine::|autograd|backward|::apply"),
    FramePattern("data", r"data_?loader|get_batch|dataset"),
)
_PATTERNS = tuple(re.compile(row.pattern, re.IGNORECASE) for row in FRAME_PATTERNS)
_IS_FORWARD = re.compile(_FORWARD)
_FORWARD_BIT = 1 << len(FRAME_PATTERNS)
CATEGORIES = (*(row.category for row in FRAME_PATTERNS), OTHER, UNATTRIBUTED)


class FrameCategories:
    """The category of a stack, remembered by frame: a snapshot's stacks share their frames."""

    def __init__(self) -> None:
        self._bits: dict[tuple[str, str], int] = {}
        self._of_stack: dict[int, tuple[int, object]] = {}
        self.num_frames = 0

    def of(self, frames: Any) -> int:
        """The index in CATEGORIES of a stack; whatever is no list of frames counts as no stack."""
        if not isinstance(frames, (list, tuple)) or not frames:
            return len(FRAME_PATTERNS) + 1
        known = self._of_stack.get(id(frames))
        if known is None:
            self.num_frames += len(frames)
            # the list is kept, so that no other one can have its number
            known = self._of_stack[id(frames)] = (self._category(frames), frames)
        return known[0]

    def _category(self, frames: Sequence[Any]) -> int:
        bits = 0
        for frame in frames:
            if isinstance(frame, dict):
                bits |= self._of_frame(str(frame.get("filename", ""))[-200:], str(frame.get("name", ""))[:200])
        forward = bool(bits & _FORWARD_BIT)
        for index, row in enumerate(FRAME_PATTERNS):
            if bits & (1 << index) and (forward or not row.in_forward):
                return index
        return len(FRAME_PATTERNS)

    def _of_frame(self, filename: str, function: str) -> int:
        bits = self._bits.get((filename, function))
        if bits is None:
            text = f"{filename}:{function}"
            bits = sum(1 << index for index, pattern in enumerate(_PATTERNS) if pattern.search(text))
            bits |= _FORWARD_BIT if _IS_FORWARD.search(text) else 0
            self._bits[filename, function] = bits
        return bits


BLOCK_BYTES = 512
"""torch's CUDACachingAllocator rounds every request up to a multiple of this (kMinBlockSize)."""
NUM_LARGEST = 10
_NEVER = 2**62
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_PYTHON = (".py", "<string>")


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """A block of a segment when the snapshot was written."""

    device: int
    address: int
    size: int
    requested_size: int
    state: str
    frames: Any
    expandable: bool


@dataclass(slots=True)
class LiveAllocation:
    """Memory from its first event to the one that frees it."""

    requested: int
    size: int
    category: int
    frames: Any
    born: int
    died: int = _NEVER


@dataclass(frozen=True, slots=True)
class MemoryPeak:
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


class MemoryReplay:
    """One device's events, from the baseline on."""

    def __init__(self, where: str, device: int, events: Sequence[Any], blocks: Sequence[SegmentBlock]) -> None:
        self._where, self._device = where, device
        self._categories = FrameCategories()
        self.allocations: list[LiveAllocation] = []
        self._live: dict[int, LiveAllocation] = {}
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

    def _allocation(self, requested: int, size: int, frames: Any, born: int) -> LiveAllocation:
        allocation = LiveAllocation(requested, size, self._categories.of(frames), frames, born)
        self.allocations.append(allocation)
        return allocation

    def _meet(self, blocks: Sequence[SegmentBlock]) -> int:
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

    def peak(self) -> MemoryPeak:
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
        return MemoryPeak(
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


_LEAST_EVENT_BYTES = 12
"""An address alone takes nine bytes of a pickle: more events than that are repetitions of one."""


class MemoryPart(Spec):
    """One category of the peak."""

    category: str
    num_bytes: int
    num_allocations: int


class LargestAllocation(Spec):
    """One allocation that lives at the peak."""

    category: str
    num_bytes: int
    where: str
    """File, line and function of the innermost frame in Python; empty without frames."""


class SnapshotOutOfMemory(Spec):
    """The allocator gave up."""

    requested_bytes: int
    device_free_bytes: int | None
    inactive_bytes: int
    """Reserved and in no use when the snapshot was written."""
    largest_free_block_bytes: int
    fragmented: bool
    """True if what is reserved and unused would have held the request, and no block of it did."""


class SnapshotReport(Spec):
    """Memory of one device; parts at the peak add up to `peak_bytes` exactly."""

    file: str
    device: int
    peak_bytes: int
    """Allocated at the peak of the recorded window, in the allocator's multiples of 512."""
    parts: tuple[MemoryPart, ...]
    largest: tuple[LargestAllocation, ...]
    peak_time_us: int | None
    during: tuple[str, ...] = Field(default=())
    """Annotations that were open at the peak, such as `Optimizer.step#AdamW.step`."""
    baseline_bytes: int
    """Allocated before the first recorded event and alive at it."""
    end_bytes: int
    reserved_at_peak_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    """At the end, as the following."""
    inactive_bytes: int
    largest_free_block_bytes: int
    awaiting_free_bytes: int
    num_events: int
    expandable_segments: bool | None
    allocator_settings: dict[str, str]
    out_of_memory: SnapshotOutOfMemory | None
    warnings: tuple[str, ...] = ()


def read_snapshot(path: str | Path, progress: Progress | None = None) -> tuple[SnapshotReport, ...]:
    """Replay a snapshot for each device that it has events or segments of; SpecError for any other file."""
    where = label(path)
    data, size_bytes = load_plain(path, progress)
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        _refuse(where, "holds no `segments`: it is no memory snapshot")
    traces = data.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        _refuse(where, "device_traces: is no list of lists")
    blocks = list(_blocks(data["segments"], where, size_bytes))
    if (sum(map(len, traces)) + len(blocks)) * _LEAST_EVENT_BYTES > size_bytes:
        _refuse(where, f"its {size_bytes:,} bytes repeat few events very often")
    devices = {block.device for block in blocks} | {device for device, trace in enumerate(traces) if trace}
    if not devices:
        _refuse(where, "is empty: nothing was allocated or recorded")
    return tuple(
        _report(where, device, [b for b in blocks if b.device == device], _of(traces, device), data)
        for device in sorted(devices)
    )


def _report(
    where: str, device: int, blocks: list[SegmentBlock], events: list[Any], data: dict[str, Any]
) -> SnapshotReport:
    replay = MemoryReplay(where, device, events, blocks)
    peak = replay.peak()
    free = [block.size for block in blocks if block.state == "inactive"]
    inactive, largest = sum(free), max(free, default=0)
    settings = data.get("allocator_settings")
    known = {_text(key): _text(value) for key, value in settings.items()} if isinstance(settings, dict) else {}
    return SnapshotReport(
        file=where, device=device, peak_bytes=peak.num_bytes,
        parts=tuple(MemoryPart(category=c, num_bytes=b, num_allocations=n) for c, b, n in peak.parts),
        largest=tuple(LargestAllocation(category=c, num_bytes=b, where=at) for c, b, at in peak.largest),
        peak_time_us=peak.time_us, during=_during(data.get("external_annotations"), device, peak.time_us),
        baseline_bytes=replay.baseline_bytes, end_bytes=replay.end_bytes,
        reserved_at_peak_bytes=peak.reserved_bytes, peak_reserved_bytes=replay.peak_reserved_bytes,
        reserved_bytes=replay.reserved_bytes, inactive_bytes=inactive, largest_free_block_bytes=largest,
        awaiting_free_bytes=sum(b.size for b in blocks if b.state == "active_awaiting_free"),
        num_events=len(events), expandable_segments=_expandable(known, blocks), allocator_settings=known,
        out_of_memory=_out_of_memory(replay, inactive, largest), warnings=replay.warnings(),
    )  # fmt: skip


def _out_of_memory(replay: MemoryReplay, inactive: int, largest: int) -> SnapshotOutOfMemory | None:
    """The last time that the allocator gave up."""
    if replay.out_of_memory is None:
        return None
    requested, free = replay.out_of_memory
    return SnapshotOutOfMemory(
        requested_bytes=requested, device_free_bytes=free, inactive_bytes=inactive, largest_free_block_bytes=largest,
        fragmented=largest < requested <= inactive,
    )  # fmt: skip


def _blocks(segments: Sequence[Any], where: str, size_bytes: int) -> Iterator[SegmentBlock]:
    """Every block of every segment, with the addresses that segments imply where blocks have none."""
    count = 0
    for number, segment in enumerate(segments):
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            _refuse(where, f"segments[{number}]: has no blocks")
        count += 1 + len(segment["blocks"])
        if count * _LEAST_EVENT_BYTES > size_bytes:
            _refuse(where, f"its {size_bytes:,} bytes repeat few blocks very often")
        address = whole(segment, "address", where, f"segments[{number}]")
        device = whole(segment, "device", where, f"segments[{number}]", 0)
        for index, block in enumerate(segment["blocks"]):
            place = f"segments[{number}].blocks[{index}]"
            if not isinstance(block, dict):
                _refuse(where, f"{place}: is no mapping")
            size = whole(block, "size", where, place)
            at = whole(block, "address", where, place, address)
            yield SegmentBlock(
                device, at, size, whole(block, "requested_size", where, place, size), str(block.get("state"))[:40],
                block.get("frames"), bool(segment.get("is_expandable")),
            )  # fmt: skip
            address += size


def whole(entry: dict[str, Any], key: str, where: str, place: str, default: int | None = None) -> int:
    """A whole number of an entry; SpecError names the place of anything else."""
    value = entry.get(key, default)
    most = 2**64 if key == "address" else 2**48
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most:
        return value
    _refuse(where, f"{place}: {key}: {printable(repr(value)[:60], 40)} is no number of bytes")


def _refuse(where: str, problem: str) -> NoReturn:
    raise SpecError(f"{where}: {problem}", "name a file that torch.cuda.memory._dump_snapshot wrote")


def _of(traces: list[list[Any]], device: int) -> list[Any]:
    return traces[device] if device < len(traces) else []


def _text(value: object) -> str:
    return printable(str(value)[:100], 80)


def _expandable(settings: dict[str, str], blocks: Sequence[SegmentBlock]) -> bool | None:
    """True if segments grow in place, None where the snapshot does not say it."""
    if any(block.expandable for block in blocks):
        return True
    for key, value in settings.items():
        if "expandable_segments" in key:
            return value == "True"
        if "expandable_segments:True" in value:
            return True
    return None if not settings else False


def _during(annotations: Any, device: int, time_us: int | None) -> tuple[str, ...]:
    """Names of annotations that began before a time and did not end before it."""
    opened: dict[str, int] = {}
    for entry in annotations if isinstance(annotations, list) and time_us is not None else ():
        if not isinstance(entry, dict) or entry.get("device", device) != device:
            continue
        at, name = entry.get("time_us"), _text(entry.get("name"))
        if isinstance(at, int) and time_us is not None and at <= time_us:
            opened[name] = opened.get(name, 0) + (1 if str(entry.get("stage")).upper() == "START" else -1)
    return tuple(name for name, count in opened.items() if count > 0)[-5:]
