"""Switches that a run does not say: its step under their likely values, and the interval that covers them.

The run has each likely value with that value's share (`likely:` in the trainer's file), one switch whatever the others
have, and the step that goes with these values is missed as that of a run that says all: by a lognormal factor, within
the half-width w in 90% of published runs. The interval is that of a run that says all, widened to the 10% and 90%
quantiles of this mixture.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.answer import Interval, PricedLayout, UnsaidSwitch
from planner.layout.assumptions import TOLD_FRACTION
from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of
from planner.months.losses import with_sustained
from planner.physics.pricing import Pricing
from planner.schedule.orders import SCHEDULES
from planner.trainers.generations import imbalance_of, with_likely
from planner.trainers.load import Likely, likely_of
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
    unsaid = []
    for entry, pricing in _likely(candidate):
        other = candidate.priced_as(pricing)
        if abs(other.step_s / candidate.step_s - 1) > TOLD_FRACTION:
            unsaid.append(
                UnsaidSwitch(
                    switch=entry.switch,
                    value=SWITCHES[entry.switch].value_of(candidate.pricing.runtime),
                    other=entry.switches[entry.switch],
                    other_fraction=entry.value,
                    other_step_s=other.step_s,
                )
            )
    return tuple(sorted(unsaid, key=lambda one: -abs(math.log(one.other_step_s / candidate.step_s))))


def _likely(candidate: Candidate) -> Iterator[tuple[Likely, Pricing]]:
    """The entries of the trainer that act on a layout and break no rule of recipes, each with its pricing."""
    pricing, now = candidate.pricing, setting_of(candidate)
    model, training, broken = pricing.model, pricing.training, list(broken_recipe_rules(now))
    for entry in likely_of(pricing.runtime, pricing.cluster.hardware.architecture):
        if not has_effect(entry.switch, now):
            continue
        runtime = with_likely(pricing.runtime, model, entry)
        # a dispatcher left unsaid is one that goes with the rest
        free = runtime if "dispatcher" in entry.switches else runtime.model_copy(update={"dispatcher": ""})
        if any(rule not in broken for rule in broken_recipe_rules(replace(now, runtime=free))):
            continue
        imbalance = imbalance_of(model, entry.switches, pricing.runtime, training.adapters)
        is_fuller = imbalance.mean > training.moe_imbalance
        fuller = training.model_copy(update=imbalance.fields) if is_fuller else training
        other = replace(
            pricing, training=fuller, runtime=runtime.for_schedules(SCHEDULES[candidate.schedule].splits_backward)
        )
        if other != pricing:
            yield entry, other


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
