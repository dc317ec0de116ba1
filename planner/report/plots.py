"""A sweep and a stage's memory as pictures that matplotlib draws (extra `plot`), loaded where one is asked for.

`figure()` makes an empty figure, `image()` writes it. The same figure makes the same bytes, whatever the user's own
matplotlib settings are.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import PurePath
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from planner.answer import Interval
from planner.decide.sweep import Point, Sweep
from planner.errors import SpecError
from planner.files import write_bytes
from planner.layout.alive import MemoryOfStage
from planner.report.decisions import swept_axes
from planner.report.format import gibibytes, large, unit_for
from planner.report.pictures import MEMORY_COLOURS, PALETTE, envelope
from planner.specs.base import grouped
from planner.specs.units import GIB
from planner.trainers.switches import written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # a first run would note that it looks for fonts
INK, SOFT, LINE, ALARM, PAPER = "#1c2128", "#59636e", "#d5dae0", "#b3261e", "#fefefe"
"""Colours of text, quiet text, grids, alarms and background."""
_SETTINGS = {
    "svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": LINE, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "system-ui", "sans-serif"], "text.parse_math": False,
}  # fmt: skip
_LOCK = RLock()
"""A lock, since all threads share matplotlib's settings."""


@contextmanager
def drawing() -> Iterator[None]:
    """A context with our matplotlib settings in place of the user's own."""
    from matplotlib import style

    with _LOCK, style.context(["default", _SETTINGS]):
        yield


def figure(width_in: float, height_in: float) -> Figure:
    """An empty figure. Draw on it inside `with drawing():`, which gives new axes our settings."""
    from matplotlib.figure import Figure

    with drawing():
        return Figure(figsize=(width_in, height_in), layout="constrained")


def image(drawn: Figure, kind: Literal["png", "svg", "pdf"]) -> bytes:
    """The figure as a file's bytes."""
    file = io.BytesIO()
    dates = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with drawing():
        drawn.savefig(file, format=kind, dpi=150, metadata=dates[kind])
    return file.getvalue()


def draw_capacity(axes: Any, capacity_bytes: int, most_bytes: float) -> None:
    """The line of the GPU's memory, and an axis of GiB that has room for it."""
    capacity = capacity_bytes / GIB
    axes.axhline(capacity, color=ALARM, linestyle="--", linewidth=1.1)
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(f"GPU {capacity:.1f}", (1.0, capacity), xytext=(0, 2), color=ALARM, fontsize=8, **place)
    axes.set_ylim(0, 1.09 * max(capacity, most_bytes / GIB))
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.set_ylabel("GiB")


MARKERS = "osD^vPX"
SUFFIXES = (".png", ".svg")
MOST_TICKS = 8
"""The most numbers of GPUs that are each marked on the axis."""


def check_picture(path: str, name: str) -> None:
    """Raise SpecError unless a picture can be drawn to `path`; `name` is for one that has none."""
    if PurePath(path).suffix.lower() not in SUFFIXES:
        stem = (PurePath(path).stem or name).strip("-") or name
        raise SpecError(f"--plot: {path}: no such kind of picture", f"name it {stem}.svg or {stem}.png")
    import_module("matplotlib")  # before what is drawn has been worked out


class Series(NamedTuple):
    """Points that differ in the number of GPUs only."""

    name: str
    points: list[Point]


class Axis(NamedTuple):
    """One quantity of every point, with its interval."""

    label: str
    value: Callable[[Point], float | None]
    interval: Callable[[Point], Interval | None]


GPUS = Axis("GPUs", lambda point: point.num_gpus, lambda point: None)
RATE = Axis("tokens per second", lambda point: point.tokens_per_s, lambda point: point.tokens_per_s_interval)
DAYS = Axis("days", lambda point: point.days, lambda point: point.days_interval)
DOLLARS = Axis("dollars", lambda point: point.usd, lambda point: point.usd_interval)


TITLES = {GPUS.label: "How it scales; dotted: as the fewest GPUs do", DAYS.label: "What time costs"}
"""Titles of the panels, by the quantities of their axes."""


def write_picture(drawn: Figure, path: str, force: bool = False) -> None:
    """Write a figure to a file."""
    write_bytes(path, image(drawn, "png" if PurePath(path).suffix.lower() == ".png" else "svg"), force)


def series_of(sweep: Sweep) -> list[Series]:
    """The points that fit, by their options other than the number of GPUs."""
    axes = [axis for axis in swept_axes(sweep) if axis != "gpus"]
    found = grouped(
        (", ".join(written(point.options[axis]) for axis in axes if axis in point.options), point)
        for point in sweep.points
        if point.step_s is not None
    )
    return [Series(name, sorted(points, key=lambda point: point.num_gpus)) for name, points in found.items()]


def drawn_sweep(sweep: Sweep) -> Figure:
    """Tokens per second over GPUs, and dollars over days where tokens are given, beside each other."""
    panels = [(GPUS, RATE), *([(DAYS, DOLLARS)] if any(point.usd is not None for point in sweep.points) else [])]
    made = figure(5.4 * len(panels), 4.0)
    with drawing():
        for number, (x, y) in enumerate(panels, 1):
            _draw(made.add_subplot(1, len(panels), number), sweep, x, y)
    return made


def _draw(axes: Any, sweep: Sweep, x: Axis, y: Axis) -> None:
    """One panel: a line per series, intervals as bars, the ideal and the goal as dashed lines; bars where all points
    have one number of GPUs."""
    numbers = sorted({point.num_gpus for point in sweep.points if point.step_s is not None})
    if x is GPUS and len(numbers) == 1:
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
    if x is GPUS and len(numbers) <= MOST_TICKS:
        axes.set_xticks(numbers)
    axes.grid()
    if any(series.name for series in series_of(sweep)):
        axes.legend()


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
    series = series_of(sweep)
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


COLUMNS = 600


def drawn_memory(stage: MemoryOfStage) -> Figure:
    """A stack of what is there all the time, then activations, then what is there for a moment, then the reserve."""
    times_s, allocated = np.array(stage.curve, dtype=np.float64).T
    factor, unit = unit_for(float(times_s[-1]))
    memory = stage.memory
    # of what happens within a column, the most is drawn
    edges_s, _, total = envelope(times_s, allocated, COLUMNS)
    held = envelope(times_s, np.array(stage.curve_activations_bytes, dtype=np.float64), COLUMNS).high
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
