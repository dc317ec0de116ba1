"""Memory snapshots of torch's CUDA allocator: the peak by what holds it, what is reserved beside, and why it broke.

`torch.cuda.memory._dump_snapshot` writes segments as they are at the end and the newest events before. Replay: what is
freed without an allocation, and what lives in a segment without one, was there from the start (the baseline). An
allocation counts from `alloc` to `free_requested`, as `max_memory_allocated` counts; until `free_completed` its block
waits for other streams. Events say requested bytes; blocks are multiples of 512.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field

from planner.errors import SpecError
from planner.observe.traces.memory.replay import Block, Replay
from planner.observe.traces.pickles import load_plain
from planner.observe.traces.source import Progress
from planner.specs.base import Spec
from planner.specs.reading import label, printable

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


class OutOfMemory(Spec):
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
    out_of_memory: OutOfMemory | None
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


def _report(where: str, device: int, blocks: list[Block], events: list[Any], data: dict[str, Any]) -> SnapshotReport:
    replay = Replay(where, device, events, blocks)
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


def _out_of_memory(replay: Replay, inactive: int, largest: int) -> OutOfMemory | None:
    """The last time that the allocator gave up."""
    if replay.out_of_memory is None:
        return None
    requested, free = replay.out_of_memory
    return OutOfMemory(
        requested_bytes=requested, device_free_bytes=free, inactive_bytes=inactive, largest_free_block_bytes=largest,
        fragmented=largest < requested <= inactive,
    )  # fmt: skip


def _blocks(segments: Sequence[Any], where: str, size_bytes: int) -> Iterator[Block]:
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
            yield Block(
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


def _expandable(settings: dict[str, str], blocks: Sequence[Block]) -> bool | None:
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
