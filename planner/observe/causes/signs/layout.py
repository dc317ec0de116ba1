"""Signs in the layout and the recipe: what the run itself says of them, and what another choice would give by the plan."""

from __future__ import annotations

from dataclasses import replace

from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import LEAST, Sign, sure
from planner.report.format import seconds
from planner.specs.units import GIB

_WORTH = 0.04
"""A change is worth a word from a share of the step on that no noise hides."""


def recomputes_with_room(seen: Seen) -> Sign | None:
    """Layers recomputed although the run leaves the memory that keeping their activations takes."""
    candidate, observation = seen.case.candidate, seen.case.observation
    if candidate is None:
        return None
    split = candidate.split
    if split.base == "none" and not split.recomputed:
        return Sign(LEAST, "nothing is recomputed")
    kept = candidate.with_split(replace(split, base="none", recomputed=()))
    gain_s = candidate.step_s - kept.step_s
    room = candidate.pricing.cluster.hardware.memory_bytes - max(stage.total_bytes for stage in kept.memory)
    if observation.peak_memory_kind == "allocated" and observation.peak_memory_bytes is not None:
        planned = max(stage.peak_allocated_bytes for stage in candidate.memory)
        room -= max(0.0, observation.peak_memory_bytes - planned)
    says = f"keeping what is recomputed leaves {room / GIB:.1f} GiB free and saves {seconds(gain_s)} of a step"
    if room <= 0 or gain_s <= 0:
        return Sign(LEAST, says)
    return Sign(sure(gain_s / candidate.step_s, _WORTH, _WORTH / 4), says, gain_s)


def large_bubble(seen: Seen) -> Sign | None:
    """A pipeline whose own order leaves much of the step empty."""
    plan = seen.case.plan
    if plan is None:
        return None
    share = plan.step.bubble_fraction
    says = f"the order of the passes leaves {share:.0%} of a step empty"
    return Sign(sure(share, 0.15, 0.03), says, plan.step.breakdown.bubble_s)
