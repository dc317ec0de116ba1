"""The best few layouts, each priced again under assumptions that may turn out otherwise.

A search proves its layout best under one set of assumptions. The layouts next to it are often within a percent, and
one that overlaps less, or crosses the network less, loses less where an assumption fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.answer import AS_PLANNED, PricedLayout, RobustStep
from planner.layout.assumptions import TOLD_FRACTION, other_assumptions
from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of
from planner.physics.pricing import Pricing
from planner.schedule.orders import SCHEDULES
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES

NUM_LAYOUTS = 4
"""The most layouts that are compared, the best among them."""
NO_OVERLAP = "no overlap: no collective hides behind compute"
DEFAULT_SWITCHES = "default switches: the recipe is the trainer's own"
WORDS = {"network": "half the network", "straggler": "slow rank", "moe_imbalance": "uneven experts"}
"""Short words for the assumptions of `other_assumptions` that are changed here; the rest is told of the best alone."""


def assumed_steps(candidates: Sequence[Candidate], trainer: RuntimeSpec) -> dict[str, list[float]]:
    """The step of each candidate as planned and under each assumption that all of them know.

    `trainer` is the runtime with the trainer's own switches. Memory is not looked at: a layout is taken to fit.
    """
    assumed = [dict(_assumptions(candidate, trainer)) for candidate in candidates]
    shared = [name for name in assumed[0] if all(name in others for others in assumed)]
    return {AS_PLANNED: [candidate.step_s for candidate in candidates]} | {
        name: [_step_s(candidate, others[name]) for candidate, others in zip(candidates, assumed, strict=True)]
        for name in shared
    }


def robust_steps(layouts: Sequence[PricedLayout], assumed_s: Mapping[str, Sequence[float]]) -> tuple[RobustStep, ...]:
    """The step of each layout as planned and under each assumption that matters, layout by layout, the best first.

    An assumption matters if it moves one of the steps by more than `TOLD_FRACTION` or makes another layout the fastest.
    Nothing is returned where none does.
    """
    planned_s = [layout.step.step_s for layout in layouts]
    told = {n: s for n, s in assumed_s.items() if n != AS_PLANNED and _matters(planned_s, s)}
    steps_s = {AS_PLANNED: planned_s, **told} if told else {}
    return tuple(
        RobustStep(layout=str(layout.parallelism), assumption=name, step_s=seconds[place])
        for place, layout in enumerate(layouts)
        for name, seconds in steps_s.items()
    )


def _step_s(candidate: Candidate, pricing: Pricing) -> float:
    return candidate.step_s if pricing == candidate.pricing else candidate.priced_as(pricing).step_s


def _matters(planned_s: Sequence[float], changed_s: Sequence[float]) -> bool:
    """True where a step moves by more than `TOLD_FRACTION`, or another layout than the best becomes the fastest."""
    moves = max(abs(after / before - 1) for before, after in zip(planned_s, changed_s, strict=True))
    return moves > TOLD_FRACTION or min(changed_s) < changed_s[0]


def _assumptions(candidate: Candidate, trainer: RuntimeSpec) -> Iterator[tuple[str, Pricing]]:
    """The pricing of a candidate under each changed assumption that it knows, by the assumption's words."""
    pricing = candidate.pricing
    yield NO_OVERLAP, replace(pricing, runtime=_without_overlap(pricing.runtime))
    for other in other_assumptions(pricing):
        if other.name in WORDS:
            yield f"{WORDS[other.name]}: {other.says}", other.pricing
    # what saves memory is still needed
    saving = {name: SWITCHES[name].value_of(pricing.runtime) for name in switches_of(trainer)}
    saving = {name: value for name, value in saving.items() if SWITCHES[name].only_saves_memory}
    default = switched(trainer, saving).for_schedules(SCHEDULES[candidate.schedule].splits_backward)
    if not any(broken_recipe_rules(replace(setting_of(candidate), runtime=default))):
        yield DEFAULT_SWITCHES, replace(pricing, runtime=default)


def _without_overlap(runtime: RuntimeSpec) -> RuntimeSpec:
    """The runtime in which no collective hides behind compute; transfers between stages stay as they are."""
    fractions = [name for name in RuntimeSpec.model_fields if "overlap" in name and name.endswith("_fraction")]
    return runtime.model_copy(update=dict.fromkeys(fractions, 0.0))
