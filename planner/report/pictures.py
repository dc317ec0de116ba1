"""Pictures of page and report as SVG: memory and seconds of each stage, memory over the step, the alternatives, and the
pipeline's timeline."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from planner.answer import Plan, PricedLayout
from planner.layout.memory_curve import MemoryCurve, memory_curves
from planner.report.format import MEMORY, gibibytes, seconds, unit_for
from planner.report.html import draw, tag
from planner.report.rows import Entry
from planner.report.schedules import DrawnStep, Window, caption, shown_step
from planner.schedule.actions import KINDS
from planner.schedule.replay import FloatArray, Timeline, replay
from planner.specs.base import grouped
from planner.specs.units import GIB

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind eyes tell apart."""
MEMORY_COLOURS = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "logits": "#D55E00",
    "workspace": "#CC79A7",
    "reserved": "#999999",
}
"""Colour of each item of a stage's memory, in every chart."""
ACTION_COLOURS = {"F": "#0072B2", "B": "#009E73", "I": "#009E73", "W": "#E69F00"}
"""Colour of a forward, a backward, an input gradient and a weight gradient."""
BAR = 0.42
"""Half the width of a stage's bar, where stages are one apart."""
_LEAST_SLOTS = 6
"""Number of bars for which a chart has space at least."""
_LIGHTEST = 0.45
"""The share of white in the colour of a rank's last chunk."""
_WIDE, _NARROW = 1000.0, 500.0
_ROW, _HIGHEST = 18.0, 560.0
"""Height of a rank's row, and the greatest height of all rows together."""
_NUMBER_MARGIN, _DIGIT_WIDTH = 3.0, 5.4
"""Width of a bar around the number of its micro-batch, and of a digit of it."""
_DIGIT = 9.0
"""Units of height of a number."""
_ACTIONS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def pictures(plan: Plan) -> dict[str, Markup]:
    """All of them, by the section that they belong to."""
    candidate = shown_step(plan)
    timeline = replay(candidate.order, candidate.durations)
    capacity = plan.cluster.hardware.memory_bytes
    stages = tuple(dict.fromkeys((plan.best.worst_stage.stage, 0, len(plan.stages) - 1)))
    curves = memory_curves(candidate, timeline, stages)
    idle = plan.step.breakdown.bubble_s / plan.step.step_s
    return {
        "stacks": stacks(plan, capacity),
        "curve": curve(curves, capacity),
        "timeline": pipeline(timeline, idle, plan.parallelism.num_microbatches),
    }


def stacks(plan: Plan, capacity_bytes: int) -> Markup:
    """A bar per stage of what fills its GPU, and the capacity as a line."""
    totals = [stage.memory.total_bytes for stage in plan.stages]
    worst = plan.best.worst_stage
    label = (
        f"Memory of each stage by item. The fullest, stage {worst.stage}, needs "
        f"{gibibytes(worst.memory.total_bytes)} of {gibibytes(capacity_bytes)} GiB."
    )
    plot = _of_stages(label, len(totals), 1.08 * max(capacity_bytes, *totals) / GIB, "GiB")
    items = {name: label for name, label in MEMORY.items() if name != "total_bytes"}
    legend = plot.stack(
        (label, MEMORY_COLOURS[label], [getattr(stage.memory, name) / GIB for stage in plan.stages])
        for name, label in items.items()
    )
    draw_capacity(plot, capacity_bytes)
    for each in plan.stages:
        if (ends := each.memory.total_bytes_interval) is not None:
            plot.line([each.stage] * 2, [end / GIB for end in ends], class_="whisker")
    plot.hint(f"stage {stage}: {gibibytes(total)} GiB" for stage, total in enumerate(totals))
    return draw("picture", plot.svg(), legend)


def stage_seconds(layout: PricedLayout) -> Markup:
    """A bar per stage: its computing and its exchanges over all micro-batches, and the rest of the step."""
    step_s, stages, count = layout.step.step_s, layout.stages, layout.parallelism.num_microbatches
    factor, unit = unit_for(step_s)
    spent = {
        "forward": (ACTION_COLOURS["F"], [count * stage.forward_s for stage in stages]),
        "backward": (ACTION_COLOURS["B"], [count * stage.backward_s for stage in stages]),
        "exchanges": (PALETTE[1], [count * (stage.forward_comm_s + stage.backward_comm_s) for stage in stages]),
    }
    used = [sum(values) for values in zip(*(values for _, values in spent.values()), strict=True)]
    spent["waits and the rest"] = ("var(--line)", [max(step_s - each, 0.0) for each in used])
    label = f"Seconds of each stage in a step of {seconds(step_s)}"
    plot = _of_stages(label, len(stages), 1.05 * max(step_s, *used) * factor, f"{unit} of a step")
    legend = plot.stack((name, colour, [each * factor for each in values]) for name, (colour, values) in spent.items())
    plot.line(plot.x, [step_s * factor] * 2, class_="whisker")
    items = (
        ", ".join(f"{name} {seconds(each[at], step_s)}" for name, (_, each) in spent.items())
        for at in range(len(stages))
    )
    plot.hint(f"stage {stage.stage}: {said}" for stage, said in zip(stages, items, strict=True))
    return draw("picture", plot.svg(), legend, "Each stage over all micro-batches of a step, whose end is the line.")


def _of_stages(label: str, number: int, high: float, title: str) -> Plot:
    """A plot with a place for the bar of each stage."""
    room = max(0, _LEAST_SLOTS - number) / 2
    return Plot(label, (-0.6 - room, number - 0.4 + room), (0.0, high), "stage", title, marked=(0.0, number - 1.0))


def steps(entries: Sequence[Entry]) -> Markup:
    """The step of each layout with its 80% interval; the first of them is the best, whose interval is a band."""
    found = [entry.layout.step for entry in entries]
    factor, unit = unit_for(found[0].step_s)
    ends = [[end * factor for end in step.step_s_interval or (step.step_s, step.step_s)] for step in found]
    low, high = min(end for end, _ in ends), max(end for _, end in ends)
    margin = 0.05 * (high - low or low)
    has_bars = found[0].step_s_interval is not None
    label = f"The step of the best layout and its {len(entries) - 1} alternatives with intervals"
    x_title = f"step, {unit}; bars are 80% intervals" if has_bars else f"step, {unit}"
    last = len(entries) - 0.5
    plot = Plot(label, (low - margin, high + margin), (last, -0.5), x_title, "alternative; 0 is the best", whole=True)
    if has_bars:
        plot.boxes(ends[0][0], ends[0][1], last, -0.5, fill="var(--line)", opacity="0.4")
    for row, (entry, own) in enumerate(zip(entries, ends, strict=True)):
        plot.line(own, [row, row], stroke=PALETTE[not row], class_="interval")
        plot.dot(entry.layout.step.step_s * factor, row, PALETTE[not row], f"{entry.name} {entry.sizes}: {entry.step}")
    says = "Grey is the best's interval: a prediction alone cannot tell layouts apart whose intervals reach into it."
    return draw("picture", plot.svg(), says if has_bars else "")


def curve(curves: tuple[MemoryCurve, ...], capacity_bytes: int) -> Markup:
    """Memory over the step of the fullest stage, the first and the last, and the capacity as a line."""
    fullest = curves[0]
    end_s, most = float(fullest.times_s[-1]), max(c.peak_bytes + c.reserved_bytes for c in curves)
    factor, unit = unit_for(end_s)
    peak = gibibytes(fullest.peak_bytes + fullest.reserved_bytes)
    label = f"Memory over the step. Stage {fullest.rank} has the highest peak, {peak} GiB at {seconds(fullest.peak_s)}."
    high = 1.08 * max(capacity_bytes, most) / GIB
    plot = Plot(label, (0.0, end_s * factor), (0.0, high), f"time in the step, {unit}", "GiB")
    colours = []
    for each, colour in zip(curves, PALETTE, strict=False):
        edges_s, low, top = envelope(each.times_s, (each.allocated_bytes + each.reserved_bytes) / GIB)
        plot.boxes(edges_s[:-1] * factor, edges_s[1:] * factor, low, top, fill=colour, class_="shade")
        plot.line(np.repeat(edges_s * factor, 2)[1:-1], np.repeat(top, 2), stroke=colour)
        colours.append((f"stage {each.rank}" + (", the fullest" if each is fullest else ""), colour))
    draw_capacity(plot, capacity_bytes)
    return draw("picture", plot.svg(), draw("keys", colours))


def draw_capacity(plot: Plot, capacity_bytes: int) -> None:
    """The line of the GPU's memory."""
    plot.line(plot.x, [capacity_bytes / GIB] * 2, class_="capacity")
    plot.text(f"GPU {gibibytes(capacity_bytes)}", plot.x[1], capacity_bytes / GIB, text_anchor="end", class_="alarm")


def pipeline(timeline: Timeline, idle_fraction: float | None = None, num_microbatches: int = 0) -> Markup:
    """The step, or its steady state, beginning and end, a row per rank."""
    step = DrawnStep(timeline)
    windows = step.windows()
    says = caption(step, windows, idle_fraction, num_microbatches)
    drawn = [_window(step, window, _NARROW if number else _WIDE).svg() for number, window in enumerate(windows)]
    shapes = [_shape(step, width) for width in (_WIDE, _NARROW)]
    marks = [*_kinds(step), *([("forwards and backwards in turn", "var(--both)")] if drawn[1:] else [])]
    return draw("timeline", drawn[0], drawn[1:], shapes, marks, says)


def timeline_file(timeline: Timeline) -> str:
    """The step as an SVG file: what `pipeline` shows, one below the other."""
    step = DrawnStep(timeline)
    first, *ends = step.windows()
    rows = [[_window(step, first, _WIDE)], [_window(step, window, _NARROW) for window in ends]]
    return svg_file([row for row in rows if row], list(_kinds(step)))


def svg_file(rows: Sequence[Sequence[Plot]], legend: Sequence[tuple[str, str]]) -> str:
    """Rows of plots as an SVG file, on white, below a legend of names and colours."""
    drawn, y = [], 20.0
    for row in rows:
        x = 0.0
        for plot in row:
            drawn.append(plot.svg(x=f"{x:g}", y=f"{y:g}"))
            x += plot.width
        y += max(plot.height for plot in row)
    style = draw("plot_style").replace("width: 100%; height: auto; display: block; ", "")  # the size that drawings say
    on_white = Markup(re.sub(r"var\(--(\w+)\)", lambda found: _LIGHT[found[1]], style))
    return draw("svg_file", max(sum(plot.width for plot in row) for row in rows), y, legend, drawn, on_white)


_LIGHT = {
    "soft": "#59636e", "alarm": "#b3261e", "line": "#d5dae0", "page": "#ffffff", "both": "#7fb8b5", "ink": "#1c2128",
}  # fmt: skip


def _shape(step: DrawnStep, width: float) -> Markup:
    """The whole step at a glance: where each rank runs forwards only, both in turn, and backwards only."""
    ranks, makespan_s = step.timeline.schedule.pp, step.timeline.makespan_s
    factor, _ = unit_for(makespan_s)
    plot = _of_ranks(step, Window("whole step", 0.0, makespan_s), "The whole step", width)
    rank = np.arange(ranks, dtype=np.float64)
    begins, ends = step.first_s * factor, step.final_s * factor
    turns, lasts = np.minimum(step.turns_s * factor, ends), np.minimum(step.last_forwards_s * factor, ends)
    spans = ((begins, turns, "F"), (turns, np.maximum(lasts, turns), ""), (np.maximum(lasts, turns), ends, "B"))
    for left, right, kind in spans:
        style = {"fill": ACTION_COLOURS[kind]} if kind else {"class_": "turns"}
        plot.boxes(left, right, rank + 0.44, rank - 0.44, **style)
    return plot.svg()


def _of_ranks(step: DrawnStep, window: Window, title: str, width: float) -> Plot:
    """A plot of a part of the step with a row for each rank."""
    ranks, (factor, unit) = step.timeline.schedule.pp, unit_for(step.timeline.makespan_s)
    label = f"{title}: {ranks} ranks over {seconds(window.to_s - window.from_s)}"
    x, y, high = (window.from_s * factor, window.to_s * factor), (ranks - 0.5, -0.5), 50 + min(_ROW * ranks, _HIGHEST)
    return Plot(label, x, y, f"{window.title}, {unit}", "rank", width, high, whole=True)


def _kinds(step: DrawnStep) -> Iterator[tuple[str, str]]:
    shown = [KINDS[kind] for kind in np.unique(step.timeline.graph.kind).tolist()]
    for colour, kinds in grouped((ACTION_COLOURS[kind], _ACTIONS[kind]) for kind in shown).items():
        yield ", ".join(kinds) + (", lighter from chunk to chunk" if step.num_chunks > 1 else ""), colour
    if (step.timeline.timing.hop_s > 0).any():
        yield "transfer to the rank", "#59636e"


def _window(step: DrawnStep, window: Window, width: float) -> Plot:
    graph, (factor, _) = step.timeline.graph, unit_for(step.timeline.makespan_s)
    plot = _of_ranks(step, window, f"Timeline of the pipeline, {window.title}", width)
    left, right = plot.x
    seen = (step.end_s > window.from_s) & (step.start_s < window.to_s)
    starts, ends = np.maximum(step.start_s * factor, left), np.minimum(step.end_s * factor, right)
    for kind, chunk in sorted({*zip(graph.kind[seen].tolist(), step.chunk[seen].tolist(), strict=True)}):
        own = seen & (graph.kind == kind) & (step.chunk == chunk)
        colour = _shade(ACTION_COLOURS[KINDS[kind]], chunk, step.num_chunks)
        plot.boxes(starts[own], ends[own], step.rows[own] + 0.44, step.rows[own] - 0.44, fill=colour, class_="action")
    timing = step.timeline.timing
    sent, arrived = (timing.arrival_s - timing.hop_s) * factor, timing.arrival_s * factor
    moves = (timing.hop_s > 0) & (arrived > left) & (sent < right)
    row = step.rows[moves]
    plot.boxes(np.maximum(sent, left)[moves], np.minimum(arrived, right)[moves], row + 0.5, row + 0.44, class_="hop")
    plot.inside.extend(_numbers(plot, step, np.flatnonzero(seen).tolist(), starts, ends))
    return plot


def _numbers(plot: Plot, step: DrawnStep, seen: list[int], starts: FloatArray, ends: FloatArray) -> Iterator[Markup]:
    """The micro-batch of each bar that has room for it."""
    graph = step.timeline.graph
    if plot.down(0.0) - plot.down(1.0) > -_DIGIT:
        return
    for index in seen:
        left, right = plot.across(float(starts[index])), plot.across(float(ends[index]))
        word = str(graph.microbatch[index])
        if right - left >= _NUMBER_MARGIN + _DIGIT_WIDTH * len(word):
            middle, y = (left + right) / 2, plot.down(float(step.rank[index])) + 3
            shade = _shade(ACTION_COLOURS[KINDS[graph.kind[index]]], int(step.chunk[index]), step.num_chunks)
            class_ = "on" if _is_dark(shade) else "dark"
            yield tag("text", word, x=f"{middle:.1f}", y=f"{y:.1f}", class_=class_)


def _is_dark(colour: str) -> bool:
    """True where white is read better on a colour than black."""
    red, green, blue = bytes.fromhex(colour[1:])
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 * 255


def _shade(colour: str, chunk: int, chunks: int) -> str:
    """A colour, lighter from chunk to chunk."""
    white = _LIGHTEST * chunk / max(chunks - 1, 1)
    return "#" + bytes(round(part + (255 - part) * white) for part in bytes.fromhex(colour[1:])).hex()


COLUMNS = 240
"""Columns of a curve; of what happens within one, only the most and the least can be seen."""


class Envelope(NamedTuple):
    """The least and the most of a curve within each of its columns, and the times between columns."""

    edges_s: FloatArray
    low: FloatArray
    high: FloatArray


def envelope(times_s: FloatArray, values: FloatArray, columns: int = COLUMNS) -> Envelope:
    """A step function, `values[i]` from `times_s[i]` on, by columns of equal width from its first time to its last."""
    edges_s = np.linspace(times_s[0], times_s[-1], columns + 1)
    first = np.maximum(np.searchsorted(times_s, edges_s[:-1], "right") - 1, 0)
    end = np.maximum(np.searchsorted(times_s, edges_s[1:], "left"), first + 1)
    end[-1] = len(values)
    pairs = np.column_stack((first, end)).ravel()
    padded = np.append(values, values[-1])
    low, high = (extreme.reduceat(padded, pairs)[::2] for extreme in (np.minimum, np.maximum))
    return Envelope(edges_s, low, high)


Values = FloatArray | float
_LEFT, _RIGHT, _TOP, _FOOT = 40.0, 8.0, 14.0, 32.0


@dataclass(frozen=True, slots=True)
class Plot:
    """A box of `width` × `height` units with an axis below and one on the left."""

    label: str
    """The words that a screen reader says of it."""
    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str = ""
    y_title: str = ""
    width: float = 460.0
    height: float = 240.0
    whole: bool = False
    """True where only whole numbers are marked on the left."""
    marked: tuple[float, float] | None = None
    """The whole numbers below that are marked, none where the first is above the last; null where any are."""
    inside: list[Markup] = field(default_factory=list)

    def across(self, value: Any) -> Any:
        """Place of a value of the axis below."""
        low, high = self.x
        return _LEFT + (value - low) / (high - low or 1.0) * (self.width - _LEFT - _RIGHT)

    def down(self, value: Any) -> Any:
        """Place of a value of the axis on the left."""
        low, high = self.y
        return self.height - _FOOT - (value - low) / (high - low) * (self.height - _FOOT - _TOP)

    def boxes(self, left: Values, right: Values, bottom: Values, top: Values, **style: str) -> None:
        """Rectangles of one style, drawn as one path."""
        corners = np.broadcast(self.across(left), self.across(right), self.down(bottom), self.down(top))
        path = "".join(f"M{a:.1f} {c:.1f}H{b:.1f}V{d:.1f}H{a:.1f}z" for a, b, c, d in corners)
        if path:
            self.inside.append(tag("path", d=path, **style))

    def line(self, x: Iterable[float], y: Iterable[float], **style: str) -> None:
        """Straight lines from point to point."""
        path = "L".join(f"{self.across(a):.1f} {self.down(b):.1f}" for a, b in zip(x, y, strict=True))
        self.inside.append(tag("path", d=f"M{path}", fill="none", **style))

    def text(self, words: object, x: float, y: float, **style: object) -> None:
        """Words at a point of the axes."""
        self.inside.append(tag("text", words, x=f"{self.across(x):.1f}", y=f"{self.down(y) - 3:.1f}", **style))

    def dot(self, x: float, y: float, colour: str, hint: str) -> None:
        """A point, and the text that appears where the pointer rests on it."""
        place = {"cx": f"{self.across(x):.1f}", "cy": f"{self.down(y):.1f}"}
        self.inside.append(tag("circle", tag("title", hint), **place, r="3.5", fill=colour))

    def stack(self, parts: Iterable[tuple[str, str, Sequence[float]]]) -> Markup:
        """Bars one above the other, of each part that is anything, by its name and colour; returns the legend."""
        used, below = list[tuple[str, str]](), np.zeros(1)
        for name, colour, values in parts:
            sizes, at = np.array(values), np.arange(len(values), dtype=np.float64)
            if sizes.any():
                self.boxes(at - BAR, at + BAR, below, below + sizes, fill=colour)
                below = below + sizes
                used.append((name, colour))
        return draw("keys", used)

    def hint(self, texts: Iterable[str]) -> None:
        """The text that appears where the pointer rests on the place of each bar."""
        for at, words in enumerate(texts):
            x, wide = self.across(at - 0.5), self.across(at + 0.5) - self.across(at - 0.5)
            spans = {"x": f"{x:.1f}", "width": f"{wide:.1f}", "y": "0", "height": f"{self.height:g}"}
            self.inside.append(tag("rect", tag("title", words), **spans, fill="transparent"))

    def svg(self, **place: str) -> Markup:
        """The whole drawing, at a place of another one where one is given."""
        rows = [(self.down(value), value) for value in _ticks(min(self.y), max(self.y), 6, self.whole)]
        marked = _ticks(*(self.marked or self.x), 8, self.marked is not None)
        if place:
            place |= {"width": f"{self.width:g}", "height": f"{self.height:g}"}
        return draw("svg", self, rows, [(self.across(value), value) for value in marked], place)


def _ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """The values marked on an axis, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low] if high == low else []
    rough = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [float(f"{place * step:.12g}") for place in places]
