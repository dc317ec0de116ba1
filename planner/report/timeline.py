"""A timeline for eyes: ranks as rows of text for 80 columns, or as an SVG; no colour carries meaning alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from math import floor, log10

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.format import percent, seconds, unit_for
from planner.schedule.actions import Action, Schedule
from planner.schedule.compare import Comparison, StragglerCost
from planner.schedule.synthesis import Synthesis
from planner.schedule.timeline import IDLE_CAUSES, Timeline

IDLE = "·"
_STYLE = {"F": "cyan", "B": "green", "I": "green", "W": "yellow"}
_FILL = {
    "F": ("#7fb3d5", "#4a86b0"),
    "B": ("#82c995", "#4f9d66"),
    "I": ("#82c995", "#4f9d66"),
    "W": ("#f2cf7e", "#c9a03f"),
}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_MARGIN, _ROW, _BAR, _FOOT = 60, 26, 22, 40


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
    rows = []
    for rank, actions in enumerate(timeline.schedule.ranks):
        row = Text(f"{rank} ".rjust(label), style="dim")
        column = 0
        spans = zip(actions, timeline.start_s[rank].tolist(), timeline.end_s[rank].tolist(), strict=True)
        for action, start_s, end_s in spans:
            first, last = max(column, round(start_s * scale)), min(columns, round(end_s * scale))
            if last > first:
                row.append(IDLE * (first - column), style="dim")
                row.append(_block(action, timeline.schedule, last - first), style=_STYLE[action.kind])
                column = last
        row.append(IDLE * (columns - column), style="dim")
        rows.append(row)
    return rows


def _chunks(schedule: Schedule) -> str:
    if schedule.num_directions > 1:
        return ", two directions"
    return f" × {schedule.vpp} chunks" if schedule.vpp > 1 else ""


def _chunk(action: Action, schedule: Schedule) -> int:
    """Number of the chunk that an action works on, counted on its rank from 0."""
    rank = schedule.stage_to_rank[action.stage]
    return sum(holder == rank for holder in schedule.stage_to_rank[: action.stage])


def _block(action: Action, schedule: Schedule, columns: int) -> str:
    kind = action.kind.lower() if _chunk(action, schedule) % 2 else action.kind
    label = f"{kind}{action.microbatch}"
    return (label if len(label) <= columns else kind).ljust(columns, "─")


def _legend(schedule: Schedule) -> Text:
    legend = Text()
    for kind in sorted({action.kind for actions in schedule.ranks for action in actions}, key="FBIW".index):
        legend.append(f"{kind} {_NAMES[kind]}", style=_STYLE[kind])
        legend.append("  ")
    legend.append(f"{IDLE} idle", style="dim")
    if len(schedule.stage_to_rank) > schedule.pp:
        legend.append("  small: every second chunk", style="dim")
    return legend


def _ranks(timeline: Timeline, spell: Callable[[float], str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    shown = [cause for cause in IDLE_CAUSES if timeline.idle_s[cause].max() > 1e-9 * timeline.makespan_s]
    for head in ("rank", "busy", *shown, "in flight"):
        table.add_column(head, justify="right", no_wrap=True)
    for rank in range(timeline.schedule.pp):
        idle = (spell(float(timeline.idle_s[cause][rank])) for cause in shown)
        peak = f"{timeline.peak_in_flight_microbatches[rank]:g}"
        table.add_row(str(rank), percent(float(timeline.busy_s[rank]) / timeline.makespan_s), *idle, peak)
    return table


def render_comparison(rows: Sequence[Comparison]) -> Table:
    """A line per schedule: time, bubble, memory and what it asks for, or why it is not defined here."""
    spell = partial(seconds, like_s=max((row.step_s for row in rows), default=0.0))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for head in ("schedule", "vpp", "time", "bubble", "of useful", "in flight", "asks for"):
        table.add_column(
            head, justify="left" if head in ("schedule", "asks for") else "right", no_wrap=head != "asks for"
        )
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


def _refusal(row: Comparison) -> str:
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


def timeline_svg(timeline: Timeline, width: int = 1200) -> str:
    """The timeline as one SVG: a bar per action with its name as tooltip, a row per rank, an axis in seconds.

    Bars carry their micro-batch where it fits; every second chunk of a rank is darker.
    """
    schedule = timeline.schedule
    height = _ROW * schedule.pp + _FOOT
    scale = (width - _MARGIN - 10) / timeline.makespan_s if timeline.makespan_s else 0.0
    bars = (
        bar
        for rank in range(schedule.pp)
        for bar in _svg_rank(timeline, rank, [_MARGIN + scale * float(s) for s in timeline.start_s[rank]], scale)
    )
    title = escape(f"{schedule.name}, {schedule.num_microbatches} micro-batches")
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *bars,
            *_svg_axis(timeline, height - _FOOT + 14, scale),
            "</svg>\n",
        )
    )


def _svg_rank(timeline: Timeline, rank: int, lefts: Sequence[float], scale: float) -> Iterable[str]:
    top = _ROW * rank + 2
    yield f'<text x="6" y="{top + 15}">rank {rank}</text>'
    lasts = zip(timeline.schedule.ranks[rank], lefts, timeline.start_s[rank], timeline.end_s[rank], strict=True)
    for action, left, start_s, end_s in lasts:
        wide = scale * float(end_s - start_s)
        fill = _FILL[action.kind][_chunk(action, timeline.schedule) % 2]
        yield (
            f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_BAR}" fill="{fill}" stroke="white" '
            f'stroke-width="0.5"><title>{action}: {_NAMES[action.kind]}, {start_s:g} to {end_s:g} s</title></rect>'
        )
        if wide >= 7 * len(str(action.microbatch)) + 4:
            yield (
                f'<text x="{left + wide / 2:.2f}" y="{top + 15}" text-anchor="middle" pointer-events="none">'
                f"{action.microbatch}</text>"
            )


def _svg_axis(timeline: Timeline, y: float, scale: float) -> Iterable[str]:
    """Five to twelve ticks at round numbers of the unit that suits the whole; none where nothing takes time."""
    if not timeline.makespan_s:
        return
    factor, unit = unit_for(timeline.makespan_s)
    tick_s = _round_below(timeline.makespan_s / 5)
    for number in range(int(timeline.makespan_s / tick_s * (1 + 1e-9)) + 1):
        at_s = number * tick_s
        yield f'<text x="{_MARGIN + scale * at_s:.2f}" y="{y}" text-anchor="middle">{at_s * factor:.6g} {unit}</text>'


def _round_below(value_s: float) -> float:
    """The largest of 1, 2 or 5 times a power of ten that is at most `value_s`."""
    power = 10.0 ** floor(log10(value_s))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= value_s * (1 + 1e-9))
