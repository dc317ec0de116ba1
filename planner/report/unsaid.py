"""The words for switches that a run does not say: the one that matters most, and what its other value would do."""

from __future__ import annotations

from planner.answer import PricedLayout
from planner.report.format import percent
from planner.trainers.switches import written


def says_unsaid(layout: PricedLayout) -> str:
    """`ep_overlap; true would be 12% faster (dispatcher and cuda_graph too)`; empty where every switch is said."""
    if not layout.unsaid:
        return ""
    most, step_s = layout.unsaid[0], layout.step.step_s
    faster = most.other_step_s < step_s
    effect = percent(abs(most.other_step_s / step_s - 1), 0)
    says = f"{most.switch}; {written(most.other)} would be {effect} {'faster' if faster else 'slower'}"
    others = [name for name in dict.fromkeys(one.switch for one in layout.unsaid) if name != most.switch]
    return f"{says}; nor {', '.join(others)}" if others else says
