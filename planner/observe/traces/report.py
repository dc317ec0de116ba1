"""Traces of one or several ranks, read and cut: the entry to this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.errors import SpecError
from planner.observe.traces.breakdown import Sorted, break_down
from planner.observe.traces.collectives import collective_times
from planner.observe.traces.detect import Kind, kind_of
from planner.observe.traces.kineto import read_kineto
from planner.observe.traces.nsys import read_nsys
from planner.observe.traces.op_timeline import read_op_timeline
from planner.observe.traces.peers import Peers, pipeline_of, stage_of, stragglers
from planner.observe.traces.results import RankReport, TraceReport, TraceStep
from planner.observe.traces.source import Progress
from planner.observe.traces.steps import step_windows
from planner.observe.traces.trace import RankTrace


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
    peers = Peers.of(ranks)
    reports = tuple(
        RankReport(
            file=events.trace.where, rank=events.trace.rank, stage=stage_of(events, grid),
            pipeline=pipeline_of(events),
            world_size=events.trace.world_size, device=events.trace.device, steps=steps[place],
            collectives=collective_times(events, peers.transfer_ns[place], peers.wait_ns[place]),
            warnings=events.trace.warnings,
        )
        for place, events in enumerate(ranks)
    )  # fmt: skip
    return TraceReport(
        ranks=reports, stragglers=stragglers(reports, peers.late_ns), clock_error_s=peers.clock_error_s,
        not_shown=_not_shown(ranks, reports, peers),
    )  # fmt: skip


def _cut(
    path: str | Path, grid: Mapping[str, int] | None, progress: Progress | None
) -> list[tuple[Sorted, tuple[TraceStep, ...]]]:
    """The exchanges and the steps of each rank in a file; nothing else of it stays in memory."""
    ranks = [Sorted.of(trace, grid) for trace in _read(path, progress)]
    return [
        (events.exchanges(), tuple(break_down(events, step) for step in step_windows(events.trace))) for events in ranks
    ]


def _read(path: str | Path, progress: Progress | None) -> tuple[RankTrace, ...]:
    kind = kind_of(path)
    if kind is Kind.OP_TIMELINE:
        return read_op_timeline(path, progress)
    return read_nsys(path) if kind is Kind.NSYS else read_kineto(path, progress)


def _refuse_twins(traces: Sequence[RankTrace]) -> None:
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank is not None and seen.setdefault(trace.rank, trace.where) != trace.where:
            raise SpecError(f"{trace.where}: is of rank {trace.rank}, as {seen[trace.rank]} is", "name one of them")


def _not_shown(ranks: Sequence[Sorted], reports: Sequence[RankReport], peers: Peers) -> tuple[str, ...]:
    """Sentences on what these traces cannot tell."""
    told = []
    communicates = any((events.group >= 0).any() for events in ranks)
    if communicates and not peers.num_matched:
        why = "one rank's trace" if len(ranks) == 1 else "no collective is found on two ranks"
        told.append(f"transfer and wait are one number: {why}")
    if any((events.trace.gpu.call[events.group >= 0] < 0).any() for events in ranks):
        told.append("some communication kernels say neither group nor bytes (old torch, DeepEP, NVSHMEM)")
    if communicates and any(len(g.ranks) == 0 for e in ranks for g in e.trace.groups.values()):
        told.append("ranks of some groups: the trace truncates lists after 30 entries")
    if all(step.number is None for report in reports for step in report.steps):
        told.append(
            "steps: nothing marks them (call `profiler.step()` in the loop); the numbers are of the whole trace"
        )
    if not any(step.phases for report in reports for step in report.steps):
        told.append("forward and backward: no annotation and no autograd operator tells them apart")
    if len(ranks) > 1 and any(report.stage is None for report in reports):
        told.append("stragglers: the traces do not say which stage a rank is of, so that none is judged")
    return tuple(told)
