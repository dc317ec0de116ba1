"""Memory over a step as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.layout.memory_curve import MemoryCurve
from planner.report.charts import INK, PALETTE, drawing, figure, svg
from planner.report.format import gibibytes, unit_for
from planner.report.html.charts_memory import HIGH_IN, WIDE_IN, draw_capacity
from planner.report.html.pieces import Html
from planner.specs.units import GIB

FloatArray = npt.NDArray[np.float64]
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


def draw_curves(curves: Sequence[MemoryCurve], capacity_bytes: int) -> Html:
    """Memory over the step of a few stages, with the peak of the fullest of them and the capacity as a line."""
    totals = [curve.peak_bytes + curve.reserved_bytes for curve in curves]
    peak, most_bytes = curves[int(np.argmax(totals))], max(totals)
    factor, unit = unit_for(float(peak.times_s[-1]))
    drawn = figure(WIDE_IN, HIGH_IN)
    with drawing():
        axes = drawn.add_subplot()
        for colour, curve in zip(PALETTE, curves, strict=False):
            name = f"stage {curve.rank}" + (", the fullest" if curve is peak else "")
            edges_s, low, high = envelope(curve.times_s, (curve.allocated_bytes + curve.reserved_bytes) / GIB)
            axes.stairs(high, edges_s * factor, baseline=low, fill=True, color=colour, alpha=0.25, linewidth=0)
            axes.stairs(high, edges_s * factor, baseline=None, color=colour, linewidth=1.1, label=name)
        at, most = peak.peak_s * factor, most_bytes / GIB
        axes.plot([at], [most], "o", color=INK, markersize=3.5)
        is_right = peak.peak_s > 0.6 * float(peak.times_s[-1])
        side = ((-5, 3), "right") if is_right else ((5, 3), "left")
        axes.annotate(
            f"peak {most:.1f}", (at, most), xytext=side[0], textcoords="offset points", ha=side[1], fontsize=8
        )
        draw_capacity(axes, capacity_bytes, most_bytes)
        axes.set_xlim(0, float(peak.times_s[-1]) * factor)
        axes.set_xlabel(f"time in the step, {unit}")
        axes.grid()
        drawn.legend(loc="outside lower center", ncols=2, fontsize=8, handlelength=1.2, columnspacing=1.2)
    label = f"Memory over the step, in GiB; stage {peak.rank} has the highest peak, {gibibytes(most_bytes)} GiB"
    return svg(drawn, label)
