"""Profiler traces, memory snapshots and flight-recorder dumps of one run, and the observation that they amount to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
from pydantic import Field

from planner.errors import SpecError
from planner.observe.observation import JobFacts, Observation, Observed, ObservedMemory, SourceFile
from planner.observe.traces.breakdown import Sorted, break_down, step_windows
from planner.observe.traces.collectives import PeerTimes, collective_times, stage_of
from planner.observe.traces.dumps import FlightReport, SnapshotReport, read_flight_recorder, read_snapshot
from planner.observe.traces.events import HOST, OPTIMIZER, PLANNED, RankReport, RankTrace, TraceReport, TraceStep
from planner.observe.traces.kineto import read_kineto
from planner.observe.traces.source import Progress, TraceFile
from planner.specs.base import Spec
from planner.specs.reading import STDIN

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
    with TraceFile(path) as source:
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


def read_traces(
    paths: Sequence[str | Path], grid: Mapping[str, int] | None = None, progress: Progress | None = None
) -> TraceReport:
    """Read the profiler's traces of one run, one rank after the other and beside each other.

    `grid` holds the sizes of tp, cp, dp and pp, and names the axes of process groups that the traces leave undescribed.
    Raises SpecError for a file that is no trace, and where two files are of one rank.
    """
    read = [rank for path in paths for rank in _cut(path, grid, progress)]
    ranks, steps = [events for events, _ in read], [cut for _, cut in read]
    _refuse_twins([events.trace for events in ranks])
    peers = PeerTimes.of(ranks)
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


def _cut(
    path: str | Path, grid: Mapping[str, int] | None, progress: Progress | None
) -> list[tuple[Sorted, tuple[TraceStep, ...]]]:
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


def _not_shown(ranks: Sequence[Sorted], reports: Sequence[RankReport], peers: PeerTimes) -> tuple[str, ...]:
    """Sentences on what these traces cannot tell."""
    told = []
    communicates = any((events.group >= 0).any() for events in ranks)
    if communicates and not peers.num_matched:
        why = "one rank's trace" if len(ranks) == 1 else "no collective is found on two ranks"
        told.append(f"transfer and wait are one number: {why}")
    if any((events.trace.gpu["call"][events.group >= 0] < 0).any() for events in ranks):
        told.append("some communication kernels say neither group nor bytes (old torch, DeepEP, NVSHMEM)")
    if communicates and any(len(g.ranks) == 0 for e in ranks for g in e.trace.groups.values()):
        told.append("ranks of some groups: the trace truncates lists after 30 entries")
    if all(step.number is None for report in reports for step in report.steps):
        told.append(
            "steps: nothing marks them (call `profiler.step()` in the loop); the numbers are of the whole trace"
        )
    return tuple(told)


_TERMS = {
    "tp": "tp_comm_s", "cp": "cp_comm_s", "ep": "ep_comm_s", "dp": "exposed_dp_s", "pp": "pp_comm_and_waits_s",
}  # fmt: skip
"""The term of a step that the exposed communication of a plan's group is; waits of a pipeline are its bubble."""
OTHER_COMMUNICATION, UNATTRIBUTED = "other_comm_s", "unattributed_s"


class Recorded(Spec):
    """Files that profilers, the allocator and the flight recorder left of a run."""

    traces: TraceReport | None = None
    snapshots: tuple[SnapshotReport, ...] = ()
    flight_recorder: FlightReport | None = None
    kinds: dict[str, str] = Field(default_factory=dict)
    """The kind of each file."""


class ObservedFiles(Observed):
    """The answer of `plan observe` where files beside logs were given."""

    recorded: Recorded


def kinds_of(paths: Sequence[str]) -> dict[str, FileKind]:
    """The files that are no text logs, with their kinds; SpecError for one that cannot be read."""
    kinds = {path: file_kind_of(path) for path in paths if path != STDIN}
    return {path: kind for path, kind in kinds.items() if kind is not None}


def read_recorded(
    kinds: Mapping[str, FileKind], grid: Mapping[str, int] | None = None, progress: Progress | None = None
) -> Recorded:
    """Read files by their kinds, those of one kind together.

        from planner.observe.traces.recorded import kinds_of, read_recorded

        recorded = read_recorded(kinds_of(["rank0.json.gz", "rank1.json.gz", "snapshot.pickle"]))
        print(recorded.traces.ranks[0].steps[0].compute_s, recorded.snapshots[0].peak_bytes)

    `grid` holds sizes of tp, cp, dp and pp, for process groups that the traces do not describe. Raises SpecError.
    """
    traces = [path for path, kind in kinds.items() if kind is FileKind.KINETO]
    snapshots = [path for path, kind in kinds.items() if kind is FileKind.SNAPSHOT]
    dumps = [path for path, kind in kinds.items() if kind is FileKind.FLIGHT_RECORDER]
    return Recorded(
        traces=read_traces(traces, grid, progress) if traces else None,
        snapshots=tuple(report for path in snapshots for report in read_snapshot(path, progress)),
        flight_recorder=read_flight_recorder(dumps) if dumps else None,
        kinds={path: str(kind) for path, kind in kinds.items()},
    )


def observation_of(recorded: Recorded) -> Observation:
    """The observation of a run without a log: the step by the traces, the peak by the snapshots."""
    steps = steady(recorded.traces.ranks) if recorded.traces else []
    walls = sorted(step.wall_s for step in steps if step.number is not None)
    peaks = [snapshot.peak_bytes for snapshot in recorded.snapshots]
    num_warmup = sum(step.warm_up for rank in recorded.traces.ranks for step in rank.steps) if recorded.traces else 0
    step_s = float(np.median(walls)) if walls else None
    return Observation(
        sources=tuple(SourceFile(path=path, format=kind) for path, kind in recorded.kinds.items()),
        facts=_facts(recorded.traces),
        step_s=step_s,
        step_s_spread=(float(np.quantile(walls, 0.1)), float(np.quantile(walls, 0.9))) if len(walls) > 1 else None,
        num_steps=len({step.number for step in steps if step.number is not None}),
        num_warmup_steps=num_warmup // max(len(recorded.traces.ranks), 1) if recorded.traces else 0,
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


def _facts(traces: TraceReport | None) -> JobFacts:
    if traces is None:
        return JobFacts()
    devices = {rank.device for rank in traces.ranks if rank.device not in ("GPU", HOST)}
    sizes = {rank.world_size for rank in traces.ranks if rank.world_size}
    return JobFacts(
        hardware=devices.pop() if len(devices) == 1 else None, num_gpus=sizes.pop() if len(sizes) == 1 else None
    )


def _notes(recorded: Recorded) -> tuple[str, ...]:
    """Sentences on what the files cannot show."""
    notes: list[str] = []
    if recorded.traces:
        notes += [f"not shown: {sentence}" for sentence in recorded.traces.not_shown]
        notes += dict.fromkeys(warning for rank in recorded.traces.ranks for warning in rank.warnings)
        notes.append("a profiler slows a run down: hold its steps against those of a log without one")
    notes += dict.fromkeys(warning for snapshot in recorded.snapshots for warning in snapshot.warnings)
    notes += recorded.flight_recorder.warnings if recorded.flight_recorder else ()
    return tuple(notes)
