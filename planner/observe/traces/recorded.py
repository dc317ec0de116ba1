"""Profiler traces, memory snapshots and flight-recorder dumps of one run, and the observation that they amount to.

Bus rate = bytes × factor ÷ seconds, with factor 2(n − 1)/n for an all-reduce of n ranks, (n − 1)/n for gather, scatter
and all-to-all on the full size, and 1 for broadcasts and transfers, as nccl-tests define it.

The n-th collective of a group is the same one on all of its ranks. A collective cannot move data before its last rank
has come: from the latest start to a rank's end is transfer, what comes before on that rank is wait. Clocks of hosts
differ by more than a collective takes, so they are aligned first, by the ends of shared collectives, which are close.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from planner.errors import SpecError
from planner.observe.observation import JobFacts, Observation, Observed, ObservedMemory, SavedPart, SourceFile
from planner.observe.traces.breakdown import NS, Sorted, break_down, step_windows
from planner.observe.traces.dumps import FlightReport, SnapshotReport, read_flight_recorder, read_snapshot
from planner.observe.traces.events import (
    HOST,
    OPTIMIZER,
    PLANNED,
    TABLES,
    Call,
    CollectiveTime,
    Grid,
    RankReport,
    RankTrace,
    TraceReport,
    TraceStep,
    axis_of_description,
)
from planner.observe.traces.source import Progress, read_kineto, trace_file
from planner.specs.base import Named, Texts, filled, grouped
from planner.specs.expressions import texts_of
from planner.specs.reading import STDIN

_COLLECTIVE_PATTERNS = [(kind, re.compile(text, re.IGNORECASE)) for kind, text in TABLES["collectives"].items()]
OTHER_KIND = "other"


def collective_of(name: str) -> str:
    """The kind of collective that a name speaks of."""
    return next((kind for kind, pattern in _COLLECTIVE_PATTERNS if pattern.search(name)), OTHER_KIND)


def bus_factor(kind: str, size: int) -> float:
    """The part of the bytes that crosses each rank's link, times the rounds."""
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if kind in ("reduce_scatter", "all_gather", "all_to_all") else 1.0


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element, None for a name that is not known."""
    lowered = dtype.lower()
    return 1 if lowered.startswith("float8") else TABLES["dtype_bytes"].get(lowered)


def collective_times(
    events: Sorted, transfer_ns: Mapping[int, int], wait_ns: Mapping[int, int]
) -> tuple[CollectiveTime, ...]:
    """Every kind of exchange of one rank, the longest in total first.

    `transfer_ns` and `wait_ns`, of an event's index, are what peers' traces separate.
    """
    trace = events.trace
    indices = defaultdict(list)
    for index in np.flatnonzero(events.group >= 0).tolist():
        call = _call(trace, index)
        width = None if call is None else element_bytes(call.dtype)
        group = None if call is None else trace.groups.get(call.group)
        num_bytes = call.num_elements * width if call and width and call.num_elements else None
        form = events.labels[events.group[index]], _kind(trace, index), num_bytes, group.size if group else None
        indices[form].append(index)
    lengths: NDArray[np.int64] = trace.gpu["end"] - trace.gpu["start"]
    times = []
    for (label, kind, num_bytes, size), chosen in indices.items():
        waited, separated = ([told[index] for index in chosen if index in told] for told in (wait_ns, transfer_ns))
        median_s = float(np.median(lengths[chosen])) * NS
        transfer_s = float(np.median(separated)) * NS if separated else None
        seconds = transfer_s or median_s
        moved = num_bytes * bus_factor(kind, size) if num_bytes and size and size > 1 else 0.0
        times.append(
            CollectiveTime(
                group=label, collective=kind, num_bytes=num_bytes, group_size=size, count=len(chosen),
                median_s=median_s, transfer_s=transfer_s, wait_s=float(np.mean(waited)) * NS if waited else None,
                bus_gb_per_s=moved / seconds / 1e9 if moved and seconds else None, at_least=transfer_s is None,
            )
        )  # fmt: skip
    return tuple(sorted(times, key=lambda row: -row.median_s * row.count))


def _call(trace: RankTrace, index: int) -> Call | None:
    """The exchange as an event says it; None for a kernel that says nothing but its name."""
    call = int(trace.gpu["call"][index])
    return trace.calls[call] if call >= 0 else None


def _kind(trace: RankTrace, index: int) -> str:
    """The kind of collective that an event says, else that of its kernel's name."""
    call = _call(trace, index)
    kind = OTHER_KIND if call is None else collective_of(call.collective)
    return kind if kind != OTHER_KIND else collective_of(trace.names[trace.gpu["name"][index]])


_ENDS_TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}

SharedKey = tuple[object, ...]


class PeerTimes(NamedTuple):
    """Waits and transfers that traces tell of each other, by the rank's place in the list and the event's index."""

    transfer_ns: list[dict[int, int]]
    wait_ns: list[dict[int, int]]
    clock_error_s: float | None
    num_matched: int


def peer_times(ranks: Sequence[Sorted]) -> PeerTimes:
    """Match the collectives of all ranks and cut each into wait and transfer."""
    shared = [entries for entries in _matched(ranks) if len(entries) > 1]
    offsets, error_s = _clocks(ranks, shared)
    transfers, waits = ([dict[int, int]() for _ in ranks] for _ in range(2))
    for entries in shared:
        starts = [int(ranks[rank].trace.gpu["start"][index]) + offsets[rank] for rank, index in entries]
        for (rank, index), start in zip(entries, starts, strict=True):
            gpu = ranks[rank].trace.gpu
            length = int(gpu["end"][index] - gpu["start"][index])
            waits[rank][index] = min(max(starts) - start, length)
            transfers[rank][index] = length - waits[rank][index]
    return PeerTimes(transfers, waits, error_s, len(shared))


def _matched(ranks: Sequence[Sorted]) -> Iterable[list[tuple[int, int]]]:
    """Lists of (rank's place, event's index) that are one exchange, of groups whose ranks did equally many."""
    of_ranks = (
        grouped((_shared_key(events, index), (place, index)) for index in np.flatnonzero(events.group >= 0).tolist())
        for place, events in enumerate(ranks)
    )
    found = grouped((key, entries) for mine in of_ranks for key, entries in mine.items() if key is not None)
    for lists in found.values():
        if len({len(entries) for entries in lists}) == 1:
            yield from ([entries[number] for entries in lists] for number in range(len(lists[0])))


def _shared_key(events: Sorted, index: int) -> SharedKey | None:
    """The key that ranks share of one exchange; None where the trace does not say its ranks."""
    trace = events.trace
    call, kind = _call(trace, index), _kind(trace, index)
    if call is None:
        return ("world", kind) if _all_in_one(trace) else None
    group = trace.groups.get(call.group)
    if group is None or len(group.ranks) < 2:
        return None
    if call.peers is not None:
        return (group.ranks, group.description, "send_recv", call.peers)
    if kind == "send_recv" and len(group.ranks) > 2:
        return None  # whose peer is whose is not said
    return (group.ranks, group.description, kind, call.num_elements if kind != "send_recv" else 0)


def _all_in_one(trace: RankTrace) -> bool:
    """True if every group holds all ranks, so that a collective that names no group is of all of them."""
    size = trace.world_size or 0
    groups = [group.ranks for group in trace.groups.values() if group.size != 1]
    return size == 2 or (bool(groups) and all(ranks == tuple(range(size)) for ranks in groups))


def _clocks(ranks: Sequence[Sorted], shared: Sequence[list[tuple[int, int]]]) -> tuple[list[int], float | None]:
    """Nanoseconds to add to each rank's times so that shared collectives end together, and the median misfit.

    Clocks that are no further apart than ends scatter are taken as one: ranks of one host have one, and the scatter
    would be added to every wait.
    """
    offsets = [events.trace.origin_ns - ranks[0].trace.origin_ns for events in ranks]
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for entries in shared:
        first, first_index = entries[0]
        trace = ranks[first].trace
        if _kind(trace, first_index) not in _ENDS_TOGETHER:
            continue
        for place, index in entries[1:]:
            ends[first, place].append(int(trace.gpu["end"][first_index]) - int(ranks[place].trace.gpu["end"][index]))
    known = set()
    errors = []
    for root in range(len(ranks)):  # one of each part of the ranks that no collective joins to those before
        if root in known:
            continue
        known.add(root)
        for _ in ranks:  # every round reaches the ranks that share a group with those known
            _align(ends, offsets, known)
    for (a, b), apart in ends.items():
        errors += [abs(offsets[a] + difference - offsets[b]) for difference in apart]
    return offsets, float(np.median(errors)) * NS if errors else None


def _align(ends: Mapping[tuple[int, int], list[int]], offsets: list[int], known: set[int]) -> None:
    """Set the clocks of ranks that share collectives with those known, beyond the scatter of their ends."""
    for (a, b), apart in ends.items():
        middle = int(np.median(apart))
        if (a in known) != (b in known):
            other, clock = (b, offsets[a] + middle) if a in known else (a, offsets[b] - middle)
            scatter = float(np.median(np.abs(np.array(apart) - middle)))
            if abs(clock - offsets[other]) > scatter:
                offsets[other] = clock
            known |= {a, b}


def stage_of(events: Sorted, grid: Grid | None = None) -> int | None:
    """The pipeline stage of a rank: its place in its pipeline group, or in `grid`; None where neither is known.

    A trace that describes its groups, and none of a pipeline, is of a job with one stage.
    """
    rank = events.trace.rank
    trace = events.trace
    if rank is None:
        return None
    for group in trace.groups.values():
        if group.label == "pp" and rank in group.ranks:
            return group.ranks.index(rank)
    if grid:
        return rank // (grid.get("tp", 1) * grid.get("cp", 1) * grid.get("dp", 1)) % grid.get("pp", 1)
    described = any(axis_of_description(group.description) for group in trace.groups.values())
    return 0 if described or trace.world_size == 1 else None


_START_BYTES = 2**16
_IS_TRACE = re.compile(rb'"traceEvents"|"deviceProperties"|"schemaVersion"\s*:\s*\d|"ph"\s*:\s*"[A-Za-z]"')
_FLIGHT = re.compile(rb'"pg_config"|"pg_status"|"comm_lib_version"|"nccl_version"')


class FileKind(StrEnum):
    """Files that are no text log."""

    KINETO = "torch profiler trace"
    SNAPSHOT = "memory snapshot"
    FLIGHT_RECORDER = "flight-recorder dump"


def file_kind_of(path: str | Path) -> FileKind | None:
    """The kind of a file, or None if it is none of these, such as a text log. Nothing in it is trusted yet."""
    with trace_file(path) as source:
        start = source.read(_START_BYTES)
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":  # a pickle's protocol
        flight = any(word in start for word in (b"pg_config", b"pg_status", b"comm_lib_version", b"collective_seq_id"))
        return FileKind.FLIGHT_RECORDER if flight else FileKind.SNAPSHOT
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] not in (b"{", b"["):
        return None
    if _FLIGHT.search(text) and b'"traceEvents"' not in text and b'"schemaVersion"' not in text:
        return FileKind.FLIGHT_RECORDER
    return FileKind.KINETO if _IS_TRACE.search(text) else None


def read_traces(paths: Sequence[str | Path], grid: Grid | None = None, progress: Progress | None = None) -> TraceReport:
    """Read the profiler's traces of one run, one rank after the other and beside each other.

    Raises SpecError for a file that is no trace, and where two files are of one rank.
    """
    read = [rank for path in paths for rank in _cut(path, grid, progress)]
    ranks = [events for events, _ in read]
    steps = [cut for _, cut in read]
    _refuse_twins([events.trace for events in ranks])
    peers = peer_times(ranks)
    reports = tuple(
        RankReport(
            file=events.trace.where, rank=events.trace.rank, stage=stage_of(events, grid),
            world_size=events.trace.world_size, device=events.trace.device, steps=steps[place],
            collectives=collective_times(events, peers.transfer_ns[place], peers.wait_ns[place]),
            warnings=events.trace.warnings,
        )
        for place, events in enumerate(ranks)
    )  # fmt: skip
    return TraceReport(
        ranks=reports, clock_error_s=peers.clock_error_s, not_shown=_not_shown(ranks, reports, peers),
    )  # fmt: skip


def _cut(path: str | Path, grid: Grid | None, progress: Progress | None) -> list[tuple[Sorted, tuple[TraceStep, ...]]]:
    """The exchanges and the steps of each rank in a file; nothing else of it stays in memory."""
    ranks = [Sorted.of(trace, grid) for trace in read_kineto(path, progress)]
    return [
        (events.exchanges(), tuple(break_down(events, step) for step in step_windows(events.trace))) for events in ranks
    ]


def _refuse_twins(traces: Sequence[RankTrace]) -> None:
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank is not None and seen.setdefault(trace.rank, trace.where) != trace.where:
            raise SpecError(f"{trace.where}: is of rank {trace.rank}, as {seen[trace.rank]} is", "name one of them")


def _not_shown(ranks: Sequence[Sorted], reports: Sequence[RankReport], peers: PeerTimes) -> Texts:
    """Sentences on what these traces cannot tell."""
    names = {
        "ranks": ranks, "steps": [step for report in reports for step in report.steps],
        "communicates": any((events.group >= 0).any() for events in ranks), "num_matched": peers.num_matched,
    }  # fmt: skip
    return tuple(texts_of(TABLES["not_shown"], names))


_TERMS = {
    "tp": "tp_comm_s", "cp": "cp_comm_s", "ep": "ep_comm_s", "dp": "exposed_dp_s", "pp": "pp_comm_and_waits_s",
}  # fmt: skip
"""The term of a step that the exposed communication of a plan's group is; waits of a pipeline are its bubble."""
OTHER_COMMUNICATION, UNATTRIBUTED = "other_comm_s", "unattributed_s"


class Recorded(SavedPart):
    """Files that profilers, the allocator and the flight recorder left of a run."""

    traces: TraceReport | None = None
    snapshots: tuple[SnapshotReport, ...] = ()
    flight_recorder: FlightReport | None = None
    kinds: Named = Field(default_factory=dict)
    """The kind of each file."""

    @property
    def ranks(self) -> tuple[RankReport, ...]:
        """The ranks that have traces."""
        return self.traces.ranks if self.traces else ()


class ObservedFiles(Observed):
    """The answer of `plan observe` where files beside logs were given."""

    recorded: Recorded


def kinds_of(paths: Sequence[str]) -> dict[str, FileKind]:
    """The files that are no text logs, with their kinds; SpecError for one that cannot be read."""
    kinds = {path: file_kind_of(path) for path in paths if path != STDIN}
    return filled(kinds.items())


def read_recorded(
    kinds: Mapping[str, FileKind], grid: Grid | None = None, progress: Progress | None = None
) -> Recorded:
    """Read files by their kinds, those of one kind together.

        from planner.observe.traces.recorded import kinds_of, read_recorded

        recorded = read_recorded(kinds_of(["rank0.json.gz", "rank1.json.gz", "snapshot.pickle"]))
        print(recorded.traces.ranks[0].steps[0].compute_s, recorded.snapshots[0].peak_bytes)

    `grid` is for process groups that the traces do not describe. Raises SpecError.
    """
    traces, snapshots, dumps = (
        [path for path, kind in kinds.items() if kind is wanted]
        for wanted in (FileKind.KINETO, FileKind.SNAPSHOT, FileKind.FLIGHT_RECORDER)
    )
    return Recorded(
        traces=read_traces(traces, grid, progress) if traces else None,
        snapshots=tuple(report for path in snapshots for report in read_snapshot(path, progress)),
        flight_recorder=read_flight_recorder(dumps) if dumps else None,
        kinds={path: str(kind) for path, kind in kinds.items()},
    )


def observation_of(recorded: Recorded) -> Observation:
    """The observation of a run without a log: the step by the traces, the peak by the snapshots."""
    ranks = recorded.ranks
    steps = steady(ranks)
    walls = sorted(step.wall_s for step in steps if step.number is not None)
    peaks = [snapshot.peak_bytes for snapshot in recorded.snapshots]
    num_warmup = sum(step.warm_up for rank in ranks for step in rank.steps)
    step_s = float(np.median(walls)) if walls else None
    return Observation(
        sources=tuple(SourceFile(path=path, format=kind) for path, kind in recorded.kinds.items()),
        facts=_facts(ranks),
        step_s=step_s,
        step_s_spread=(float(np.quantile(walls, 0.1)), float(np.quantile(walls, 0.9))) if len(walls) > 1 else None,
        num_steps=len({step.number for step in steps if step.number is not None}),
        num_warmup_steps=num_warmup // max(len(ranks), 1),
        peak_memory_bytes=max(peaks, default=None),
        peak_memory_kind="allocated" if peaks else None,
        memory=tuple(
            ObservedMemory(max_allocated_bytes=s.peak_bytes, max_reserved_bytes=s.peak_reserved_bytes)
            for s in recorded.snapshots
        ),
        breakdown=terms(steps, step_s) if step_s is not None else {},
        notes=_notes(recorded),
        asks=("--global-batch-size N", "--seq-length N") if step_s is not None else (),
    )


def steady(ranks: Sequence[RankReport]) -> list[TraceStep]:
    """The steps of all ranks that are no warm-up."""
    return [step for rank in ranks for step in rank.steps if not step.warm_up]


def terms(steps: Sequence[TraceStep], step_s: float) -> dict[str, float]:
    """Mean seconds by term of a plan's step, adding up to `step_s`."""
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        optimizer = sum(family.seconds for family in step.families if family.family == OPTIMIZER)
        total["compute_s"] += step.compute_s - optimizer
        total["optimizer_s"] += optimizer
        total["overhead_s"] += step.host_gaps_s + step.copies_s
        for group in step.groups:
            total[_TERMS.get(PLANNED.get(group.group, ""), OTHER_COMMUNICATION)] += group.exposed_s
    mean = {term: seconds / len(steps) for term, seconds in total.items() if seconds}
    return {**mean, UNATTRIBUTED: step_s - sum(mean.values())}


def _facts(ranks: Sequence[RankReport]) -> JobFacts:
    devices = {rank.device for rank in ranks if rank.device not in ("GPU", HOST)}
    sizes = {rank.world_size for rank in ranks if rank.world_size}
    return JobFacts(
        hardware=devices.pop() if len(devices) == 1 else None, num_gpus=sizes.pop() if len(sizes) == 1 else None
    )


def _notes(recorded: Recorded) -> Texts:
    """Sentences on what the files cannot show."""
    notes = []
    if recorded.traces:
        notes += [f"not shown: {sentence}" for sentence in recorded.traces.not_shown]
        notes += dict.fromkeys(warning for rank in recorded.ranks for warning in rank.warnings)
        notes.append("a profiler slows a run down: hold its steps against those of a log without one")
    notes += dict.fromkeys(warning for snapshot in recorded.snapshots for warning in snapshot.warnings)
    notes += recorded.flight_recorder.warnings if recorded.flight_recorder else ()
    return tuple(notes)
