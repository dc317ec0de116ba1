"""A timeline as text, ranks as rows of 80 columns, and as JSON; no colour carries meaning alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.format import percent, seconds
from planner.report.labels import ACTIONS
from planner.report.pieces import headed
from planner.schedule.actions import Action, Schedule
from planner.schedule.compare import ScheduleComparison, StragglerCost
from planner.schedule.replay import IDLE_CAUSES, Timeline
from planner.schedule.synthesis import Synthesis

IDLE = "·"
_STYLE = {"F": "cyan", "B": "green", "I": "green", "W": "yellow"}


def render_timeline(timeline: Timeline, width: int = 80) -> Group:
    """Headline, one row of text per rank in `width` columns, a legend, and what each rank does with its time."""
    schedule, spell = timeline.schedule, partial(seconds, like_s=timeline.makespan_s)
    headline = (
        f"{schedule.name}: {schedule.pp} ranks{_chunks(schedule)}, {schedule.num_microbatches} micro-batches, "
        f"{spell(timeline.makespan_s)}"
    )
    bubble = (
        f"bubble {percent(timeline.bubble_fraction)} of the step, "
        f"{percent(timeline.bubble_of_useful_fraction)} of useful time"
    )
    parts: list[RenderableType] = [Text(headline, style="bold"), Text(bubble), ""]
    return Group(*parts, *drawing(timeline, width), _legend(schedule), "", _ranks(timeline, spell))


def drawing(timeline: Timeline, width: int) -> list[Text]:
    """One row of exactly `width` columns per rank: each action as its kind and micro-batch where they fit.

    Small letters are every second chunk of a rank; an action too short for a column of its own may go unseen.
    """
    label = len(f"{timeline.schedule.pp - 1} ")
    columns = max(1, width - label)
    scale = columns / timeline.makespan_s if timeline.makespan_s else 0.0
    rows, chunks = [], timeline.schedule.stage_to_chunk
    for rank, actions in enumerate(timeline.schedule.ranks):
        row = Text(f"{rank} ".rjust(label), style="dim")
        column = 0
        spans = zip(actions, timeline.start_s[rank].tolist(), timeline.end_s[rank].tolist(), strict=True)
        for action, start_s, end_s in spans:
            first, last = max(column, round(start_s * scale)), min(columns, round(end_s * scale))
            if last > first:
                row.append(IDLE * (first - column), style="dim")
                row.append(_block(action, chunks[action.stage], last - first), style=_STYLE[action.kind])
                column = last
        row.append(IDLE * (columns - column), style="dim")
        rows.append(row)
    return rows


def _chunks(schedule: Schedule) -> str:
    if schedule.num_directions > 1:
        return ", two directions"
    return f" × {schedule.vpp} chunks" if schedule.vpp > 1 else ""


def _block(action: Action, chunk: int, columns: int) -> str:
    kind = action.kind.lower() if chunk % 2 else action.kind
    label = f"{kind}{action.microbatch}"
    return (label if len(label) <= columns else kind).ljust(columns, "─")


def _legend(schedule: Schedule) -> Text:
    legend = Text()
    for kind in sorted({action.kind for actions in schedule.ranks for action in actions}, key="FBIW".index):
        legend.append(f"{kind} {ACTIONS[kind]}", style=_STYLE[kind])
        legend.append("  ")
    legend.append(f"{IDLE} idle", style="dim")
    if len(schedule.stage_to_rank) > schedule.pp:
        legend.append("  small: every second chunk", style="dim")
    return legend


def _ranks(timeline: Timeline, spell: Callable[[float], str]) -> Table:
    shown = [cause for cause in IDLE_CAUSES if timeline.idle_s[cause].max() > 1e-9 * timeline.makespan_s]
    table = headed(("rank", "busy", *shown, "in flight"), "r" * (len(shown) + 3), style="bold")
    for rank in range(timeline.schedule.pp):
        idle = (spell(float(timeline.idle_s[cause][rank])) for cause in shown)
        peak = f"{timeline.peak_in_flight_microbatches[rank]:g}"
        table.add_row(str(rank), percent(float(timeline.busy_s[rank]) / timeline.makespan_s), *idle, peak)
    return table


def render_comparison(rows: Sequence[ScheduleComparison]) -> Table:
    """A line per schedule: time, bubble, memory and what it asks for, or why it is not defined here."""
    spell = partial(seconds, like_s=max((row.step_s for row in rows), default=0.0))
    heads = ("schedule", "vpp", "time", "bubble", "of useful", "in flight", "asks for")
    table = headed(heads, "lrrrrrw", style="bold")
    for row in rows:
        if row.timeline is None:
            table.add_row(row.name, str(row.vpp), "", "", "", "", _refusal(row))
            continue
        timeline = row.timeline
        table.add_row(
            row.name,
            str(row.vpp),
            spell(row.step_s),
            percent(row.bubble_fraction),
            percent(1 / (1 - row.bubble_fraction) - 1),
            f"{timeline.peak_in_flight_microbatches.max():g}",
            ", ".join(_demands(timeline.schedule)),
        )
    return table


def render_synthesis(synthesis: Synthesis) -> Text:
    """A sentence that compares the order that was found with the best named schedule and with the bound."""
    beside = "no named schedule fits"
    if synthesis.named is not None:
        saved = percent(1 - synthesis.makespan_s / synthesis.named_makespan_s, 2)
        beside = f"{saved} less than {synthesis.named}, the best named schedule that fits"
    gap = percent(synthesis.gap_fraction, 2)
    return Text(f"{beside}; at most {gap} above the best possible ({seconds(synthesis.lower_bound_s)})")


def render_straggler(cost: StragglerCost) -> Text:
    """A sentence about the seconds that slow ranks cost, and what moving layers off them would give back."""
    lost, back = cost.slow_s - cost.even_s, cost.slow_s - cost.rebalanced_s
    return Text(
        f"slow ranks cost {seconds(lost)} ({percent(lost / cost.even_s)} more than {seconds(cost.even_s)}); "
        f"layers moved off them in proportion would give back {seconds(max(0.0, back))}"
    )


def _refusal(row: ScheduleComparison) -> str:
    return row.refusal.message.removeprefix(f"schedule {row.name} ") if row.refusal else ""


def _demands(schedule: Schedule) -> list[str]:
    demands = []
    if schedule.asynchronous:
        demands.append(f"weights {schedule.staleness_steps} step stale, {schedule.num_weight_copies} versions")
    elif schedule.num_weight_copies > 1:
        demands.append(f"{schedule.num_weight_copies} copies of the weights")
    if schedule.splits_backward:
        demands.append("split backward")
    return demands


def comparison_json(row: ScheduleComparison) -> dict[str, Any]:
    """One schedule of a comparison."""
    shape = {"schedule": row.name, "vpp": row.vpp}
    if row.timeline is None:
        return {**shape, "refused": row.refusal.message if row.refusal else ""}
    schedule = row.timeline.schedule
    peaks = row.timeline.peak_in_flight_microbatches.tolist()
    of_schedule = {name: getattr(schedule, name) for name in ("num_weight_copies", "splits_backward", "asynchronous")}
    figures = {"step_s": row.step_s, "bubble_fraction": row.bubble_fraction, "peak_in_flight_microbatches": peaks}
    return {**shape, **figures, **of_schedule}


def timeline_json(
    timeline: Timeline, synthesis: Synthesis | None = None, straggler: StragglerCost | None = None
) -> dict[str, Any]:
    """A replay with every action's start and end; how an order was found and what slow ranks cost, where known."""
    schedule = timeline.schedule
    answer: dict[str, Any] = {
        "schedule": schedule.name,
        **{name: getattr(schedule, name) for name in ("pp", "vpp", "num_microbatches")},
        **{name: getattr(timeline, name) for name in ("makespan_s", "bubble_fraction", "bubble_of_useful_fraction")},
        "busy_s": timeline.busy_s.tolist(),
        "idle_s": {cause: seconds.tolist() for cause, seconds in timeline.idle_s.items()},
        "peak_in_flight_microbatches": timeline.peak_in_flight_microbatches.tolist(),
        "stage_to_rank": list(schedule.stage_to_rank),
        "ranks": [
            [{"action": str(action), "start_s": start_s, "end_s": end_s} for action, start_s, end_s in rank]
            for rank in (
                zip(actions, starts.tolist(), ends.tolist(), strict=True)
                for actions, starts, ends in zip(schedule.ranks, timeline.start_s, timeline.end_s, strict=True)
            )
        ],
    }
    if synthesis is not None:
        answer["lower_bound_s"], answer["gap"] = synthesis.lower_bound_s, synthesis.gap_fraction
        answer["best_named"] = None if synthesis.named is None else synthesis.named
        answer["best_named_s"] = None if synthesis.named is None else synthesis.named_makespan_s
    if straggler is not None:
        answer["straggler"] = asdict(straggler)
    return answer
