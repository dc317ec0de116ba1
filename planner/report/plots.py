"""A sweep and a stage's memory as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from planner.answer import Interval
from planner.decide.sweep import Point, Sweep
from planner.errors import SpecError
from planner.layout.alive import MemoryOfStage
from planner.report.decisions import swept_axes
from planner.report.format import gibibytes, unit_for
from planner.report.pictures import BAR, MEMORY_COLOURS, PALETTE, Plot, draw_capacity, envelope, svg_file
from planner.schedule.replay import FloatArray
from planner.specs.base import grouped
from planner.specs.units import GIB
from planner.trainers.switches import written


def check_picture(path: str, name: str) -> None:
    """Raise SpecError unless `path` ends as an SVG file does; `name` is for one that has none."""
    if PurePath(path).suffix.lower() != ".svg":
        stem = (PurePath(path).stem or name).strip("-") or name
        raise SpecError(f"--plot: {path}: no such kind of picture", f"name it {stem}.svg")


class Axis(NamedTuple):
    """One quantity of every point, with its interval."""

    label: str
    value: Callable[[Point], float | None]
    interval: Callable[[Point], Interval | None]

    def of(self, point: Point) -> float:
        """The value of a point that has one."""
        value = self.value(point)
        assert value is not None
        return value

    def ends(self, point: Point) -> Interval:
        """The interval of a point, or its value twice."""
        return self.interval(point) or (self.of(point), self.of(point))


GPUS = Axis("GPUs", lambda point: point.num_gpus, lambda point: None)
RATE = Axis("tokens per second", lambda point: point.tokens_per_s, lambda point: point.tokens_per_s_interval)
DAYS = Axis("days", lambda point: point.days, lambda point: point.days_interval)
DOLLARS = Axis("dollars", lambda point: point.usd, lambda point: point.usd_interval)


class Series(NamedTuple):
    """Points that differ in the number of GPUs only, and their colour."""

    name: str
    points: list[Point]
    colour: str

    def known(self, *axes: Axis) -> Series:
        """The points that have a value on each axis."""
        return self._replace(points=[p for p in self.points if None not in (axis.value(p) for axis in axes)])


def series_of(sweep: Sweep) -> list[Series]:
    """The points that fit, by their options other than the number of GPUs."""
    axes = [axis for axis in swept_axes(sweep) if axis != "gpus"]
    found = grouped(
        (", ".join(written(point.options[axis]) for axis in axes if axis in point.options), point)
        for point in sweep.points
        if point.step_s is not None
    )
    return [
        Series(name, sorted(points, key=lambda point: point.num_gpus), PALETTE[number % len(PALETTE)])
        for number, (name, points) in enumerate(found.items())
    ]


def drawn_sweep(sweep: Sweep) -> str:
    """Tokens per second over GPUs, or a bar for each choice of one number of GPUs; dollars over days beside it where
    tokens are given."""
    series = series_of(sweep)
    is_one = len({point.num_gpus for one in series for point in one.points}) == 1
    plots = [_bars(series) if is_one else _lines(series, GPUS, RATE, {})]
    if any(point.usd is not None for point in sweep.points):
        goals = {DAYS: sweep.goal.deadline_days, DOLLARS: sweep.goal.budget_usd}
        plots.append(_lines(series, DAYS, DOLLARS, goals))
    return svg_file([plots], [(one.name, one.colour) for one in series if one.name])


def _lines(series: Sequence[Series], x: Axis, y: Axis, goals: Mapping[Axis, float | None]) -> Plot:
    """A line per series with intervals; dotted: as the fewest GPUs do; dashed: the goals."""
    known = [one.known(x, y) for one in series]
    right, top = (
        max([goals.get(axis) or 0.0, *(axis.ends(point)[1] for one in known for point in one.points)])
        for axis in (x, y)
    )
    title, x_title = "What time costs", x.label
    if x is GPUS:
        title, x_title = "How it scales", "GPUs; dotted: as the fewest do"
    plot = Plot(title, (0.0, 1.05 * right), (0.0, 1.08 * top or 1.0), x_title, y.label)
    for one in known:
        _line(plot, one, x, y)
    for axis, value in goals.items():
        if value is not None:
            plot.line(*(((value, value), plot.y) if axis is x else (plot.x, (value, value))), class_="capacity")
    return plot


def _line(plot: Plot, series: Series, x: Axis, y: Axis) -> None:
    across, up = ([axis.of(point) for point in series.points] for axis in (x, y))
    plot.line(across, up, stroke=series.colour)
    for point, at, high in zip(series.points, across, up, strict=True):
        plot.line(x.ends(point), (high, high), stroke=series.colour, class_="interval")
        plot.line((at, at), y.ends(point), stroke=series.colour, class_="interval")
        plot.dot(at, high, series.colour, f"{series.name} {x.label} {at:,.6g}, {y.label} {high:,.6g}".strip())
    if x is GPUS and len(across) > 1:
        ends, each = (across[0], across[-1]), up[0] / across[0]
        plot.line(ends, [each * at for at in ends], class_="front")


def _bars(series: Sequence[Series]) -> Plot:
    """A bar for the first point of each series, with its name."""
    rates, num_gpus = [RATE.ends(one.points[0])[1] for one in series], series[0].points[0].num_gpus
    top, right = 1.08 * max(rates), len(series) - 0.5
    plot = Plot(
        "Tokens per second of each", (-0.5, right), (0.0, top), f"{num_gpus:,} GPUs", RATE.label, marked=(1.0, 0.0)
    )
    for place, one in enumerate(series):
        plot.boxes(place - BAR, place + BAR, 0.0, RATE.of(one.points[0]), fill=one.colour)
        plot.line((place, place), RATE.ends(one.points[0]), class_="whisker")
        plot.text(one.name, place, 0.0, dy="17", text_anchor="middle")
    return plot


def drawn_memory(stage: MemoryOfStage) -> str:
    """A stack of what is there all the time, then activations, then what is there for a moment, then the reserve."""
    times_s, allocated = np.array(stage.curve, dtype=np.float64).T
    factor, unit = unit_for(float(times_s[-1]))
    memory = stage.memory
    # of what happens within a column, the most is drawn
    edges_s, _, total = envelope(times_s, allocated)
    held = envelope(times_s, np.array(stage.curve_activations_bytes, dtype=np.float64)).high
    state = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    layers: dict[str, FloatArray | float] = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": held,
        "logits" if memory.logits_bytes else "workspace": total - held - state,
        "reserved": memory.reserved_bytes,
    }
    peak = stage.peak_bytes + memory.reserved_bytes
    high = 1.09 * max(stage.capacity_bytes, peak) / GIB
    title = f"Stage {stage.stage}: {gibibytes(stage.peak_bytes)} GiB of tensors at the peak, "
    title += f"{gibibytes(memory.total_bytes)} GiB in all"
    plot = Plot(title, (0.0, edges_s[-1] * factor), (0.0, high), f"time in the step, {unit}", "GiB", width=800)
    below = np.zeros(len(total))
    for name, size in layers.items():
        above = below + size / GIB
        plot.boxes(edges_s[:-1] * factor, edges_s[1:] * factor, below, above, fill=MEMORY_COLOURS[name])
        below = above
    plot.dot(stage.peak_s * factor, peak / GIB, "#1c2128", title)
    draw_capacity(plot, stage.capacity_bytes)
    return svg_file([[plot]], [(name, MEMORY_COLOURS[name]) for name in layers])
