"""Allocations by what they hold, told from the stack frames that the allocator recorded with each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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

    def of(self, frames: Any) -> int:
        """The index in CATEGORIES of a stack; whatever is no list of frames counts as no stack."""
        if not isinstance(frames, (list, tuple)) or not frames:
            return len(FRAME_PATTERNS) + 1
        known = self._of_stack.get(id(frames))
        if known is None:
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
_LEAST_EVENT_BYTES = 12
"""An address alone takes nine bytes of a pickle: more events than that are repetitions of one."""


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
    baseline_bytes: int
    """Allocated before the first recorded event and alive at it."""
    end_bytes: int
    reserved_at_peak_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    """At the end, as the following."""
    inactive_bytes: int
    largest_free_block_bytes: int
    num_events: int
    expandable_segments: bool | None
    out_of_memory: SnapshotOutOfMemory | None
    warnings: tuple[str, ...] = ()


class MemoryReplay:
    """One device's events, from the baseline on."""

    def __init__(self, where: str, device: int, events: Sequence[Any], blocks: Sequence[SegmentBlock]) -> None:
        self._where, self._device = where, device
        self._categories = FrameCategories()
        self.allocations: list[LiveAllocation] = []
        self._live: dict[int, LiveAllocation] = {}
        self._reserved_change = np.zeros(len(events) + 1, np.int64)
        self.out_of_memory: tuple[int, int | None] | None = None
        for number, event in enumerate(events, 1):
            self._play(number, event)
        for block in blocks:  # those in use that no event allocated are of the baseline
            if block.state == "active_allocated":
                live = self._live.get(block.address)
                if live is None:
                    self._allocate(block.requested_size, block.size, block.frames, 0)
                else:  # the block itself says its size
                    live.size = max(live.size, block.size)
        self.reserved_bytes = sum(block.size for block in blocks)
        reserves = sum(abs(change) for change in self._reserved_change.tolist())
        if sum(a.size for a in self.allocations) + self.reserved_bytes + reserves >= _NEVER:  # 63 bits
            raise self._broken(len(events), "no GPU has that many bytes in all")
        later = np.cumsum(self._reserved_change[::-1])[::-1] - self._reserved_change
        self.reserved = self.reserved_bytes - later
        change = np.zeros(len(events) + 1, np.int64)
        for allocation in self.allocations:
            change[allocation.born] += allocation.size
            if allocation.died < _NEVER:
                change[allocation.died] -= allocation.size
        self.allocated = np.cumsum(change)
        """Bytes after each event; entry 0 is the baseline."""

    def _play(self, number: int, event: Any) -> None:
        if not isinstance(event, dict):
            raise self._broken(number, "is no mapping")
        action = event.get("action")
        if action not in ("alloc", "free_requested", "free_completed", "oom") and not (
            isinstance(action, str) and action in _RESERVES
        ):
            return
        size = self._number(number, event, "size") if action != "free_completed" else 0
        rounded = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if action == "oom":
            free = event.get("device_free")
            self.out_of_memory = (size, free if isinstance(free, int) else None)
        elif action in _RESERVES:
            self._reserved_change[number] = _RESERVES[action] * size
        else:
            address = self._number(number, event, "addr")
            if (old := self._live.pop(address, None)) is not None:  # freed, or the ring lost what freed it
                old.died = number
            elif action == "free_requested":  # allocated before the first event
                self._allocate(size, rounded, None, 0).died = number
            if action == "alloc":
                self._live[address] = self._allocate(size, rounded, event.get("frames"), number)

    def _allocate(self, requested: int, size: int, frames: Any, born: int) -> LiveAllocation:
        allocation = LiveAllocation(requested, size, self._categories.of(frames), frames, born)
        self.allocations.append(allocation)
        return allocation

    def peak(self) -> tuple[tuple[MemoryPart, ...], tuple[LargestAllocation, ...]]:
        """All that lives at the largest moment, the first of several, by category; and the largest of it."""
        at = int(self.allocated.argmax())
        live = [a for a in self.allocations if a.born <= at < a.died]
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for allocation in live:
            of_category = sums[CATEGORIES[allocation.category]]
            of_category[0] += allocation.requested
            of_category[1] += 1
        if rounding := sum(a.size - a.requested for a in live):
            sums[ROUNDING] = [rounding, 0]
        ordered = sorted(sums.items(), key=lambda item: -item[1][0])
        largest = sorted(live, key=lambda a: -a.requested)[:NUM_LARGEST]
        return tuple(MemoryPart(category=c, num_bytes=b, num_allocations=n) for c, (b, n) in ordered), tuple(
            LargestAllocation(category=CATEGORIES[a.category], num_bytes=a.requested, where=_innermost(a.frames))
            for a in largest
        )

    def _number(self, number: int, event: dict[str, Any], key: str) -> int:
        value = event.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48 + (key == "addr") * 2**63:
            return value
        raise self._broken(number, f"{key}: {printable(repr(value)[:60], 40)} is no number of bytes")

    def _broken(self, number: int, problem: str) -> SpecError:
        return _error(self._where, f"device_traces[{self._device}][{number - 1}]: {problem}")


def _innermost(frames: Any) -> str:
    """File, line and function of the innermost frame that is Python."""
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        if isinstance(frame, dict) and str(frame.get("filename", "")).endswith(_PYTHON):
            file = str(frame["filename"]).rpartition("/")[2]
            return printable(f"{file}:{frame.get('line')}:{frame.get('name')}"[:120], 120)
    return ""


def read_snapshot(path: str | Path, progress: Progress | None = None) -> tuple[SnapshotReport, ...]:
    """Replay a snapshot for each device that it has events or segments of; SpecError for any other file."""
    where = label(path)
    data, size_bytes = load_plain(path, progress)
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise _error(where, "holds no `segments`: it is no memory snapshot")
    traces = data.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise _error(where, "device_traces: is no list of lists")
    blocks = list(_blocks(data["segments"], where, size_bytes))
    if (sum(map(len, traces)) + len(blocks)) * _LEAST_EVENT_BYTES > size_bytes:
        raise _error(where, f"its {size_bytes:,} bytes repeat few events very often")
    devices = {block.device for block in blocks} | {device for device, trace in enumerate(traces) if trace}
    if not devices:
        raise _error(where, "is empty: nothing was allocated or recorded")
    settings = str(data.get("allocator_settings") or "")
    return tuple(
        _report(where, device, [b for b in blocks if b.device == device], (traces[device:] or [[]])[0], settings)
        for device in sorted(devices)
    )


def _report(where: str, device: int, blocks: list[SegmentBlock], events: list[Any], settings: str) -> SnapshotReport:
    replay = MemoryReplay(where, device, events, blocks)
    (parts, largest), at = replay.peak(), int(replay.allocated.argmax())
    free = [block.size for block in blocks if block.state == "inactive"]
    inactive, largest_free = sum(free), max(free, default=0)
    oom = None
    if replay.out_of_memory is not None:
        requested, device_free = replay.out_of_memory
        oom = SnapshotOutOfMemory(
            requested_bytes=requested, device_free_bytes=device_free, inactive_bytes=inactive,
            largest_free_block_bytes=largest_free, fragmented=largest_free < requested <= inactive,
        )  # fmt: skip
    grows = any(block.expandable for block in blocks) or re.search(r"expandable_segments\W{1,4}True", settings)
    baseline = int(replay.allocated[0])
    says = "recording began after allocations were made, or its ring was full: the baseline has no frames"
    return SnapshotReport(
        file=where, device=device, peak_bytes=int(replay.allocated[at]), parts=parts, largest=largest,
        baseline_bytes=baseline, end_bytes=int(replay.allocated[-1]), reserved_at_peak_bytes=int(replay.reserved[at]),
        peak_reserved_bytes=int(replay.reserved.max()), reserved_bytes=replay.reserved_bytes, inactive_bytes=inactive,
        largest_free_block_bytes=largest_free, num_events=len(events),
        expandable_segments=True if grows else False if settings else None, out_of_memory=oom,
        warnings=(says,) if baseline else (),
    )  # fmt: skip


def _blocks(segments: Sequence[Any], where: str, size_bytes: int) -> Iterator[SegmentBlock]:
    """Every block of every segment, with the addresses that segments imply where blocks have none."""
    count = 0
    for number, segment in enumerate(segments):
        place = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise _error(where, f"{place}: has no blocks")
        count += 1 + len(segment["blocks"])
        if count * _LEAST_EVENT_BYTES > size_bytes:
            raise _error(where, f"its {size_bytes:,} bytes repeat few blocks very often")
        address, device = whole(segment, "address", where, place), whole(segment, "device", where, place, 0)
        for index, block in enumerate(segment["blocks"]):
            of_block = f"{place}.blocks[{index}]"
            if not isinstance(block, dict):
                raise _error(where, f"{of_block}: is no mapping")
            size = whole(block, "size", where, of_block)
            yield SegmentBlock(
                device, whole(block, "address", where, of_block, address), size,
                whole(block, "requested_size", where, of_block, size), str(block.get("state"))[:40],
                block.get("frames"), bool(segment.get("is_expandable")),
            )  # fmt: skip
            address += size


def whole(entry: dict[str, Any], key: str, where: str, place: str, default: int | None = None) -> int:
    """A whole number of an entry; SpecError names the place of anything else."""
    value = entry.get(key, default)
    most = 2**64 if key == "address" else 2**48
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most:
        return value
    raise _error(where, f"{place}: {key}: {printable(repr(value)[:60], 40)} is no number of bytes")


def _error(where: str, problem: str) -> SpecError:
    return SpecError(f"{where}: {problem}", "name a file that torch.cuda.memory._dump_snapshot wrote")
