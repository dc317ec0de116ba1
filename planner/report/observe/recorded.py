"""Profiler traces, memory snapshots and flight-recorder dumps as `plan observe` shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.observe.traces.dumps import FlightReport, SnapshotReport
from planner.observe.traces.events import HOST, CollectiveTime, TraceReport, TraceStep
from planner.observe.traces.recorded import Recorded, steady
from planner.report.format import gibibytes, percent, seconds
from planner.report.pieces import TextBar, columns, headed, section

_WIDEST_BAR, _MOST_ROWS, _NAME_WIDTH = 24, 10, 34
_PARTS = {
    "compute_s": "computing",
    "exposed_communication_s": "communication, exposed",
    "copies_s": "copies",
    "host_gaps_s": "GPU idle, host late",
    "dependencies_s": "GPU idle, work waits",
    "idle_s": "GPU idle, not told",
}


def recorded_sections(recorded: Recorded) -> Iterator[RenderableType]:
    """The parts of the answer that files beside logs give, made for 80 columns."""
    if recorded.flight_recorder:
        yield section("Collectives, by the flight recorder", _flight(recorded.flight_recorder))
    if recorded.traces:
        yield from _traces(recorded.traces)
    for snapshot in recorded.snapshots:
        title = f"Memory of {snapshot.file}, device {snapshot.device}, at its peak"
        yield section(title, _snapshot(snapshot))


def _traces(report: TraceReport) -> Iterator[RenderableType]:
    steps = steady(report.ranks)
    if not steps:
        return
    of_what = "a step" if steps[0].number is not None else "the whole trace"
    on_host = all(rank.device == HOST for rank in report.ranks)
    where = "on the host" if on_host else "on the GPU"
    count = f"mean of {len(steps)} on {len(report.ranks)} ranks" if len(report.ranks) > 1 else f"mean of {len(steps)}"
    yield section(f"Where {of_what} went {where}, {count}", _parts(steps, on_host))
    if any(step.families for step in steps):
        yield section("Computing, by family of kernels", _families(steps))
    if any(step.groups for step in steps):
        yield section("Communication, by group", _groups(steps))
    if exchanges := [row for rank in report.ranks for row in rank.collectives]:
        yield section("Exchanges that take longest", _exchanges(exchanges))


def _parts(steps: Sequence[TraceStep], on_host: bool) -> Table:
    wall_s = sum(step.wall_s for step in steps) / len(steps)
    table = columns("l", "r", "r", None)
    for name, told in _PARTS.items():
        value = sum(getattr(step, name) for step in steps) / len(steps)
        told = "between operators" if on_host and name == "host_gaps_s" else told
        if value:
            table.add_row(told, seconds(value), percent(value / wall_s), TextBar(value / wall_s, _WIDEST_BAR))
    table.add_row("all", seconds(wall_s), "", "")
    return table


def _families(steps: Sequence[TraceStep]) -> RenderableType:
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for family in step.families:
            total[family.family] += family.seconds / len(steps)
    whole = sum(total.values()) or 1.0
    table = columns("l", "r", "r", None)
    for name, value in sorted(total.items(), key=lambda item: -item[1]):
        table.add_row(name, seconds(value), percent(value / whole), TextBar(value / whole, _WIDEST_BAR))
    unknown = dict.fromkeys(name for step in steps for family in step.families for name in family.longest)
    if not unknown:
        return table
    return Group(table, Text(f"other: {', '.join(name[:_NAME_WIDTH] for name in list(unknown)[:3])}"))


def _groups(steps: Sequence[TraceStep]) -> Table:
    table = headed(("group", "running", "behind computing", "exposed"), "l", "r", "r", "r")
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in steps:
        for group in step.groups:
            for index, value in enumerate((group.busy_s, group.hidden_s, group.exposed_s)):
                total[group.group][index] += value / len(steps)
    for name, values in sorted(total.items(), key=lambda item: -item[1][2]):
        table.add_row(name, *map(seconds, values))
    return table


def _exchanges(rows: Sequence[CollectiveTime]) -> Table:
    table = headed(("exchange", "group", "MB", "times", "transfer", "wait", "GB/s"), "l", "l", "r", "r", "r", "r", "r")
    for row in sorted(rows, key=lambda row: -row.median_s * row.count)[:_MOST_ROWS]:
        rate = "" if row.bus_gb_per_s is None else f"{'≥ ' if row.at_least else ''}{row.bus_gb_per_s:.1f}"
        transfer, wait = (
            (f"{seconds(row.median_s)} both", "")
            if row.transfer_s is None
            else (seconds(row.transfer_s), seconds(row.wait_s or 0.0))
        )
        size = "" if row.num_bytes is None else f"{row.num_bytes / 1e6:.2f}"
        table.add_row(row.collective, row.group[:20], size, f"{row.count:,}", transfer, wait, rate)
    return table


def _snapshot(report: SnapshotReport) -> RenderableType:
    table = columns("l", "r", "r", None)
    for part in report.parts:
        share = part.num_bytes / (report.peak_bytes or 1)
        table.add_row(part.category, f"{gibibytes(part.num_bytes)} GiB", percent(share), TextBar(share, _WIDEST_BAR))
    table.add_row("peak, allocated", f"{gibibytes(report.peak_bytes)} GiB", "", "")
    table.add_row("most reserved", f"{gibibytes(report.peak_reserved_bytes)} GiB", "", "")
    table.add_row("free in blocks, at the end", f"{gibibytes(report.inactive_bytes)} GiB", "", "")
    table.add_row("largest of them", f"{gibibytes(report.largest_free_block_bytes)} GiB", "", "")
    lines = list(_says(report))
    return Group(table, *(Text(line) for line in lines))


def _says(report: SnapshotReport) -> Iterator[str]:
    oom = report.out_of_memory
    if oom is not None:
        why = ""
        if oom.fragmented:
            why = f": {gibibytes(oom.inactive_bytes)} GiB were free, in blocks of at most "
            why += f"{gibibytes(oom.largest_free_block_bytes)} GiB; fragmentation"
        yield f"Out of memory on a request of {gibibytes(oom.requested_bytes)} GiB{why}."


def _flight(report: FlightReport) -> RenderableType:
    table = headed(("group", "ranks", "called", "ended", "outstanding", "differ"), "l", "r", "r", "r", "r", "r")
    for group in report.groups[:_MOST_ROWS]:
        called = f"{max(group.last_enqueued.values(), default=0):,}"
        ended = f"{min(group.last_completed.values(), default=0):,}"
        name = group.description or group.name
        table.add_row(
            name[:_NAME_WIDTH], f"{len(group.ranks):,}", called, ended, f"{len(group.outstanding):,}",
            f"{len(group.mismatches):,}",
        )  # fmt: skip
    return Group(Text(f"{report.verdict[0].upper()}{report.verdict[1:]}.", style="bold"), table)
