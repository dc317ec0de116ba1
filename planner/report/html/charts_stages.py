"""The seconds of each stage as a chart."""

from __future__ import annotations

import numpy as np

from planner.answer import PricedLayout
from planner.report.charts import ACTION_COLOURS, INK, LINE, PALETTE, PAPER, drawing, figure, hint, svg
from planner.report.format import seconds, unit_for
from planner.report.html.charts_memory import HIGH_IN, WIDE_IN, stage_axis
from planner.report.html.pieces import Html


def draw_stage_seconds(layout: PricedLayout) -> Html:
    """A bar per stage: its computing and its exchanges over all micro-batches, and the rest of the step."""
    step_s, stages, count = layout.step.step_s, layout.stages, layout.parallelism.num_microbatches
    factor, unit = unit_for(step_s)
    spent = {
        "forward": (ACTION_COLOURS["F"], [count * stage.forward_s for stage in stages]),
        "backward": (ACTION_COLOURS["B"], [count * stage.backward_s for stage in stages]),
        "exchanges": (PALETTE[1], [count * (stage.forward_comm_s + stage.backward_comm_s) for stage in stages]),
    }
    used = np.sum([values for _, values in spent.values()], axis=0)
    spent["waits and the rest"] = (LINE, np.maximum(step_s - used, 0.0).tolist())
    drawn, hints, below = figure(WIDE_IN, HIGH_IN), list[str](), np.zeros(len(stages))
    with drawing():
        axes = drawn.add_subplot()
        for name, (colour, values) in spent.items():
            sizes = np.array(values) * factor
            bars = axes.bar(
                range(len(stages)), sizes, 0.84, bottom=below, label=name, color=colour, edgecolor=PAPER, linewidth=0.4
            )
            for stage, value, bar in zip(stages, values, bars, strict=True):
                bar.set_gid(hint(len(hints)))
                hints.append(f"stage {stage.stage}, {name}: {seconds(value, step_s)}")
            below += sizes
        axes.axhline(step_s * factor, color=INK, linewidth=0.8)
        axes.set_ylim(0, 1.05 * float(below.max()))
        axes.set_ylabel(f"{unit} of a step")
        stage_axis(axes, len(stages))
        drawn.legend(loc="outside lower center", ncols=4, fontsize=8, handlelength=1, columnspacing=1.2)
    return svg(drawn, f"Seconds of each stage in a step of {seconds(step_s)}", hints)
