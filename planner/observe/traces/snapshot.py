"""Allocations by what they hold, told from the stack frames that the allocator recorded with each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import SpecError
from planner.observe.traces.source import Progress, load_plain
from planner.specs.base import Spec
from planner.specs.reading import label, printable

UNATTRIBUTED = "unattributed"
"""Allocations without frames, such as those made before recording began."""
OTHER = "other"
"""Allocations with frames that no row knows."""
ROUNDING = "allocator rounding"
"""The allocator hands out multiples of 512 bytes."""

_FORWARD = r":(forward\w*|__call__|_call_impl|_wrapped_call_impl|call_\w*|.*::forward)$"
FRAME_PATTERNS = (
    ("optimizer", r"(distrib\w*_)?optimizer\w*\.py:|/optim/|fused_adam|/muon|adamw?\.py:|emerging_optimizers", False),
    ("gradients", r"param_and_grad_buffer|accumulate_?grad|AccumulateGrad|grad_buffer|main_grad|foreach_reduce", False),
    (
        "gathered parameters",
        r"foreach_all_gather|_fsdp_param\w*\.py:(init_)?all_gather|unshard|fully_shard_param",
        False,
    ),
    ("communication", r"nccl|c10d|deep_ep|fused_a2a|nvshmem|symm_mem", False),
    ("activations: loss and logits", r"cross_entropy|vocab_parallel|nll_loss|lm_head|output_layer|logits", True),
    ("activations: MoE", r"moe|experts?[_.:/]|router|token_dispatch", True),
    ("activations: attention", r"attention|attn|scaled_dot_product|rotary|rope|sdpa", True),
    ("activations: MLP", r"mlp|feed_?forward|ffn|swiglu|silu", True),
    ("activations: norm", r"norm", True),
    ("activations: embedding", r"embedding", True),
    ("activations: other modules", r".", True),
    ("parameters", r":(__init__|_apply|reset_parameters|load_state_dict|to_empty|get_model|build_model|to)$", False),
    ("backward", r"Engine::|autograd|backward|::apply", False),
    ("data", r"data_?loader|get_batch|dataset", False),
)
"""(category, pattern of one of its frames as `file:function`, whether a forward pass must be below it)."""
_PATTERNS = tuple(re.compile(pattern, re.IGNORECASE) for _, pattern, _ in FRAME_PATTERNS)
_IS_FORWARD = re.compile(_FORWARD)
_FORWARD_BIT = 1 << len(FRAME_PATTERNS)
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
BLOCK_BYTES = 512
"""torch's CUDACachingAllocator rounds every request up to a multiple of this (kMinBlockSize)."""
_NEVER = 2**62
_LEAST_EVENT_BYTES = 12
"""An address alone takes nine bytes of a pickle: more events than that are repetitions of one."""


@lru_cache(maxsize=2**16)
def _bits(filename: str, function: str) -> int:
    """The rows of `FRAME_PATTERNS` that a frame matches, and whether it is of a forward pass, as bits."""
    text = f"{filename}:{function}"
    bits = sum(1 << index for index, pattern in enumerate(_PATTERNS) if pattern.search(text))
    return bits | (_FORWARD_BIT if _IS_FORWARD.search(text) else 0)


def category_of(frames: Any) -> str:
    """The category of an allocation's stack; whatever is no list of frames counts as no stack."""
    if not isinstance(frames, (list, tuple)) or not frames:
        return UNATTRIBUTED
    bits = 0
    for frame in frames:
        if isinstance(frame, dict):
            bits |= _bits(str(frame.get("filename", ""))[-200:], str(frame.get("name", ""))[:200])
    rows = (row for index, row in enumerate(FRAME_PATTERNS) if bits & (1 << index))
    return next((category for category, _, in_forward in rows if bits & _FORWARD_BIT or not in_forward), OTHER)


@dataclass(slots=True)
class LiveAllocation:
    """Memory from its first event to the one that frees it."""

    requested: int
    size: int
    frames: Any
    born: int
    died: int = _NEVER


class MemoryPart(Spec):
    """One category of the peak."""

    category: str
    num_bytes: int
    num_allocations: int


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
    baseline_bytes: int
    """Allocated before the first recorded event and alive at it."""
    end_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    """At the end, as the following."""
    inactive_bytes: int
    largest_free_block_bytes: int
    out_of_memory: SnapshotOutOfMemory | None
    warnings: tuple[str, ...] = ()


class MemoryReplay:
    """One device's events, from the baseline on."""

    def __init__(self, where: str, events: Sequence[Any], blocks: Sequence[Mapping[str, Any]]) -> None:
        self._where = where
        self.allocations: list[LiveAllocation] = []
        self._live: dict[int, LiveAllocation] = {}
        self._reserved_change = np.zeros(len(events) + 1, np.int64)
        self.failed: tuple[int, int | None] | None = None
        """Bytes of the last request that was refused, and free on the device."""
        for number, event in enumerate(events, 1):
            self._play(number, event)
        for block in blocks:  # those in use that no event allocated are of the baseline
            if block["state"] == "active_allocated":
                live = self._live.get(block["address"])
                if live is None:
                    self._allocate(block["requested_size"], block["size"], block["frames"], 0)
                else:  # the block itself says its size
                    live.size = max(live.size, block["size"])
        self.reserved_bytes = sum(block["size"] for block in blocks)
        reserves = sum(abs(change) for change in self._reserved_change.tolist())
        if sum(a.size for a in self.allocations) + self.reserved_bytes + reserves >= _NEVER:  # 63 bits
            raise _error(where, "no GPU has that many bytes in all")
        later = np.cumsum(self._reserved_change[::-1])[::-1] - self._reserved_change
        self.peak_reserved_bytes = int((self.reserved_bytes - later).max())
        change = np.zeros(len(events) + 1, np.int64)
        for allocation in self.allocations:
            change[allocation.born] += allocation.size
            if allocation.died < _NEVER:
                change[allocation.died] -= allocation.size
        self.allocated = np.cumsum(change)
        """Bytes after each event; entry 0 is the baseline."""

    def _play(self, number: int, event: Any) -> None:
        place = f"device_traces[…][{number - 1}]"
        action = event.get("action") if isinstance(event, dict) else None
        if not isinstance(event, dict):
            raise _error(self._where, f"{place}: is no mapping")
        if not isinstance(action, str) or action not in {
            *_RESERVES,
            "alloc",
            "free_requested",
            "free_completed",
            "oom",
        }:
            return
        size = whole(event, "size", self._where, place) if action != "free_completed" else 0
        if action == "oom":
            free = event.get("device_free")
            self.failed = (size, free if isinstance(free, int) else None)
        elif action in _RESERVES:
            self._reserved_change[number] = _RESERVES[action] * size
        else:
            address, rounded = whole(event, "addr", self._where, place), -(-size // BLOCK_BYTES) * BLOCK_BYTES
            if (old := self._live.pop(address, None)) is not None:  # freed, or the ring lost what freed it
                old.died = number
            elif action == "free_requested":  # allocated before the first event
                self._allocate(size, rounded, None, 0).died = number
            if action == "alloc":
                self._live[address] = self._allocate(size, rounded, event.get("frames"), number)

    def _allocate(self, requested: int, size: int, frames: Any, born: int) -> LiveAllocation:
        self.allocations.append(LiveAllocation(requested, size, frames, born))
        return self.allocations[-1]

    def parts(self) -> tuple[MemoryPart, ...]:
        """All that lives at the largest moment, the first of several, by category, the largest first."""
        at, sums = int(self.allocated.argmax()), defaultdict[str, list[int]](lambda: [0, 0])
        for one in self.allocations:
            if one.born <= at < one.died:
                of_category = sums[category_of(one.frames)]
                of_category[0] += one.requested
                of_category[1] += 1
                sums[ROUNDING][0] += one.size - one.requested
        ordered = sorted(sums.items(), key=lambda item: -item[1][0])
        return tuple(MemoryPart(category=c, num_bytes=size, num_allocations=n) for c, (size, n) in ordered if size)


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
    devices = {block["device"] for block in blocks} | {device for device, trace in enumerate(traces) if trace}
    if not devices:
        raise _error(where, "is empty: nothing was allocated or recorded")
    return tuple(
        _report(where, device, [b for b in blocks if b["device"] == device], (traces[device:] or [[]])[0])
        for device in sorted(devices)
    )


def _report(where: str, device: int, blocks: Sequence[Mapping[str, Any]], events: list[Any]) -> SnapshotReport:
    replay = MemoryReplay(where, events, blocks)
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    inactive, largest, oom = sum(free), max(free, default=0), None
    if replay.failed is not None:
        requested, device_free = replay.failed
        oom = SnapshotOutOfMemory(
            requested_bytes=requested, device_free_bytes=device_free, inactive_bytes=inactive,
            largest_free_block_bytes=largest, fragmented=largest < requested <= inactive,
        )  # fmt: skip
    baseline = int(replay.allocated[0])
    says = "recording began after allocations were made, or its ring was full: the baseline has no frames"
    return SnapshotReport(
        file=where, device=device, peak_bytes=int(replay.allocated.max()), parts=replay.parts(),
        baseline_bytes=baseline, end_bytes=int(replay.allocated[-1]), peak_reserved_bytes=replay.peak_reserved_bytes,
        reserved_bytes=replay.reserved_bytes, inactive_bytes=inactive, largest_free_block_bytes=largest,
        out_of_memory=oom, warnings=(says,) if baseline else (),
    )  # fmt: skip


def _blocks(segments: Sequence[Any], where: str, size_bytes: int) -> Iterator[dict[str, Any]]:
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
            yield {
                "device": device, "address": whole(block, "address", where, of_block, address), "size": size,
                "requested_size": whole(block, "requested_size", where, of_block, size),
                "state": block.get("state"), "frames": block.get("frames"),
            }  # fmt: skip
            address += size


def whole(entry: Mapping[str, Any], key: str, where: str, place: str, default: int | None = None) -> int:
    """A whole number of an entry; SpecError names the place of anything else."""
    value = entry.get(key, default)
    most = 2**64 if key.startswith("addr") else 2**48
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most:
        return value
    raise _error(where, f"{place}: {key}: {printable(repr(value)[:60], 40)} is no number of bytes")


def _error(where: str, problem: str) -> SpecError:
    return SpecError(f"{where}: {problem}", "name a file that torch.cuda.memory._dump_snapshot wrote")
