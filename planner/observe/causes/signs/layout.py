"""Signs in the layout: what another choice would give by the plan, and what its own order leaves empty."""

from __future__ import annotations

from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import LEAST, Sign, sure
from planner.observe.remedy.change import recompute_of
from planner.observe.remedy.estimate import best_of
from planner.observe.remedy.moves import fewer_recomputed
from planner.observe.remedy.running import running, states_switches
from planner.report.format import seconds
from planner.specs.units import GIB

_WORTH = 0.04
"""A change is worth a word from a share of the step on that no noise hides."""


def recomputes_with_room(seen: Seen) -> Sign | None:
    """Layers recomputed although the run leaves the memory that keeping their activations takes, and the risk's share.

    The layout is the plan's, with what the log says otherwise.
    """
    now = running(seen.case)
    if now is None:
        return None
    if recompute_of(now) == {"recompute": "none"}:
        return Sign(LEAST, "nothing is recomputed")
    kept = best_of(now, fewer_recomputed(now))
    if kept is None:
        return Sign(LEAST, "the memory is needed")
    free, gain_s = -max(kept.excess_bytes) + kept.pricing.headroom_bytes, now.step_s - kept.step_s
    says = f"recomputing less leaves {max(0.0, free) / GIB:.1f} GiB free and saves {seconds(gain_s)} of a step"
    return Sign(sure(gain_s / now.step_s, _WORTH, _WORTH / 4), says, gain_s)


def large_bubble(seen: Seen) -> Sign | None:
    """A pipeline whose own order leaves much of the step empty."""
    plan = seen.case.plan
    if plan is None:
        return None
    share = plan.step.bubble_fraction
    says = f"the order of the passes leaves {share:.0%} of a step empty"
    return Sign(sure(share, 0.15, 0.03), says, plan.step.breakdown.bubble_s)


def switched_off(seen: Seen, cause: str) -> Sign | None:
    """Switches that the log shows at a slower value, and what that costs by the price."""
    if seen.case.prediction is None or not states_switches(seen.case):
        return None
    terms = seen.switched.get(cause, ())
    cost_s = sum(term.seconds for term in terms)
    says = "; ".join(term.evidence for term in terms)
    where = terms[0].term.removeprefix("recipe: ") if cause == "recipe" and terms else ""
    return Sign(sure(cost_s / seen.case.prediction.step_s, 0.02, 0.007), says, max(0.0, cost_s), where)
