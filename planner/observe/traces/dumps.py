"""Pickles that torch dumps: memory snapshots, and the flight recorder's entries of each rank beside each other.

Allocations are told by the stack frames that the allocator recorded with each. Pickles that run code are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import SpecError
from planner.observe.observation import SavedPart
from planner.observe.traces.events import TABLES, is_whole, mappings, ranks_of
from planner.observe.traces.source import Progress, load_plain, trace_file
from planner.specs.base import Fields, Ints, Said, Texts, grouped, mapping
from planner.specs.expressions import texts_of
from planner.specs.reading import DUMP, label, parse_json, printable

UNATTRIBUTED = "unattributed"
"""Allocations without frames, such as those made before recording began."""
OTHER = "other"
"""Allocations with frames that no row knows."""
ROUNDING = "allocator rounding"
"""The allocator hands out multiples of 512 bytes."""

_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in TABLES["frames"].items()}
_IS_FORWARD = re.compile(r":(forward\w*|__call__|_call_impl|_wrapped_call_impl|call_\w*|.*::forward)$")
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_ACTIONS = {*_RESERVES, "alloc", "free_requested", "free_completed", "oom"}
BLOCK_BYTES = 512
"""torch's CUDACachingAllocator rounds every request up to a multiple of this (kMinBlockSize)."""
_NEVER = 2**62
_LEAST_EVENT_BYTES = 12
"""An address alone takes nine bytes of a pickle: more events than that are repetitions of one."""


@lru_cache(maxsize=2**16)
def _rows(filename: str, function: str) -> tuple[frozenset[str], bool]:
    """The categories whose pattern a frame matches, and whether it is of a forward pass."""
    text = f"{filename}:{function}"
    matching = frozenset(name for name, pattern in _PATTERNS.items() if pattern.search(text))
    return matching, _IS_FORWARD.search(text) is not None


def category_of(frames: Any) -> str:
    """The category of an allocation's stack; whatever is no list of frames counts as no stack."""
    if not isinstance(frames, (list, tuple)) or not frames:
        return UNATTRIBUTED
    found = [
        _rows(str(frame.get("filename", ""))[-200:], str(frame.get("name", ""))[:200])
        for frame in frames
        if isinstance(frame, dict)
    ]
    known = frozenset[str]().union(*(names for names, _ in found))
    in_forward = any(is_forward for _, is_forward in found)
    rows = (name for name in _PATTERNS if name in known)
    return next((name for name in rows if in_forward or not name.startswith("activations")), OTHER)


@dataclass(slots=True)
class LiveAllocation:
    """Memory from its first event to the one that frees it."""

    requested: int
    size: int
    frames: Any
    born: int
    died: int = _NEVER


class MemoryPart(SavedPart):
    """One category of the peak."""

    category: str
    num_bytes: int
    num_allocations: int


class SnapshotOutOfMemory(SavedPart):
    """The allocator gave up."""

    requested_bytes: int
    device_free_bytes: int | None
    inactive_bytes: int
    """Reserved and in no use when the snapshot was written."""
    largest_free_block_bytes: int
    fragmented: bool
    """True if what is reserved and unused would have held the request, and no block of it did."""


class SnapshotReport(SavedPart):
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
    warnings: Texts = ()


class MemoryReplay:
    """One device's events, from the baseline on."""

    def __init__(self, where: str, events: Sequence[Any], blocks: Sequence[Said]) -> None:
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
        if not isinstance(event, dict):
            raise _error(self._where, f"{place}: is no mapping")
        action = event.get("action")
        if not isinstance(action, str) or action not in _ACTIONS:
            return
        size = whole(event, "size", self._where, place) if action != "free_completed" else 0
        if action == "oom":
            free = event.get("device_free")
            self.failed = (size, free if isinstance(free, int) else None)
        elif action in _RESERVES:
            self._reserved_change[number] = _RESERVES[action] * size
        else:
            address = whole(event, "addr", self._where, place)
            rounded = -(-size // BLOCK_BYTES) * BLOCK_BYTES
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
        at = int(self.allocated.argmax())
        sums = defaultdict[str, list[int]](lambda: [0, 0])
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


def _report(where: str, device: int, blocks: Sequence[Said], events: list[Any]) -> SnapshotReport:
    replay = MemoryReplay(where, events, blocks)
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    inactive = sum(free)
    largest = max(free, default=0)
    oom = None
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


def _blocks(segments: Sequence[Any], where: str, size_bytes: int) -> Iterator[Fields]:
    """Every block of every segment, with the addresses that segments imply where blocks have none."""
    count = 0
    for number, segment in enumerate(segments):
        place = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise _error(where, f"{place}: has no blocks")
        count += 1 + len(segment["blocks"])
        if count * _LEAST_EVENT_BYTES > size_bytes:
            raise _error(where, f"its {size_bytes:,} bytes repeat few blocks very often")
        address = whole(segment, "address", where, place)
        device = whole(segment, "device", where, place, 0)
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


def whole(entry: Said, key: str, where: str, place: str, default: int | None = None) -> int:
    """A whole number of an entry; SpecError names the place of anything else."""
    value = entry.get(key, default)
    most = 2**64 if key.startswith("addr") else 2**48
    if is_whole(value, most):
        return value
    raise _error(where, f"{place}: {key}: {printable(repr(value)[:60], 40)} is no number of bytes")


def _error(where: str, problem: str) -> SpecError:
    return SpecError(f"{where}: {problem}", "name a file that torch.cuda.memory._dump_snapshot wrote")


_LEAST_ENTRY_BYTES = 40
"""An entry's numbers and times alone take more: a file with more entries repeats one."""
_RANK = re.compile(r"(\d{1,7})(?:\.\w+)?$")
_HINT = "name dumps that torch's flight recorder wrote, one a rank"
_OWN_SIZES = re.compile(r"_?(broadcast|scatter|gather|reduce)|_?all_?to_?all.*")
"""Collectives whose ranks may give sizes of their own."""


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective on one rank."""

    rank: int
    sequence: int
    collective: str
    dtype: str
    sizes: str
    done: bool
    created_ns: int
    where: str


@dataclass(frozen=True, slots=True)
class FlightDump:
    """Entries that one rank recorded, by (name, description) of the group; and the ranks of groups by name."""

    rank: int
    entries: dict[tuple[str, str], list[RecordedCollective]]
    members: dict[str, Ints]


class Outstanding(SavedPart):
    """A collective that at least one rank began and has not ended."""

    sequence: int
    collective: str
    waiting: Ints
    """Ranks that called it."""
    missing: Ints
    """Ranks of the group, with a dump, that did not: the likely culprits."""
    where: str
    """File, line and function of the first waiting rank's call."""


class Mismatch(SavedPart):
    """One collective that ranks called in different ways."""

    sequence: int
    field: str
    """`collective`, `dtype` or `sizes`."""
    values: dict[int, str]
    """The value of each rank."""


class FlightGroup(SavedPart):
    """One process group in all dumps."""

    name: str
    description: str
    ranks: Ints
    """Its members as its dumps say them, else the ranks whose dumps have entries of it."""
    last_enqueued: dict[int, int]
    last_completed: dict[int, int]
    outstanding: tuple[Outstanding, ...]
    mismatches: tuple[Mismatch, ...]


class FlightReport(SavedPart):
    """Groups in the dumps of some ranks, and the likely cause of a hang."""

    ranks: Ints
    missing_ranks: Ints
    """Members of groups without a dump: they may have died, or were not given."""
    groups: tuple[FlightGroup, ...]
    verdict: str
    warnings: Texts = ()


def read_flight_recorder(paths: Sequence[str | Path]) -> FlightReport:
    """Hold the dumps of a job's ranks beside each other. Raises SpecError for other files, and for two of one rank."""
    dumps = [_dump(path, number, len(paths)) for number, path in enumerate(paths)]
    ranks = tuple(sorted(dump.rank for dump in dumps))
    twice = next((a for a, b in pairwise(ranks) if a == b), None)
    if twice is not None:
        raise SpecError(f"flight recorder: two dumps are of rank {twice}", "keep one of them")
    groups = tuple(_group(key, dumps) for key in sorted({key for dump in dumps for key in dump.entries}))
    missing = {rank for group in groups for rank in group.ranks} - set(ranks)
    return FlightReport(ranks=ranks, missing_ranks=tuple(sorted(missing)), groups=groups, verdict=_verdict(groups))


def _dump(path: str | Path, number: int, num_files: int) -> FlightDump:
    """The dump of one rank, which the dump or the file's name says."""
    where = label(path)
    with trace_file(path) as source:
        is_pickle = source.read(1) == b"\x80"
    if is_pickle:
        data, size_bytes = load_plain(path)
    else:
        with trace_file(path) as source:
            text = source.read_all(DUMP.num_bytes)
        data = parse_json(text, where, _HINT, DUMP, keeps_last=True)
        size_bytes = len(text)
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise SpecError(f"{where}: holds no `entries`: it is no flight-recorder dump", _HINT)
    if len(data["entries"]) * _LEAST_ENTRY_BYTES > size_bytes:
        raise SpecError(f"{where}: its {size_bytes:,} bytes repeat few entries very often", _HINT)
    rank = _rank(data, where, number, num_files)
    entries = defaultdict(list)
    for index, raw in enumerate(data["entries"]):
        if not isinstance(raw, dict):
            raise SpecError(f"{where}: entries[{index}]: is no mapping", _HINT)
        group = raw.get("process_group")
        pair = (_text(group[0]), _text(group[1])) if isinstance(group, (list, tuple)) and len(group) == 2 else ("?", "")
        if raw.get("is_p2p") is not True:
            entries[pair].append(_entry(raw, rank))
    configured = mappings(list(mapping(data.get("pg_config")).values()))
    members = {_text(one.get("name")): ranks_of(one.get("ranks")) for one in configured}
    return FlightDump(rank, dict(entries), members)


def _rank(data: Fields, where: str, number: int, num_files: int) -> int:
    said = data.get("rank")
    if is_whole(said, 10**7):
        return said
    if match := _RANK.search(Path(where).name):
        return int(match[1])
    if num_files == 1:
        return number
    raise SpecError(f"{where}: neither the dump nor its name says its rank", "name it with the rank at the end: nccl_3")


def _entry(raw: Fields, rank: int) -> RecordedCollective:
    frames = raw.get("frames")
    frame = mapping(frames[0] if isinstance(frames, list) and frames else None)
    file = str(frame.get("filename", "")).rpartition("/")[2]
    name = _text(raw.get("profiling_name"))
    sequence, created_ns = (
        said if is_whole(said := raw.get(key)) else 0 for key in ("collective_seq_id", "time_created_ns")
    )
    return RecordedCollective(
        rank, sequence, name.partition(":")[2] or name, _text(raw.get("input_dtypes")),
        _text(raw.get("input_sizes")), raw.get("state") == "completed" or raw.get("retired") is True,
        created_ns, _text(f"{file}:{frame.get('line')}:{frame.get('name')}") if file else "",
    )  # fmt: skip


def _text(value: object) -> str:
    return printable(str(value)[:120], 120)


def _group(key: tuple[str, str], dumps: Sequence[FlightDump]) -> FlightGroup:
    of_rank = {
        dump.rank: dump.entries[key] for dump in sorted(dumps, key=lambda dump: dump.rank) if key in dump.entries
    }
    present = list(of_rank)
    said = next((dump.members[key[0]] for dump in dumps if dump.members.get(key[0])), ())
    ordered = sorted(chain(*of_rank.values()), key=lambda entry: entry.sequence)
    by_sequence = grouped((entry.sequence, entry) for entry in ordered)
    completed = {rank: max((e.sequence for e in own if e.done), default=0) for rank, own in of_rank.items()}
    # a rank whose ring begins later has called a collective and forgotten it
    first_kept = {dump.rank: 0 for dump in dumps if dump.rank in (said or present)}
    first_kept |= {rank: min(e.sequence for e in own) for rank, own in of_rank.items() if rank in first_kept}
    outstanding = []
    for number, called in by_sequence.items():
        waiting = [e for e in called if not e.done and completed[e.rank] < number]
        absent = sorted({rank for rank, first in first_kept.items() if first <= number} - {e.rank for e in called})
        if waiting:
            first = min(waiting, key=lambda e: e.created_ns)
            outstanding.append(
                Outstanding(
                    sequence=number, collective=first.collective, waiting=tuple(sorted(e.rank for e in waiting)),
                    missing=tuple(absent), where=first.where,
                )
            )  # fmt: skip
    return FlightGroup(
        name=key[0], description=key[1], ranks=tuple(sorted(said or present)),
        last_enqueued={rank: max(e.sequence for e in own) for rank, own in of_rank.items()}, last_completed=completed,
        outstanding=tuple(outstanding),
        mismatches=tuple(m for number, called in by_sequence.items() for m in _mismatches(number, called)),
    )  # fmt: skip


def _mismatches(number: int, called: list[RecordedCollective]) -> Iterator[Mismatch]:
    """The first field in which ranks differ; sizes may differ where a root gives or takes them."""
    values = {"collective": {e.rank: e.collective for e in called}, "dtype": {e.rank: e.dtype for e in called}}
    if not any(_OWN_SIZES.fullmatch(e.collective) for e in called):
        values["sizes"] = {e.rank: e.sizes for e in called}
    field = next((field for field, of_rank in values.items() if len(set(of_rank.values())) > 1), None)
    if field is not None:
        yield Mismatch(sequence=number, field=field, values=values[field])


def _verdict(groups: Sequence[FlightGroup]) -> str:
    """The likely cause of a hang in one sentence."""
    differing = [(_name(group), mismatch) for group in groups for mismatch in group.mismatches]
    waiting = [(_name(group), waits) for group in groups for waits in group.outstanding]
    differs, waits = next(iter(differing), None), min(waiting, key=lambda pair: not pair[1].missing, default=None)
    names = {"differs": differs, "waits": waits, "map": map}
    return texts_of(TABLES["verdicts"], names)[0]


def _name(group: FlightGroup) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")
