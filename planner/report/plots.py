"""A sweep and a stage's memory as pictures: matplotlib draws files, plotille in terminals; the axes are theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotille

from planner.answer import Interval
from planner.answer.memory import MemoryAnswer, MemoryOfStage
from planner.decide.sweep import Point, Sweep
from planner.errors import SpecError
from planner.files import STDOUT, write_bytes, write_text
from planner.report.charts import INK, MEMORY_COLOURS, PALETTE, draw_capacity, drawing, envelope, figure, image, svg
from planner.report.format import bar, gibibytes, large, unit_for
from planner.report.html import page, section, table, tag
from planner.report.memory import grouped
from planner.report.sweep import as_rows, says, swept_axes
from planner.specs.units import GIB
from planner.trainers.switches import written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vPX"
SUFFIXES = (".png", ".svg", ".html")
MOST_TICKS = 8
"""Numbers of GPUs that are all marked on the axis."""


def check_picture(path: str, name: str) -> None:
    """Raise SpecError unless a picture can be drawn to `path`, and ModuleNotFoundError without what draws it; `name` is
    for one that has none."""
    if path == STDOUT:
        return
    if PurePath(path).suffix.lower() not in SUFFIXES:
        stem = PurePath(path).stem or name
        raise SpecError(f"--plot: {path}: no such kind of picture", f"name it {stem}.svg, {stem}.png or {stem}.html")
    import_module("matplotlib")  # before what is drawn has been worked out


class Series(NamedTuple):
    """Points that differ in the number of GPUs only."""

    name: str
    points: list[Point]


class Axis(NamedTuple):
    """A number of every point, with its interval."""

    label: str
    value: Callable[[Point], float | None]
    interval: Callable[[Point], Interval | None]


GPUS = Axis("GPUs", lambda point: point.num_gpus, lambda point: None)
RATE = Axis("tokens per second", lambda point: point.tokens_per_s, lambda point: point.tokens_per_s_interval)
DAYS = Axis("days", lambda point: point.days, lambda point: point.days_interval)
DOLLARS = Axis("dollars", lambda point: point.usd, lambda point: point.usd_interval)


TITLES = {GPUS.label: "How it scales; dotted: as the fewest GPUs do", DAYS.label: "What time costs"}
"""The titles of the panels by what lies along their axes."""


def draw_sweep(sweep: Sweep, path: str, force: bool = False) -> None:
    """Draw tokens per second over GPUs, and dollars over days where tokens are given; `-` is the terminal."""
    suffix = PurePath(path).suffix.lower()
    if path == STDOUT:
        write_text(path, sweep_text(sweep))
    elif suffix == ".html":
        write_text(path, sweep_page(sweep), force)
    else:
        write_bytes(path, image(drawn_sweep(sweep), "png" if suffix == ".png" else "svg"), force)


def series_of(sweep: Sweep) -> list[Series]:
    """The points that fit, by their options other than the number of GPUs."""
    axes, found = [axis for axis in swept_axes(sweep) if axis != "gpus"], dict[str, list[Point]]()
    for point in sweep.points:
        if point.step_s is not None:
            name = ", ".join(written(point.options[axis]) for axis in axes if axis in point.options)
            found.setdefault(name, []).append(point)
    return [Series(name, sorted(points, key=lambda point: point.num_gpus)) for name, points in found.items()]


def _panels(sweep: Sweep) -> list[tuple[Axis, Axis]]:
    has_costs = any(point.usd is not None for point in sweep.points)
    return [(GPUS, RATE), *([(DAYS, DOLLARS)] if has_costs else [])]


def drawn_sweep(sweep: Sweep) -> Figure:
    """The panels beside each other."""
    panels = _panels(sweep)
    made = figure(5.4 * len(panels), 4.0)
    with drawing():
        for number, (x, y) in enumerate(panels, 1):
            _draw(made.add_subplot(1, len(panels), number), sweep, x, y)
    return made


def _draw(axes: Any, sweep: Sweep, x: Axis, y: Axis) -> None:
    """One panel: a line per series, intervals as bars, the ideal and the goal as dashed lines; bars where all points
    have one number of GPUs."""
    if x is GPUS and _has_one_x(sweep):
        return _draw_bars(axes, sweep, y)
    for number, series in enumerate(series_of(sweep)):
        points = [point for point in series.points if None not in (x.value(point), y.value(point))]
        if points:
            axes.errorbar(
                [x.value(point) for point in points], [y.value(point) for point in points],
                xerr=_errors(points, x), yerr=_errors(points, y), label=series.name or None, capsize=2, linewidth=1.2,
                color=PALETTE[number % len(PALETTE)], marker=MARKERS[number % len(MARKERS)], markersize=4,
            )  # fmt: skip
        if x is GPUS and len(points) > 1:
            _draw_ideal(axes, points, PALETTE[number % len(PALETTE)])
    goals = {"days": (axes.axvline, sweep.goal.deadline_days), "dollars": (axes.axhline, sweep.goal.budget_usd)}
    for axis, (line, value) in goals.items():
        if value is not None and axis in (x.label, y.label):
            line(value, color="0.4", linestyle="--", linewidth=1)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    axes.set_title(TITLES[x.label], loc="left", size=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: large(value))
    numbers = sorted({point.num_gpus for point in sweep.points if point.step_s is not None})
    if x is GPUS and len(numbers) <= MOST_TICKS:
        axes.set_xticks(numbers)
    axes.grid()
    if any(series.name for series in series_of(sweep)):
        axes.legend()


def _has_one_x(sweep: Sweep) -> bool:
    return len({point.num_gpus for point in sweep.points if point.step_s is not None}) == 1


def _draw_ideal(axes: Any, points: Sequence[Point], colour: str) -> None:
    """A dashed line of as many tokens a second and GPU as the fewest GPUs have."""
    ends, first = (points[0].num_gpus, points[-1].num_gpus), points[0]
    each = (first.tokens_per_s or 0.0) / first.num_gpus
    axes.plot(ends, [each * gpus for gpus in ends], color=colour, linestyle=":", linewidth=1)
    axes.annotate(
        "ideal", (ends[1], each * ends[1]), xytext=(-3, 3), textcoords="offset points", ha="right", size=8, color=colour
    )


def _draw_bars(axes: Any, sweep: Sweep, y: Axis) -> None:
    """A bar per point, the first on top."""
    series = [one for one in series_of(sweep) if one.points]
    values = [y.value(one.points[0]) or 0.0 for one in series]
    errors = _errors([one.points[0] for one in series], y)
    axes.barh(range(len(series)), values, 0.6, xerr=errors, color=PALETTE[0], error_kw={"capsize": 3, "linewidth": 1})
    axes.set_yticks(range(len(series)), [one.name or "all" for one in series])
    axes.invert_yaxis()
    axes.set_xlabel(y.label)
    axes.xaxis.set_major_formatter(lambda value, _: large(value))
    axes.set_title(f"{series[0].points[0].num_gpus:,} GPUs", loc="left", size=10)
    axes.grid(axis="x")


def _errors(points: Sequence[Point], axis: Axis) -> list[list[float]] | None:
    pairs = [(axis.value(point), axis.interval(point)) for point in points]
    if any(value is None or interval is None for value, interval in pairs):
        return None
    return [[v - i[0] for v, i in pairs if i and v], [i[1] - v for v, i in pairs if i and v]]


def sweep_text(sweep: Sweep) -> str:
    """The panels for 80 columns."""
    panels = []
    if _has_one_x(sweep):
        return _bars_of(sweep)
    for x, y in _panels(sweep):
        plot = plotille.Figure()
        plot.width, plot.height, plot.with_colors = 56, 14, False
        plot.x_label, plot.y_label = x.label, y.label
        plot.register_label_formatter(float, _tick)
        plot.register_label_formatter(int, _tick)
        for number, series in enumerate(series_of(sweep)):
            pairs = [(x.value(point), y.value(point)) for point in series.points]
            known = [pair for pair in pairs if None not in pair]
            plot.plot([a for a, _ in known], [b for _, b in known], label=series.name or None, marker=MARKERS[number])
        panels.append(plot.show(legend=any(series.name for series in series_of(sweep))))
    return "\n\n".join(panels) + "\n"


def _bars_of(sweep: Sweep) -> str:
    """A bar per point, for 80 columns."""
    rates = [(one.name or "all", one.points[0].tokens_per_s or 0.0) for one in series_of(sweep) if one.points]
    most, wide = max(rate for _, rate in rates), min(30, max(len(name) for name, _ in rates))
    rows = (f"{name[:30]:{wide}}  {bar(rate / most, 32)}  {large(rate)} tokens/s" for name, rate in rates)
    return "\n".join(rows) + "\n"


def _tick(value: float, chars: int, delta: float, left: bool = False, write: Callable[[float], str] = large) -> str:
    return write(value).ljust(chars) if left else write(value).rjust(chars)


def sweep_page(sweep: Sweep) -> str:
    """One HTML file that needs nothing else: the picture and the table of all points."""
    heads, rows = as_rows(sweep)
    title = "GPUs, time and money"
    body = section(
        "All points", table(heads, rows, "l" * len(swept_axes(sweep)) + "r" * (len(heads) - len(swept_axes(sweep))))
    )
    picture = tag("figure", svg(drawn_sweep(sweep), title))
    return page(title, tag("header", tag("h1", title), tag("p", says(sweep))), picture, body)


COLUMNS = 600
_MOST_ROWS = 40


def draw_memory(answer: MemoryAnswer, stage: MemoryOfStage, path: str, force: bool = False) -> None:
    """Draw a stage's curve to a file; `-` is the terminal."""
    suffix = PurePath(path).suffix.lower()
    if path == STDOUT:
        write_text(path, memory_text(stage))
    elif suffix == ".html":
        write_text(path, memory_page(answer, stage), force)
    else:
        write_bytes(path, image(drawn_memory(stage), "png" if suffix == ".png" else "svg"), force)


def _arrays(stage: MemoryOfStage) -> tuple[Any, Any, Any]:
    """Times, all bytes, and those of activations."""
    times_s, allocated = np.array(stage.curve, dtype=np.float64).T
    return times_s, allocated, np.array(stage.curve_activations_bytes, dtype=np.float64)


def drawn_memory(stage: MemoryOfStage) -> Figure:
    """A stack of what is there all the time, then activations, then what is there for a moment, then the reserve."""
    times_s, allocated, activations = _arrays(stage)
    factor, unit = unit_for(float(times_s[-1]))
    memory = stage.memory
    # of what happens within a column, the most is drawn
    edges_s, _, total = envelope(times_s, allocated, COLUMNS)
    held = envelope(times_s, activations, COLUMNS).high
    made = figure(8.0, 4.0)
    with drawing():
        axes = made.add_subplot()
        below = np.zeros(len(total))
        state = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        layers: list[tuple[str, Any]] = [
            ("weights", memory.weights_bytes),
            ("gradients", memory.gradients_bytes),
            ("optimizer", memory.optimizer_bytes),
            ("activations", held),
            ("logits" if memory.logits_bytes else "workspace", total - held - state),
            ("reserved", memory.reserved_bytes),
        ]
        for name, size in layers:
            above = below + size / GIB
            colour = MEMORY_COLOURS[name]
            axes.stairs(above, edges_s * factor, baseline=below, fill=True, color=colour, label=name)
            below = above
        peak = stage.peak_bytes + memory.reserved_bytes
        axes.plot([stage.peak_s * factor], [peak / GIB], "v", color=INK, markersize=4)
        draw_capacity(axes, stage.capacity_bytes, peak)
        axes.set_xlim(0, float(times_s[-1]) * factor)
        axes.set_xlabel(f"time in the step, {unit}")
        axes.set_title(title(stage))
        made.legend(loc="outside lower center", ncols=6, fontsize=8, handlelength=1, columnspacing=1.2)
    return made


def title(stage: MemoryOfStage) -> str:
    """The stage and its peak."""
    total = gibibytes(stage.memory.total_bytes)
    return f"Stage {stage.stage}: {gibibytes(stage.peak_bytes)} GiB of tensors at the peak, {total} GiB in all"


def memory_text(stage: MemoryOfStage) -> str:
    """The curve for 80 columns."""
    times_s, allocated, _ = _arrays(stage)
    factor, unit = unit_for(float(times_s[-1]))
    edges_s, _, total = envelope(times_s, allocated + stage.memory.reserved_bytes, 56)
    plot = plotille.Figure()
    plot.width, plot.height, plot.with_colors = 56, 16, False
    plot.x_label, plot.y_label = unit, "GiB"
    plot.set_y_limits(0, 1.05 * max(stage.capacity_bytes, stage.memory.total_bytes) / GIB)
    plot.set_x_limits(0, float(times_s[-1]) * factor)
    plot.register_label_formatter(float, partial(_tick, write="{:.1f}".format))
    plot.plot((np.repeat(edges_s, 2)[1:-1] * factor).tolist(), (np.repeat(total, 2) / GIB).tolist())
    plot.plot([0.0, float(times_s[-1]) * factor], 2 * [stage.capacity_bytes / GIB])
    capacity = f"The line is the GPU's memory, {gibibytes(stage.capacity_bytes)} GiB."
    return f"{title(stage)}\n\n{plot.show()}\n{capacity}\n"


def memory_page(answer: MemoryAnswer, stage: MemoryOfStage) -> str:
    """One HTML file that needs nothing else: the picture, and the largest tensors at the peak."""
    rows = [
        (gibibytes(group.num_bytes), group.first.item, group.name, group.holders, group.first.freed_by or "stays")
        for group in grouped(stage.tensors)[:_MOST_ROWS]
    ]
    heads = ("GiB", "item", "tensor", "of", "the first is freed by")
    head = tag("header", tag("h1", f"Memory of stage {stage.stage}"), tag("p", f"{answer.model}, {answer.layout}"))
    picture = tag("figure", svg(drawn_memory(stage), title(stage)))
    return page(title(stage), head, picture, section("At the peak", table(heads, rows, "rllll")))
