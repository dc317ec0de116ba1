"""Profiler traces of one run, beside each other, and the observation that they amount to."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from planner.errors import SpecError
from planner.observe.observation import JobFacts, Observation, Observed, SourceFile
from planner.observe.traces.breakdown import NS, Sorted, break_down, late_by_peers, stage_of, step_windows
from planner.observe.traces.events import HOST, OPTIMIZER, PLANNED, RankReport, TraceReport, TraceStep
from planner.observe.traces.kineto import Progress, TraceFile, read_kineto
from planner.specs.base import Spec
from planner.specs.reading import STDIN, label

_START_BYTES = 2**16
_IS_TRACE = re.compile(rb'"traceEvents"|"deviceProperties"|"schemaVersion"\s*:\s*\d|"ph"\s*:\s*"[A-Za-z]"')
_DUMP = re.compile(rb"pg_config|pg_status|comm_lib_version|collective_seq_id")
TRACE = "torch profiler trace"


def is_trace(path: str) -> bool:
    """True for a profiler's trace. Raises SpecError for what torch's own tools read: flight-recorder dumps, snapshots
    of memory."""
    start = TraceFile(path).read(_START_BYTES)[:_START_BYTES]
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and not _DUMP.search(start):  # a pickle's protocol
        raise SpecError(f"{label(path)}: is a memory snapshot", "pytorch.org/memory_viz shows what is in it")
    if (start[:1] == b"\x80" or text[:1] == b"{") and _DUMP.search(start) and not _IS_TRACE.search(text):
        hint = "torchfrtrace, which comes with torch, names the rank that never came"
        raise SpecError(f"{label(path)}: is a flight-recorder dump", hint)
    return text[:1] in (b"{", b"[") and _IS_TRACE.search(text) is not None


def traces_of(paths: Sequence[str]) -> list[str]:
    """The files that are traces; what is no regular file is a log."""
    return [path for path in paths if path != STDIN and os.path.isfile(path) and is_trace(path)]


class Recorded(Spec):
    """Files that profilers left of a run."""

    traces: TraceReport
    kinds: dict[str, str] = Field(default_factory=dict)
    """The kind of each file."""


class ObservedFiles(Observed):
    """The answer of `plan observe` where files beside logs were given."""

    recorded: Recorded


def read_recorded(paths: Sequence[str], progress: Progress = lambda: None) -> Recorded:
    """Read the profiler's traces of one run, one rank after the other and beside each other.

        from planner.observe.traces.recorded import read_recorded

        recorded = read_recorded(["rank0.json.gz", "rank1.json.gz"])
        print(recorded.traces.ranks[0].steps[0].compute_s)

    Raises SpecError for a file that is no trace, and where two files are of one rank.
    """
    ranks, steps, seen = list[Sorted](), list[tuple[TraceStep, ...]](), dict[int, str]()
    for path in paths:
        for trace in read_kineto(path, progress):
            if trace.rank is not None and seen.setdefault(trace.rank, trace.where) != trace.where:
                raise SpecError(f"{trace.where}: is of rank {trace.rank}, as {seen[trace.rank]} is", "name one of them")
            events = Sorted.of(trace)
            steps.append(tuple(break_down(events, step) for step in step_windows(trace)))
            ranks.append(events.exchanges())
    late = late_by_peers(ranks)
    reports = tuple(
        RankReport(
            file=events.trace.where, rank=events.trace.rank, stage=stage_of(events.trace),
            world_size=events.trace.world_size, device=events.trace.device, steps=steps[place],
            late_s={group: ns * NS / max(len(steps[place]), 1) for group, ns in late[place].items()},
            warnings=events.trace.warnings,
        )
        for place, events in enumerate(ranks)
    )  # fmt: skip
    report = TraceReport(ranks=reports, not_shown=_not_shown(ranks, reports))
    return Recorded(traces=report, kinds=dict.fromkeys(paths, TRACE))


def _not_shown(ranks: Sequence[Sorted], reports: Sequence[RankReport]) -> tuple[str, ...]:
    """Sentences on what these traces cannot tell."""
    told = []
    communicates = any((events.group >= 0).any() for events in ranks)
    if communicates and not any(report.late_s for report in reports):
        why = "one rank's trace" if len(ranks) == 1 else "no collective is found on two ranks"
        told.append(f"transfer and wait are one number: {why}")
    if any((events.trace.gpu["call"][events.group >= 0] < 0).any() for events in ranks):
        told.append("some communication kernels say neither group nor bytes (old torch, DeepEP, NVSHMEM)")
    if communicates and any(not group.ranks for events in ranks for group in events.trace.groups.values()):
        told.append("ranks of some groups: the trace truncates lists after 30 entries")
    if all(step.number is None for report in reports for step in report.steps):
        told.append("steps: nothing marks them (call `profiler.step()` in the loop); numbers are of the whole trace")
    return tuple(told)


_TERMS = {
    "tp": "tp_comm_s", "cp": "cp_comm_s", "ep": "ep_comm_s", "dp": "exposed_dp_s", "pp": "pp_comm_and_waits_s",
}  # fmt: skip
"""The term of a step that the exposed communication of a plan's group is; waits of a pipeline are its bubble."""
OTHER_COMMUNICATION, UNATTRIBUTED = "other_comm_s", "unattributed_s"


def observation_of(recorded: Recorded) -> Observation:
    """The observation of a run without a log: the step by the traces."""
    ranks = recorded.traces.ranks
    steps = steady(ranks)
    walls = sorted(step.wall_s for step in steps if step.number is not None)
    devices = {rank.device for rank in ranks if rank.device not in ("GPU", HOST)}
    sizes = {rank.world_size for rank in ranks if rank.world_size}
    step_s = float(np.median(walls)) if walls else None
    return Observation(
        sources=tuple(SourceFile(path=path, format=kind) for path, kind in recorded.kinds.items()),
        facts=JobFacts(
            hardware=devices.pop() if len(devices) == 1 else None, num_gpus=sizes.pop() if len(sizes) == 1 else None
        ),
        step_s=step_s,
        step_s_spread=(float(np.quantile(walls, 0.1)), float(np.quantile(walls, 0.9))) if len(walls) > 1 else None,
        num_steps=len({step.number for step in steps if step.number is not None}),
        num_warmup_steps=sum(step.warm_up for rank in ranks for step in rank.steps) // max(len(ranks), 1),
        breakdown=terms(steps, step_s) if step_s is not None else {},
        notes=(
            *(f"not shown: {sentence}" for sentence in recorded.traces.not_shown),
            *dict.fromkeys(warning for rank in ranks for warning in rank.warnings),
            "a profiler slows a run down: hold its steps against those of a log without one",
        ),
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
