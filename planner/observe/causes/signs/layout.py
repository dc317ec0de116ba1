"""Signs in the layout: what another choice would give by the plan, and what its own order leaves empty."""

from __future__ import annotations

from dataclasses import replace

from planner.layout.candidate import Candidate
from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import LEAST, Sign, sure
from planner.report.format import seconds
from planner.specs.units import GIB

_WORTH = 0.04
"""A change is worth a word from a share of the step on that no noise hides."""


def recomputes_with_room(seen: Seen) -> Sign | None:
    """Layers recomputed although the run leaves the memory that keeping their activations takes."""
    candidate = seen.case.candidate
    if candidate is None:
        return None
    split = candidate.split
    fewer = dict.fromkeys((replace(split, base="none", recomputed=()), replace(split, recomputed=())))
    fewer.pop(split, None)
    if not fewer:
        return Sign(LEAST, "nothing is recomputed")
    above = _above_bytes(seen, candidate)
    room, gain_s = max(_room_and_gain(candidate, candidate.with_split(other), above) for other in fewer)
    says = f"keeping what is recomputed leaves {room / GIB:.1f} GiB free and saves {seconds(gain_s)} of a step"
    if room <= 0 or gain_s <= 0:
        return Sign(LEAST, "the memory is needed")
    return Sign(sure(gain_s / candidate.step_s, _WORTH, _WORTH / 4), says, gain_s)


def _above_bytes(seen: Seen, candidate: Candidate) -> float:
    """Bytes that the run allocates above the predicted peak."""
    observation = seen.case.observation
    if observation.peak_memory_kind != "allocated" or observation.peak_memory_bytes is None:
        return 0.0
    return max(0.0, observation.peak_memory_bytes - max(stage.peak_allocated_bytes for stage in candidate.memory))


def _room_and_gain(candidate: Candidate, kept: Candidate, above_bytes: float) -> tuple[float, float]:
    """Bytes that are left where less is recomputed, none of them if it does not fit, and the seconds that it saves."""
    hardware = candidate.pricing.cluster.hardware
    room = hardware.memory_bytes - max(stage.total_bytes for stage in kept.memory) - above_bytes
    return (room, candidate.step_s - kept.step_s) if room > 0 else (0.0, 0.0)


def large_bubble(seen: Seen) -> Sign | None:
    """A pipeline whose own order leaves much of the step empty."""
    plan = seen.case.plan
    if plan is None:
        return None
    share = plan.step.bubble_fraction
    says = f"the order of the passes leaves {share:.0%} of a step empty"
    return Sign(sure(share, 0.15, 0.03), says, plan.step.breakdown.bubble_s)


def switched_off(seen: Seen, cause: str) -> Sign | None:
    """Switches that the log shows otherwise than the plan has them, and what that costs by the price."""
    terms = [term for name, term in seen.switched if name == cause]
    if not terms or seen.case.prediction is None:
        return None
    cost_s = sum(term.seconds for term in terms)
    says = "; ".join(term.evidence for term in terms)
    return Sign(sure(cost_s / seen.case.prediction.step_s, 0.02, 0.007), says, max(0.0, cost_s))
