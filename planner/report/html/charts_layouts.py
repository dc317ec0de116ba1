"""Layouts beside each other as charts: steps with their intervals, and steps against memory."""

from __future__ import annotations

from collections.abc import Sequence

from planner.report.charts import ALARM, INK, LINE, PALETTE, SOFT, drawing, figure, hint, svg
from planner.report.format import gibibytes, unit_for
from planner.report.html.charts_memory import HIGH_IN, WIDE_IN
from planner.report.html.pieces import Html
from planner.report.rows import Entry
from planner.specs.units import GIB

BEST, OTHER = PALETTE[1], PALETTE[0]


def draw_steps(entries: Sequence[Entry]) -> Html:
    """The step of each layout with its 80% interval; the first of them is the best, whose interval is a band."""
    factor, unit = unit_for(entries[0].step_s)
    drawn, hints = figure(WIDE_IN, HIGH_IN), list[str]()
    with drawing():
        axes = drawn.add_subplot()
        for row, entry in enumerate(entries):
            colour, ends = OTHER if row else BEST, entry.step_s_interval
            if ends is not None:
                axes.plot([end * factor for end in ends], [row, row], color=colour, linewidth=2.2, alpha=0.45)
                if row == 0:
                    axes.axvspan(*(end * factor for end in ends), color=LINE, alpha=0.4, linewidth=0)
            marker = axes.plot([entry.step_s * factor], [row], "o" if row else "D", color=colour, markersize=5)
            marker[0].set_gid(hint(row))
            hints.append(f"{entry.name} {entry.sizes}: {entry.step}")
        axes.set_yticks(range(len(entries)), [entry.name for entry in entries], color=INK)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.set_xlabel(f"step, {unit}; bars are 80% intervals" if entries[0].step_s_interval else f"step, {unit}")
        axes.grid(axis="x")
    return svg(drawn, f"The step of the best layout and its {len(entries) - 1} alternatives with intervals", hints)


def front(entries: Sequence[Entry]) -> list[Entry]:
    """Those that no other one beats in both step and memory, the fastest first."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.step_s, entry.peak_bytes)):
        if not kept or entry.peak_bytes < kept[-1].peak_bytes:
            kept.append(entry)
    return kept


def draw_pareto(entries: Sequence[Entry], capacity_bytes: int) -> Html:
    """Step against memory of the fullest GPU, with its interval; a line joins those that none beats in both."""
    factor, unit = unit_for(entries[0].step_s)
    drawn, hints, best = figure(WIDE_IN, HIGH_IN), list[str](), front(entries)
    with drawing():
        axes = drawn.add_subplot()
        axes.plot(
            [entry.step_s * factor for entry in best], [entry.peak_bytes / GIB for entry in best], color=SOFT,
            linewidth=1, linestyle=":", drawstyle="steps-post",
        )  # fmt: skip
        for number, entry in enumerate(entries):
            at, peak, colour = entry.step_s * factor, entry.peak_bytes / GIB, OTHER if number else BEST
            if entry.peak_bytes_interval is not None:
                ends = [end / GIB for end in entry.peak_bytes_interval]
                axes.plot([at, at], ends, color=colour, linewidth=2.2, alpha=0.35)
            fill = colour if entry in best else "none"
            (mark,) = axes.plot([at], [peak], "o" if number else "D", color=colour, markersize=5, markerfacecolor=fill)
            mark.set_gid(hint(number))
            hints.append(f"{entry.name} {entry.sizes}: {entry.step}, {gibibytes(entry.peak_bytes)} GiB")
            # neighbours may lie on each other: one is named above and the other below
            below = (5, -10) if number % 2 == 0 and number else (5, 4)
            axes.annotate(entry.name.rstrip("."), (at, peak), xytext=below, textcoords="offset points", fontsize=8)
        capacity = capacity_bytes / GIB
        axes.axhline(capacity, color=ALARM, linestyle="--", linewidth=1.1)
        axes.annotate(
            f"GPU {capacity:.1f}", (0.0, capacity), xycoords=("axes fraction", "data"), xytext=(3, 2),
            textcoords="offset points", color=ALARM, fontsize=8, va="bottom",
        )  # fmt: skip
        axes.margins(x=0.08, y=0.12)
        axes.set_xlabel(f"step, {unit}")
        axes.set_ylabel("GiB of the fullest GPU")
        axes.grid()
    return svg(drawn, "Step against memory of the fullest GPU, for the best layout and its alternatives", hints)
