"""Memory as a chart: what fills the GPU of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.answer import StagePlan
from planner.report.charts import ALARM, INK, MEMORY_COLOURS, PAPER, drawing, figure, hint, svg
from planner.report.format import gibibytes
from planner.report.html.pieces import Html
from planner.report.labels import MEMORY
from planner.specs.units import GIB

PARTS = {name: label for name, label in MEMORY.items() if name != "total_bytes"}
WIDE_IN, HIGH_IN = 4.5, 3.1
"""Inches of a chart that stands beside another one, and whose words can be read on a phone."""
_LEAST_SLOTS = 5
"""Bars for which there is room at least: a single one is not as wide as the chart."""


def stage_axis(axes: Any, num_stages: int) -> None:
    """An axis of whole numbers, with room on both sides of few stages."""
    room = max(0, _LEAST_SLOTS - num_stages) / 2
    axes.set_xlim(-0.6 - room, num_stages - 0.4 + room)
    axes.set_xlabel("stage")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if num_stages < _LEAST_SLOTS:
        axes.set_xticks(range(num_stages))
    axes.grid(axis="y")


def draw_stacks(stages: Sequence[StagePlan], capacity_bytes: int) -> Html:
    """A bar per stage of what fills its GPU, with the interval of the whole and the capacity as a line."""
    drawn, hints = figure(WIDE_IN, HIGH_IN), list[str]()
    with drawing():
        axes = drawn.add_subplot()
        below = np.zeros(len(stages))
        for name, label in PARTS.items():
            sizes = np.array([getattr(stage.memory, name) for stage in stages]) / GIB
            if not sizes.any():
                continue
            bars = axes.bar(
                range(len(stages)), sizes, 0.84, bottom=below, label=label, color=MEMORY_COLOURS[label],
                edgecolor=PAPER, linewidth=0.4,
            )  # fmt: skip
            for stage, bar in zip(stages, bars, strict=True):
                bar.set_gid(hint(len(hints)))
                hints.append(f"stage {stage.stage}, {label}: {gibibytes(getattr(stage.memory, name))} GiB")
            below += sizes
        most = max(below.max(), *(_whiskers(axes, stages)))
        draw_capacity(axes, capacity_bytes, most * GIB)
        stage_axis(axes, len(stages))
        drawn.legend(loc="outside lower center", ncols=4, fontsize=8, handlelength=1, columnspacing=1.2)
    label = f"Memory of each stage by item, in GiB, beside the {gibibytes(capacity_bytes)} GiB of a GPU"
    return svg(drawn, label, hints)


def _whiskers(axes: Any, stages: Sequence[StagePlan]) -> list[float]:
    """Draw the 80% interval of each stage's total where it is known; gives the upper ends in GiB."""
    known = [(number, stage.memory) for number, stage in enumerate(stages) if stage.memory.total_bytes_interval]
    ends = np.array([memory.total_bytes_interval for _, memory in known]).reshape(-1, 2).T / GIB
    totals = np.array([memory.total_bytes for _, memory in known]) / GIB
    if not known:
        return [0.0]
    errors = np.maximum([totals - ends[0], ends[1] - totals], 0.0)
    axes.errorbar(
        [n for n, _ in known], totals, errors, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2, capthick=0.8
    )
    return [0.0, *ends[1].tolist()]


def draw_capacity(axes: Any, capacity_bytes: int, most_bytes: float) -> None:
    """The line of the GPU's memory, and an axis of GiB that has room for it."""
    capacity = capacity_bytes / GIB
    axes.axhline(capacity, color=ALARM, linestyle="--", linewidth=1.1)
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(f"GPU {capacity:.1f}", (1.0, capacity), xytext=(0, 2), color=ALARM, fontsize=8, **place)
    axes.set_ylim(0, 1.09 * max(capacity, most_bytes / GIB))
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.set_ylabel("GiB")
