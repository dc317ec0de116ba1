"""A pipeline's step drawn as bars over time: a row per rank, a bar per action, waits left empty.

A short step is drawn whole. Of a long one, whose bars would be stripes, three windows are drawn, of its steady state,
its beginning and its end, below a strip that shows where in the step they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import reprice, with_microbatches
from planner.report.charts import ACTION_COLOURS, INK, LINE, NUMBER, PAPER, SOFT, drawing, figure, svg, svg_file
from planner.report.format import percent, seconds, unit_for
from planner.report.html import Html
from planner.report.labels import ACTIONS
from planner.schedule.actions import KINDS, F
from planner.schedule.timeline import FloatArray, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 11.0
LONG = 400_000
"""Actions of a step beyond which a shorter one is replayed: more take a second."""
_ROW_IN, _STRIP_IN, _AROUND_IN, _ENDS = (0.06, 0.22), (0.01, 0.1), 0.55, 0.72
"""Inches of a row, of one in the strip, and around rows; height of a row of beginning and end as a share of another."""
_BAR, _HOP = 0.82, 0.1
"""Shares of a row that its bars take, and the transfers below them."""
_NUMBER_PT, _DIGIT = (4.5, 6.5), 0.636
"""Smallest and largest numbers in bars, and the width of a digit as a share of its size."""
_UNSEEN = 900
"""Share of the strip's width below which a wait is not visible."""
_LIGHTEST = 0.72
"""Share of white in the colour of a rank's last chunk."""


class Picture(NamedTuple):
    """A drawing, and the sentences that say what it shows."""

    figure: Figure
    caption: str

    def svg(self, label: str) -> Html:
        """The drawing as part of a page."""
        return svg(self.figure, label)

    def file(self) -> str:
        """The drawing as an SVG file, on white."""
        return svg_file(self.figure)


def shown_step(plan: Plan) -> Candidate:
    """The plan's best layout, or a shorter step of the same pipeline where a replay would take long."""
    layout, num_microbatches = plan.parallelism, plan.parallelism.num_microbatches
    drawn = num_microbatches
    if not plan.best.actions:
        rounds = LONG // (3 * layout.pp * layout.vpp * layout.pp)
        drawn = min(drawn, max(2, rounds) * layout.pp + num_microbatches % layout.pp)
    return reprice(plan, with_microbatches(plan.best, drawn))


def draw_timeline(timeline: Timeline, bubble_fraction: float | None = None, num_microbatches: int = 0) -> Picture:
    """The step, whole or in windows; `bubble_fraction` is the plan's own, and `num_microbatches` that of its step where
    `timeline` is a shorter one of the same pipeline."""
    step = DrawnStep(timeline)
    windows = step.windows()
    rows, strips = timeline.schedule.pp, len(windows) > 1
    row_in, strip_in = (float(np.clip(fill / rows, *ends)) for fill, ends in ((3.4, _ROW_IN), (0.6, _STRIP_IN)))
    heights = [strip_in * rows, row_in * rows, _ENDS * row_in * rows] if strips else [row_in * rows]
    drawn = figure(WIDTH_IN, sum(heights) + _AROUND_IN * len(heights) + 0.3)
    with drawing():
        panels = drawn.subplot_mosaic("ss;00;12" if strips else "0", gridspec_kw={"height_ratios": heights})
        if strips:
            _draw_strip(panels["s"], step, windows)
        for number, window in enumerate(windows):
            size_pt = WIDTH_IN * 72 / (2 if number else 1) - 50, row_in * 72 * (_ENDS if number else 1)
            _draw_window(panels[str(number)], step, window, *size_pt)
        _legend(drawn, step)
    return Picture(drawn, caption(step, windows, bubble_fraction, num_microbatches))


def _draw_window(axes: Axes, step: DrawnStep, window: Window, width_pt: float, row_pt: float) -> None:
    factor, _ = unit_for(step.timeline.makespan_s)
    left, right = window.from_s * factor, window.to_s * factor
    starts, ends = np.maximum(step.start_s * factor, left), np.minimum(step.end_s * factor, right)
    seen = starts < ends
    graph, timing = step.timeline.graph, step.timeline.timing
    for kind, chunk in sorted({*zip(graph.kind[seen].tolist(), step.chunk[seen].tolist(), strict=True)}):
        own = seen & (graph.kind == kind) & (step.chunk == chunk)
        colour = _shade(KINDS[kind], chunk, step.num_chunks)
        _boxes(axes, starts[own], ends[own], step.rows[own] - _BAR / 2, _BAR, facecolor=colour)
    sent, arrived = (timing.arrival_s - timing.hop_s) * factor, timing.arrival_s * factor
    moving = (timing.hop_s > 0) & (arrived > left) & (sent < right)
    lefts, rights = np.maximum(sent, left)[moving], np.minimum(arrived, right)[moving]
    _boxes(axes, lefts, rights, step.rows[moving] + _BAR / 2, _HOP, facecolor=SOFT, linewidth=0)
    _numbers(axes, step, seen, (starts, ends), row_pt, width_pt / (right - left) if right > left else 0.0)
    _time_axis(axes, step, window.title, left, right)


def _numbers(
    axes: Axes, step: DrawnStep, seen: Mask, spans: tuple[FloatArray, FloatArray], row_pt: float, pt_per_unit: float
) -> None:
    """The micro-batch of each bar that has room for it."""
    starts, ends = spans
    graph, most_pt = step.timeline.graph, min(_NUMBER_PT[1], _BAR * row_pt - 2)
    for index in np.flatnonzero(seen).tolist():
        word = str(graph.microbatch[index])
        room_pt = (ends[index] - starts[index]) * pt_per_unit / ((len(word) + 0.3) * _DIGIT)
        size_pt = min(most_pt, np.floor(2 * room_pt) / 2)
        if size_pt >= _NUMBER_PT[0]:
            centre = (starts[index] + ends[index]) / 2, step.rows[index]
            ink = _on(_shade(KINDS[graph.kind[index]], int(step.chunk[index]), step.num_chunks))
            axes.text(*centre, word, ha="center", va="center_baseline", size=size_pt, color=ink, in_layout=False,
                      gid=f"{NUMBER}{index}")  # fmt: skip


def _draw_strip(axes: Axes, step: DrawnStep, windows: list[Window]) -> None:
    """The whole step: where each rank runs forwards only, both in turn, and backwards only."""
    makespan_s, (factor, _) = step.timeline.makespan_s, unit_for(step.timeline.makespan_s)
    before, behind = step.start_s < step.turns_s[step.rank], step.start_s >= step.last_forwards_s[step.rank]
    for colour, phase in (_shade("F", 0, 1), before), (LINE, ~before & ~behind), (_shade("B", 0, 1), behind & ~before):
        for rank in range(step.timeline.schedule.pp):
            own = phase & (step.rank == rank)
            starts, ends = _runs(step.start_s[own], step.end_s[own], makespan_s / _UNSEEN)
            tops = np.full(len(starts), rank - 0.5, dtype=np.float64)
            _boxes(axes, starts * factor, ends * factor, tops, 1.0, facecolor=colour, linewidth=0)
    for window in windows:
        axes.axvspan(window.from_s * factor, window.to_s * factor, facecolor="none", edgecolor=INK, linewidth=1)
    title = "whole step (grey: forwards and backwards in turn; framed: the windows below)"
    _time_axis(axes, step, title, 0.0, makespan_s * factor)
    axes.set_yticks([])
    axes.set_ylabel("")


def _runs(start_s: FloatArray, end_s: FloatArray, unseen_s: float) -> tuple[FloatArray, FloatArray]:
    """Starts and ends of runs of actions between which no gap is longer than `unseen_s`."""
    if not len(start_s):
        return start_s, end_s
    order = np.argsort(start_s, kind="stable")
    starts, ends = start_s[order], end_s[order]
    splits = np.flatnonzero(starts[1:] - ends[:-1] > unseen_s)
    return starts[np.append(0, splits + 1)], ends[np.append(splits, len(ends) - 1)]


def _boxes(axes: Axes, lefts: FloatArray, rights: FloatArray, tops: FloatArray, height: float, **style: object) -> None:
    """Rectangles of one look as one path, which keeps the file small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not len(lefts):
        return
    corners = [(lefts, tops), (rights, tops), (rights, tops + height), (lefts, tops + height), (lefts, tops)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(lefts))
    # no add_patch, which follows each corner for limits that the axes have
    axes.add_artist(PathPatch(Path(vertices, codes), **{"edgecolor": PAPER, "linewidth": 0.35, **style}))


def _time_axis(axes: Axes, step: DrawnStep, title: str, left: float, right: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ranks = step.timeline.schedule.pp
    axes.set_xlim(left, right if right > left else left + 1)
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(min(ranks, 16), integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("rank", size=8)
    axes.set_title(f"{title}, {unit_for(step.timeline.makespan_s)[1]}", loc="left", size=8)


def _legend(drawn: Figure, step: DrawnStep) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    graph, chunks = step.timeline.graph, step.num_chunks
    kinds = [KINDS[kind] for kind in np.unique(graph.kind)]
    names: dict[str, str] = {}
    for kind in kinds:
        colour = _shade(kind, 0, chunks)
        names[colour] = f"{names[colour]}, {ACTIONS[kind]}" if colour in names else ACTIONS[kind]
    entries: list[tuple[Any, str]] = [(Patch(facecolor=colour), name) for colour, name in names.items()]
    if chunks > 1:
        shades = tuple(Patch(facecolor=_shade(kinds[0], chunk, chunks)) for chunk in range(chunks))
        entries.append((shades, f"chunk 0 to {chunks - 1}"))
    if (step.timeline.timing.hop_s > 0).any():
        entries.append((Patch(facecolor=SOFT), "transfer to the rank"))
    entries.append((Patch(facecolor="none", edgecolor=LINE), "wait"))
    marks, labels = [mark for mark, _ in entries], [label for _, label in entries]
    beside = {tuple: HandlerTuple(ndivide=None, pad=0)}
    drawn.legend(marks, labels, loc="outside upper left", ncols=len(labels), fontsize=8, handler_map=beside)


def _shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a kind, lighter from chunk to chunk."""
    from matplotlib.colors import to_hex, to_rgb

    white = _LIGHTEST * chunk / max(chunks - 1, 1.5)  # two chunks differ enough with less
    red, green, blue = (part + (1 - part) * white for part in to_rgb(ACTION_COLOURS[kind]))
    return to_hex((red, green, blue))


def _on(colour: str) -> str:
    """Black or white, whichever is read better on `colour`."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#000000"


WHOLE, WINDOW, MOST = 80, 40, 1_600
"""Bars of a rank up to which a step is drawn whole, bars of a rank in a window, and the most bars of one window: in 11
inches they still bear the number of their micro-batch."""

Mask = npt.NDArray[np.bool_]


class Window(NamedTuple):
    """A part of a step and its title."""

    title: str
    from_s: float
    to_s: float


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A replayed step as arrays along all of its actions."""

    timeline: Timeline

    @property
    def start_s(self) -> FloatArray:
        """Time when each action starts."""
        return self.timeline.timing.start_s

    @property
    def end_s(self) -> FloatArray:
        """Time when each action ends."""
        return self.timeline.timing.end_s

    @property
    def rank(self) -> npt.NDArray[np.int32]:
        """Rank of each action."""
        return self.timeline.graph.rank

    @cached_property
    def rows(self) -> FloatArray:
        """Height of each action in the drawing: its rank."""
        return self.rank.astype(np.float64)

    @cached_property
    def is_forward(self) -> Mask:
        """True for forwards."""
        forward: Mask = self.timeline.graph.kind == F
        return forward

    @cached_property
    def chunk(self) -> npt.NDArray[np.int32]:
        """Number of the chunk that each action works on, counted on its rank from 0."""
        return np.array(self.timeline.schedule.stage_to_chunk, dtype=np.int32)[self.timeline.graph.stage]

    @cached_property
    def num_chunks(self) -> int:
        """The most chunks of a rank."""
        return max(self.timeline.schedule.stage_to_chunk) + 1

    @cached_property
    def turns_s(self) -> FloatArray:
        """Times, per rank, of the first action that is no forward; the step's end where there is none."""
        firsts = np.full(self.timeline.schedule.pp, self.timeline.makespan_s)
        np.minimum.at(firsts, self.rank[~self.is_forward], self.start_s[~self.is_forward])
        return firsts

    @cached_property
    def last_forwards_s(self) -> FloatArray:
        """Times, per rank, of the end of the last forward."""
        lasts = np.zeros(self.timeline.schedule.pp)
        np.maximum.at(lasts, self.rank[self.is_forward], self.end_s[self.is_forward])
        return lasts

    @cached_property
    def first_s(self) -> FloatArray:
        """Times, per rank, of its first action."""
        return np.array([float(start_s.min()) for start_s in self.timeline.start_s])

    @cached_property
    def final_s(self) -> FloatArray:
        """Times, per rank, of the end of its last action."""
        return np.array([float(end_s.max()) for end_s in self.timeline.end_s])

    @property
    def steady_s(self) -> tuple[float, float]:
        """Time from which all ranks have run a backward, and time of the first rank's last forward."""
        return float(self.turns_s.max()), float(self.last_forwards_s.min())

    def windows(self) -> list[Window]:
        """The whole step, or its steady state, beginning and end."""
        makespan_s, ranks = self.timeline.makespan_s, self.timeline.schedule.pp
        most = int(np.bincount(self.rank).max(initial=0))
        if most <= WHOLE and len(self.rank) <= MOST:
            return [Window("whole step", 0.0, makespan_s)]
        long_s = makespan_s / most * min(WINDOW, max(MOST // ranks, 8))
        fill_s, drain_s = self.steady_s
        middle_s = (fill_s + drain_s) / 2
        from_s = min(max(middle_s - long_s / 2, 0.0), makespan_s - long_s)
        middle = Window("from forwards to backwards", from_s, from_s + long_s)
        if fill_s + long_s < drain_s:
            from_s = self._round_between(fill_s, middle_s, from_s)
            middle = Window("steady state", from_s, from_s + long_s)
        begin_s, end_s = (min(max(long_s / 2, 1.1 * slant_s), 1.6 * long_s) for slant_s in self._slants_s)
        return [middle, Window("beginning", 0.0, begin_s), Window("end", makespan_s - end_s, makespan_s)]

    @property
    def _slants_s(self) -> tuple[float, float]:
        """Seconds until the last rank has begun, and from the first rank's end on."""
        begun_s = max(float(start_s[0]) for start_s in self.timeline.start_s)
        return begun_s, self.timeline.makespan_s - min(float(end_s.max()) for end_s in self.timeline.end_s)

    def _round_between(self, from_s: float, to_s: float, otherwise_s: float) -> float:
        """The last time between both at which the busiest rank begins a round of forwards on its first chunk."""
        rank = int(self.timeline.busy_s.argmax())
        own = (self.rank == rank) & self.is_forward
        order = np.argsort(self.start_s[own], kind="stable")
        starts_s, chunks = self.start_s[own][order], self.chunk[own][order]
        begins = (chunks == 0) & (np.append(-1, chunks[:-1]) != 0)
        between = starts_s[begins & (starts_s >= from_s) & (starts_s <= to_s)]
        return float(between[-1]) if len(between) else otherwise_s


def caption(step: DrawnStep, windows: list[Window], bubble_fraction: float | None, num_microbatches: int) -> str:
    """The sentences that say what is drawn, and what the step is made of; arguments are those of `draw_timeline`."""
    timeline, schedule = step.timeline, step.timeline.schedule
    makespan_s, (fill_s, drain_s) = timeline.makespan_s, step.steady_s
    idle = f", of which ranks idle {percent(timeline.bubble_fraction)}"
    if bubble_fraction is not None:
        idle = f"; the pipeline bubble is {percent(bubble_fraction)} of the step"
    each = f" in {step.num_chunks} chunks each" if step.num_chunks > 1 else ""
    on = f"{schedule.pp} ranks" if schedule.pp > 1 else "1 rank"
    says = f"{schedule.name}, {schedule.num_microbatches} micro-batches on {on}{each}: "
    says += f"{seconds(makespan_s)}{idle}."
    if num_microbatches > schedule.num_microbatches:
        says += f" The plan's step has {num_microbatches} micro-batches, and the others repeat the steady state."
    if fill_s < drain_s:
        parts = (fill_s, drain_s - fill_s, makespan_s - drain_s)
        fill, steady, drain = (seconds(part_s, makespan_s) for part_s in parts)
        says += (
            f" It fills for {fill}, until all ranks have begun a backward, is steady for {steady}, and drains for "
            f"{drain}, from the first rank's last forward on."
        )
    if len(windows) > 1:
        spans = (f"{window.title} ({seconds(window.to_s - window.from_s)})" for window in windows)
        says += f" Drawn: {', '.join(spans)}."
    return says + " Zoomed, it has the numbers of the micro-batches."
