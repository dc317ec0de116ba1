"""Profiler traces, memory snapshots and flight-recorder dumps of one run, and the observation that they amount to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from planner.observe.measured import JobFacts, RankMemory, Source
from planner.observe.observation import Observation, Observed
from planner.observe.traces.detect import Kind, kind_of
from planner.observe.traces.families import OPTIMIZER
from planner.observe.traces.flight.recorder import FlightReport, read_flight_recorder
from planner.observe.traces.groups import PLANNED
from planner.observe.traces.memory.snapshot import SnapshotReport, read_snapshot
from planner.observe.traces.report import read_traces
from planner.observe.traces.results import HOST, RankReport, TraceReport, TraceStep
from planner.observe.traces.source import Progress
from planner.specs.base import Spec
from planner.specs.reading import STDIN

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


def kinds_of(paths: Sequence[str]) -> dict[str, Kind]:
    """The files that are no text logs, with their kinds; SpecError for one that cannot be read."""
    kinds = {path: kind_of(path) for path in paths if path != STDIN}
    return {path: kind for path, kind in kinds.items() if kind is not None}


def read_recorded(
    kinds: Mapping[str, Kind], grid: Mapping[str, int] | None = None, progress: Progress | None = None
) -> Recorded:
    """Read files by their kinds, those of one kind together.

        from planner.observe.traces.recorded import kinds_of, read_recorded

        recorded = read_recorded(kinds_of(["rank0.json.gz", "rank1.json.gz", "snapshot.pickle"]))
        print(recorded.traces.ranks[0].steps[0].compute_s, recorded.snapshots[0].peak_bytes)

    `grid` holds sizes of tp, cp, dp and pp, for process groups that the traces do not describe. Raises SpecError.
    """
    traces = [path for path, kind in kinds.items() if kind in (Kind.KINETO, Kind.NSYS, Kind.OP_TIMELINE)]
    snapshots = [path for path, kind in kinds.items() if kind is Kind.SNAPSHOT]
    dumps = [path for path, kind in kinds.items() if kind is Kind.FLIGHT_RECORDER]
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
        sources=tuple(Source(path=path, format=kind) for path, kind in recorded.kinds.items()),
        facts=_facts(recorded.traces),
        step_s=step_s,
        step_s_spread=(float(np.quantile(walls, 0.1)), float(np.quantile(walls, 0.9))) if len(walls) > 1 else None,
        num_steps=len({step.number for step in steps if step.number is not None}),
        num_warmup_steps=num_warmup // max(len(recorded.traces.ranks), 1) if recorded.traces else 0,
        peak_memory_bytes=max(peaks, default=None),
        peak_memory_kind="allocated" if peaks else None,
        memory=tuple(
            RankMemory(max_allocated_bytes=s.peak_bytes, max_reserved_bytes=s.peak_reserved_bytes)
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
