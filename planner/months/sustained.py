"""The step that months of training sustain, beside the one that a benchmark would show.

    sustained step = predicted step · factor

A benchmark is short, tuned and freshly started. Over months clocks fall with the temperature of the day, some node is
always slow, and data wait now and then. Failures, restarts, checkpoints and evaluation are no part of the factor: they
are goodput's. The factor is the median over published production runs of the measured step over the predicted one, so
that its interval holds the error of the prediction too.
"""

from __future__ import annotations

import math

from planner.answer import PricedLayout, Sustained
from planner.months.facts import load_facts


def sustained(layout: PricedLayout, *, known: bool, straggler_fraction: float = 0.0) -> Sustained:
    """The sustained step of a layout.

    `known` says that production runs of its kind were published: on GPUs whose kernels were measured, with layers of
    attention. Without, the benchmark's own interval is added. A slow rank that the step already waits for is part of
    the factor, and is taken out of it, down to the jitter that clean runs show.
    """
    facts = load_facts()
    factor = max(facts.sustained_factor.value / (1 + straggler_fraction), facts.jitter_factor.value)
    step_s, benchmark_s = factor * layout.step.step_s, layout.step.step_s_interval
    widths = [math.log(facts.sustained_factor.high / facts.sustained_factor.low) / 2]
    if not known and benchmark_s is not None:
        widths.append(math.log(benchmark_s[1] / benchmark_s[0]) / 2)
    width = math.hypot(*widths)
    return Sustained(
        step_s=step_s,
        step_s_interval=(step_s * math.exp(-width), step_s * math.exp(width)),
        source=f"{factor:.3g} × the benchmark: {facts.sustained_factor.source}",
    )
