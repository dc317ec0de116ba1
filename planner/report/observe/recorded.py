"""Profiler traces as `plan observe` shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from planner.observe.traces.events import HOST, TraceStep
from planner.observe.traces.recorded import Recorded, steady
from planner.report.format import percent, seconds
from planner.report.pieces import TextBar, columns, headed, section

_WIDEST_BAR = 24
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
    report = recorded.traces
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


def _families(steps: Sequence[TraceStep]) -> Table:
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for family in step.families:
            total[family.family] += family.seconds / len(steps)
    whole = sum(total.values()) or 1.0
    table = columns("l", "r", "r", None)
    for name, value in sorted(total.items(), key=lambda item: -item[1]):
        table.add_row(name, seconds(value), percent(value / whole), TextBar(value / whole, _WIDEST_BAR))
    return table


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
