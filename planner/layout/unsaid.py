"""Switches that a run does not say: its step under their likely values, and the interval that covers them.

The run has each likely value with that value's share (`likely:` in the trainer's file), one switch whatever the others
have, and the step that goes with these values is missed as that of a run that says all: by a lognormal factor, within
the half-width w in 90% of published runs. The interval is that of a run that says all, widened to the 10% and 90%
quantiles of this mixture.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.answer import Interval, PricedLayout, UnsaidSwitch
from planner.layout.assumptions import TOLD_FRACTION
from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of, under
from planner.months.sustained import with_sustained
from planner.trainers.generations import likely_otherwise
from planner.trainers.rules.recipe import broken_recipe_rules, has_effect
from planner.trainers.switches import SWITCHES

DEVIATIONS = 1.645
"""Standard deviations in a half-width of `confidence`: 90% of published runs that say their switches are within one."""
TAIL = 0.1
"""Share of the mixture that lies beyond each end."""
_STEPS = 30
"""Halvings of the bracket in which a quantile is looked for: 1e-9 of it are left."""


def with_unsaid(candidate: Candidate, layout: PricedLayout) -> PricedLayout:
    """The priced layout of a run that says no switch: its interval covers their likely values, which it names."""
    unsaid, interval_s = unsaid_switches(candidate), layout.step.step_s_interval
    if not unsaid or interval_s is None:
        return layout
    step_s, choices = layout.step.step_s, defaultdict[str, list[tuple[float, float]]](list)
    for one in unsaid:
        choices[one.switch].append((math.log(one.other_step_s / step_s), one.other_fraction))
    low, high = mixture_interval(math.log(interval_s[1] / step_s), choices)
    widened = (step_s * math.exp(low), step_s * math.exp(high))
    step = layout.step.model_copy(update={"step_s_interval": widened})
    layout = layout.model_copy(update={"step": step, "unsaid": unsaid})
    return with_sustained(layout, candidate.pricing.training.straggler_fraction)


def unsaid_switches(candidate: Candidate) -> tuple[UnsaidSwitch, ...]:
    """The likely values that move this layout's step by over 2%, the one that moves it most first."""
    pricing, now = candidate.pricing, setting_of(candidate)
    broken = list(broken_recipe_rules(now))
    unsaid = []
    for entry, runtime in likely_otherwise(pricing.runtime, pricing.cluster.hardware, pricing.model):
        name = entry.switch
        if not has_effect(name, now):
            continue
        if any(rule not in broken for rule in broken_recipe_rules(replace(now, runtime=runtime))):
            continue
        other = under(candidate, runtime)
        if abs(other.step_s / candidate.step_s - 1) > TOLD_FRACTION:
            unsaid.append(
                UnsaidSwitch(
                    switch=name,
                    value=SWITCHES[name].value_of(pricing.runtime),
                    other=entry.switches[name],
                    other_fraction=entry.value,
                    other_step_s=other.step_s,
                )
            )
    return tuple(sorted(unsaid, key=lambda one: -abs(math.log(one.other_step_s / candidate.step_s))))


def mixture_interval(width: float, choices: Mapping[str, Sequence[tuple[float, float]]]) -> Interval:
    """The ends of the interval around a step, as natural logarithms of their ratio to it.

    `width` is the half-width where all is said. `choices` has, for each switch that is not, the effect of each other
    value (log of its step over this one) and the share of runs that have it.
    """
    mixture = [(0.0, 1.0)]
    for others in choices.values():
        own = 1 - sum(fraction for _, fraction in others)
        mixture = [(log + effect, p * q) for log, p in mixture for effect, q in ((0.0, own), *others)]
    spread = width / DEVIATIONS * math.sqrt(2)

    def below(log: float) -> float:
        return sum(p * math.erfc((center - log) / spread) for center, p in mixture) / 2

    def quantile(fraction: float) -> float:
        low, high = min(mixture)[0] - 2 * width, max(mixture)[0] + 2 * width
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle) < fraction else (low, middle)
        return high

    return min(-width, quantile(TAIL)), max(width, quantile(1 - TAIL))
