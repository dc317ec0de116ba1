"""The step that months of training sustain, beside the one that a benchmark would show.

    sustained step = predicted step · factor

A benchmark is short, tuned and freshly started. Over months clocks fall with the temperature of the day, some node is
always slow, and data wait now and then. Failures, restarts, checkpoints and evaluation are no part of the factor: they
are goodput's. The factor is the median over published production runs of the measured step over the predicted one, so
that its interval holds the error of the prediction too.
"""

from __future__ import annotations

import math

from planner.answer import PricedLayout, Sustained, half_width
from planner.months.facts import load_facts

WIDEST_OF_RUNS = 0.16
"""Half-width of the widest benchmark interval among the runs that the factor was read from, but for GPUs that are known
from a data sheet only (DeepSeek-V3's); errors as large are in the factor's interval."""


def with_sustained(layout: PricedLayout, straggler_fraction: float = 0.0) -> PricedLayout:
    """The layout with its sustained step.

    Where the benchmark is less sure than those of the runs that the factor was read from, the excess is added to the
    factor's interval, as variances, at each end. A slow rank that the step already waits for is part of the factor,
    and is taken out of it, down to the jitter that clean runs show.
    """
    facts, step = load_facts(), layout.step
    factor = max(facts.sustained_factor.value / (1 + straggler_fraction), facts.jitter_factor.value)
    step_s, benchmark_s = factor * step.step_s, step.step_s_interval or (step.step_s, step.step_s)
    known = half_width((facts.sustained_factor.low, facts.sustained_factor.high))
    low, high = (math.hypot(known, _excess(abs(math.log(end_s / step.step_s)))) for end_s in benchmark_s)
    found = Sustained(
        step_s=step_s,
        step_s_interval=(step_s * math.exp(-low), step_s * math.exp(high)),
        source=f"{factor:.3g} × the benchmark: {facts.sustained_factor.source}",
    )
    return layout.model_copy(update={"sustained": found})


def _excess(width: float) -> float:
    """Half-width that a benchmark of such a half-width adds."""
    return math.sqrt(max(0.0, width**2 - WIDEST_OF_RUNS**2))
