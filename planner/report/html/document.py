"""A plan as one HTML file that needs nothing else: no network, no scripts; charts are inline SVG by matplotlib.

It lays out the lines of `view`, as the terminal does, and adds what a terminal has no room for: charts of memory, of
seconds and of the alternatives, the pipeline's timeline, and the inputs with their sources. The same plan makes the
same bytes. Names come from files that anyone may have written, so all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.answer import Plan
from planner.report.format import percent
from planner.report.html.charts_layouts import draw_pareto, draw_steps
from planner.report.html.charts_memory import draw_stacks
from planner.report.html.charts_stages import draw_stage_seconds
from planner.report.html.header import header
from planner.report.html.inputs import inputs
from planner.report.html.pieces import (
    Html,
    beside,
    bullets,
    page,
    picture,
    section,
    share_bar,
    table,
    tag,
    zoomed,
)
from planner.report.html.small import small_sections
from planner.report.html.stages import stages
from planner.report.labels import LEAST_SHARE
from planner.report.rows import Entry, Share
from planner.report.view import View, view_of

PAIRS = ("", "")
"""Heads of a table of subjects and sentences."""


class Drawing(NamedTuple):
    """A drawing, and what it shows."""

    svg: Html
    caption: str


class Drawings(NamedTuple):
    """The drawings for which the step is replayed: the pipeline's actions, and memory over time."""

    timeline: Drawing
    curve: Drawing


def render_html(plan: Plan, replayed: Drawings) -> str:
    """The whole page."""
    view = view_of(plan)
    return page(f"{view.job}: {view.layout}", *_sections(plan, view, replayed))


def _sections(plan: Plan, view: View, replayed: Drawings) -> Iterator[Html]:
    headings = view.headings
    yield header(view)
    if view.recipe:
        yield section(headings["recipe"], table(PAIRS, view.recipe, "ll"))
    yield from small_sections(view)
    yield section(headings["stages"], *stages(plan, view))
    has_interval = any(stage.memory.total_bytes_interval for stage in plan.stages)
    peaks = picture(
        draw_stacks(plan.stages, view.capacity_bytes),
        f"Each stage at its peak{', with the 80% interval of the whole' if has_interval else ''}.",
    )
    yield section(headings["memory"], beside(peaks, picture(*replayed.curve)))
    busy = picture(draw_stage_seconds(plan.best), "Each stage over all micro-batches of a step, whose end is the line.")
    yield section(headings["breakdown"], beside(_breakdown(view), busy))
    yield section(headings["timeline"], picture(zoomed(replayed.timeline.svg, "timeline"), replayed.timeline.caption))
    if view.alternatives:
        yield section(headings["alternatives"], *_alternatives(view))
    if view.risk or view.robust:
        yield section(headings["risk"], *_risk(view))
    if view.sustained or view.goodput or view.cost:
        yield section(headings["months"], *_months(view))
    yield from _reasons(view)
    yield section("Inputs", *inputs(plan))


def _breakdown(view: View) -> Html:
    rows: list[tuple[object, ...]] = [(*share.cells, share_bar(share.fraction)) for share in view.breakdown]
    rows.append((*Share("step", view.step_s, view.step_s).cells, ""))
    note = f"On the rank that decides the step; the items add up to it, those below {percent(LEAST_SHARE, 2)} left out."
    filled = table(("item", "seconds", "share", ""), rows, "lrrl", bold_last=True)
    return tag("div", filled, tag("p", note, class_="soft"))


def _alternatives(view: View) -> Iterator[Html]:
    entries = (view.best, *view.alternatives)
    heads = ("", "layout", "step", "GiB", "fits with", "MFU", "how, and what it trades against the best")
    rows = [(e.name, e.sizes, e.step, e.peak, e.fit, percent(e.mfu), _how(e)) for e in entries]
    yield table(heads, rows, "lnrrrrl", folds=True)
    sure = "Grey is the best's interval: a prediction alone cannot tell layouts apart whose intervals reach into it."
    yield beside(
        picture(draw_steps(entries), sure if view.best.step_s_interval else ""),
        picture(draw_pareto(entries, view.capacity_bytes), "Filled: no other is faster in less memory."),
    )


def _how(entry: Entry) -> str:
    """The trade of an alternative; the way in which the best is run stands at the top of the page."""
    more = "" if entry.trade else entry.more
    return "" if entry.more_fraction is None else "; ".join(part for part in (more, entry.how) if part)


def _risk(view: View) -> Iterator[Html]:
    if view.risk:
        yield table(PAIRS, view.risk, "ll")
    if view.robust:
        yield tag("h3", view.headings["robust"])
        yield table(view.robust.heads, view.robust.rows, "l" + "r" * (len(view.robust.heads) - 1))
        yield from (tag("p", remark, class_="soft") for remark in view.robust.remarks)


def _months(view: View) -> Iterator[Html]:
    """The sustained step, days, dollars and the share that trains, beside the sources of what was assumed."""
    figures = [*filter(None, [view.sustained]), *view.cost, *view.goodput]
    told = table(PAIRS, [(figure.name, figure.text.removeprefix(f"{figure.name} ")) for figure in figures], "ll")
    yield beside(told, table(PAIRS, [(f"source: {name}", source) for name, source in view.sources], "ll"))


def _reasons(view: View) -> Iterator[Html]:
    """The shapes that were left out, the proof, and all that was assumed."""
    headings = view.headings
    if view.rejections:
        cells = [rejection.cells for rejection in view.rejections]
        yield section(headings["rejections"], table(("shapes", "reason", "for example"), cells, "rll", folds=True))
    if view.corrections:
        yield section(headings["corrections"], table(PAIRS, view.corrections, "ll"))
    yield section(headings["how_sure"], table(PAIRS, view.proof, "ll"))
    if view.assumptions:
        yield section(headings["assumptions"], bullets(view.assumptions))
    if view.warnings:
        yield section(headings["warnings"], bullets(view.warnings))
