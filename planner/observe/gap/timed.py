"""The account of a step as the timers of a log tell it, and a prediction cut in the same way."""

from __future__ import annotations

from collections.abc import Mapping

from planner.observe.gap.account import Account
from planner.observe.gap.terms import DATA, GRADIENTS, OPTIMIZER, PASSES
from planner.observe.observation import Observation
from planner.observe.timers import DATA_TIMERS

_TIMED = {
    PASSES: ("forward_backward_s", "forward_s", "backward_s"),
    GRADIENTS: ("gradients_s", "parameters_s"),
    OPTIMIZER: ("optimizer_s",),
}
"""The seconds of an observation's breakdown that each term adds up."""
_INSIDE = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
_BETWEEN = ("pp_comm_s", "bubble_s")
_LEAST_COVERED = 0.5
"""Timers that cover less of a step are of micro-batches, or of parts of it."""


def timed(observation: Observation, where: str) -> Account | None:
    """The account of a run by its timers; None where they do not tell passes apart, or cover too little."""
    breakdown, step_s = observation.breakdown, observation.step_s or 0.0
    parts = {
        term: sum(breakdown[name] for name in names if name in breakdown)
        for term, names in _TIMED.items()
        if any(name in breakdown for name in names)
    }
    if PASSES not in parts or sum(parts.values()) < _LEAST_COVERED * step_s:
        return None
    waited_s = max((timer.max_s for timer in observation.timers if timer.name in DATA_TIMERS), default=0.0)
    if 0 < waited_s < parts[PASSES]:
        parts |= {PASSES: parts[PASSES] - waited_s, DATA: waited_s}
    return Account(where, parts)


def priced(breakdown: Mapping[str, float], tail_s: float, observed: Mapping[str, float], where: str) -> Account:
    """The account of a plan's breakdown, with the terms that timers tell of an observed one.

    A timer of both passes together holds the waits between them; `tail_s` is the end of a step, behind the optimizer.
    """
    waits = _BETWEEN if "forward_backward_s" in observed else ()
    issued_s = max(0.0, breakdown.get("overhead_s", 0.0) - tail_s)
    parts = {PASSES: sum(breakdown.get(name, 0.0) for name in (*_INSIDE, *waits)) + issued_s}
    if any(name in observed for name in _TIMED[GRADIENTS]):
        parts[GRADIENTS] = breakdown.get("exposed_dp_s", 0.0)
    if OPTIMIZER + "_s" in observed:
        parts[OPTIMIZER] = breakdown.get("optimizer_s", 0.0)
    return Account(where, parts)
