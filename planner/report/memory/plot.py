"""A stage's memory over the step as a picture: its items stacked, and the GPU's memory as a line."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np
import plotille
from matplotlib.figure import Figure

from planner.answer.memory import MemoryAnswer, MemoryOfStage
from planner.files import STDOUT, write_bytes, write_text
from planner.report.charts import INK, MEMORY_COLOURS, drawing, figure, image, svg
from planner.report.format import gibibytes, unit_for
from planner.report.html.charts_of_plans import draw_capacity, envelope
from planner.report.html.pieces import page, section, table, tag
from planner.report.memory.text import grouped
from planner.specs.units import GIB

COLUMNS = 600
SUFFIXES = (".png", ".svg", ".html")
_MOST_ROWS = 40


def draw_memory(answer: MemoryAnswer, stage: MemoryOfStage, path: str, force: bool = False) -> None:
    """Draw a stage's curve to a file; `-` is the terminal."""
    suffix = PurePath(path).suffix.lower()
    if path == STDOUT:
        write_text(path, as_text(stage))
    elif suffix == ".html":
        write_text(path, as_page(answer, stage), force)
    else:
        write_bytes(path, image(drawn(stage), "png" if suffix == ".png" else "svg"), force)


def _arrays(stage: MemoryOfStage) -> tuple[Any, Any, Any]:
    """Times, all bytes, and those of activations."""
    times_s, allocated = np.array(stage.curve, dtype=np.float64).T
    return times_s, allocated, np.array(stage.curve_activations_bytes, dtype=np.float64)


def drawn(stage: MemoryOfStage) -> Figure:
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


def as_text(stage: MemoryOfStage) -> str:
    """The curve for 80 columns."""
    times_s, allocated, _ = _arrays(stage)
    factor, unit = unit_for(float(times_s[-1]))
    edges_s, _, total = envelope(times_s, allocated + stage.memory.reserved_bytes, 56)
    plot = plotille.Figure()
    plot.width, plot.height, plot.with_colors = 56, 16, False
    plot.x_label, plot.y_label = unit, "GiB"
    plot.set_y_limits(0, 1.05 * max(stage.capacity_bytes, stage.memory.total_bytes) / GIB)
    plot.set_x_limits(0, float(times_s[-1]) * factor)
    plot.register_label_formatter(float, _tick)
    plot.plot((np.repeat(edges_s, 2)[1:-1] * factor).tolist(), (np.repeat(total, 2) / GIB).tolist())
    plot.plot([0.0, float(times_s[-1]) * factor], 2 * [stage.capacity_bytes / GIB])
    capacity = f"The line is the GPU's memory, {gibibytes(stage.capacity_bytes)} GiB."
    return f"{title(stage)}\n\n{plot.show()}\n{capacity}\n"


def _tick(value: float, chars: int, delta: float, left: bool = False) -> str:
    text = f"{value:.1f}"
    return text.ljust(chars) if left else text.rjust(chars)


def as_page(answer: MemoryAnswer, stage: MemoryOfStage) -> str:
    """One HTML file that needs nothing else: the picture, and the largest tensors at the peak."""
    rows = [
        (gibibytes(group.num_bytes), group.first.item, group.name, group.holders, group.first.freed_by or "stays")
        for group in grouped(stage.tensors)[:_MOST_ROWS]
    ]
    heads = ("GiB", "item", "tensor", "of", "the first is freed by")
    head = tag("header", tag("h1", f"Memory of stage {stage.stage}"), tag("p", f"{answer.model}, {answer.layout}"))
    picture = tag("figure", svg(drawn(stage), title(stage)))
    return page(title(stage), head, picture, section("At the peak", table(heads, rows, "rllll")))
