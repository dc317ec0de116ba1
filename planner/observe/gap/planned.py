"""The account of a step as a plan prices it, of any of its pipeline ranks, or cut as the timers of a log cut theirs."""

from __future__ import annotations

from collections.abc import Mapping

from planner.layout.candidate import Candidate
from planner.layout.compute_terms import compute_by_kernels
from planner.layout.outside_pipeline import exchanged_dp_s
from planner.layout.seconds import Pipeline
from planner.layout.step.inside import LATE, exchanges_of_passes
from planner.observe.describe import DATA_TIMERS
from planner.observe.gap.account import (
    ATTENTION,
    BUBBLE,
    COPIES,
    DATA,
    EXCHANGES,
    GRADIENTS,
    HOST_GAPS,
    MEMORY_BOUND,
    OPTIMIZER,
    OTHER,
    PASSES,
    PP_LINK_RATE,
    PRODUCTS,
    WAITS,
    Account,
    GroupExchanges,
)
from planner.observe.observation import Observation
from planner.physics.passes import COMM_GROUPS


def planned(candidate: Candidate, pipeline: Pipeline, rank: int, where: str) -> Account:
    """The account of a pipeline rank; it adds up to the candidate's step."""
    pricing, shape, cost = candidate.pricing, candidate.shape, candidate.rank_costs[rank]
    kernels, outside = compute_by_kernels(candidate, rank), candidate.outside
    busy_s, transfer_s = float(pipeline.busy_s[rank]), float(pipeline.transfer_s[rank])
    issued_s = busy_s - candidate.num_microbatches * float(cost.total_s)
    alone_s, uneven_s = float(pricing.unpaired_s(shape)), float(pricing.uneven_s(shape))
    step_overhead_s = float(pricing.runtime.step_overhead_s)
    parts = {
        PRODUCTS: kernels["products_s"],
        ATTENTION: kernels["attention_s"],
        MEMORY_BOUND: kernels["memory_bound_s"],
        OTHER: 0.0,
        BUBBLE: pipeline.makespan_s - busy_s - transfer_s,
        PP_LINK_RATE: transfer_s,
        OPTIMIZER: float(cost.optimizer_s),
        HOST_GAPS: kernels["host_s"] + issued_s + step_overhead_s,
        COPIES: 0.0,
        # ranks end their step together: with the slowest optimizer, and the one whose documents take most attention
        WAITS: outside.optimizer_s - float(cost.optimizer_s) + uneven_s,
        EXCHANGES: outside.tail_s - alone_s - uneven_s - step_overhead_s,
    }
    exchanges = _inside(candidate, rank, alone_s)
    whole_s = max(exchanged_dp_s(shape, cost), outside.exposed_dp_s)
    if whole_s:
        exchanges["dp"] = GroupExchanges(whole_s, whole_s - outside.exposed_dp_s, 0.0)
    return Account(where, parts, exchanges)


def _inside(candidate: Candidate, rank: int, alone_s: float) -> dict[str, GroupExchanges]:
    """The exchanges inside a rank's passes; those that have no other micro-batch beside them show."""
    cost, times = candidate.rank_costs[rank], candidate.num_microbatches
    passes = exchanges_of_passes(candidate)
    own = [
        one
        for (stage, kind), ones in passes.items()
        for one in ones
        if candidate.placement[stage] == rank and kind in "FB"
    ]
    found = {}
    for group in COMM_GROUPS:
        shown_s = times * float(getattr(cost, f"{group}_forward_s") + getattr(cost, f"{group}_backward_s"))
        hidden_s = times * sum(one.hidden_s for one in own if one.group == group)
        late_s = times * sum(one.exposed_s for one in own if one.group == group and one.name == LATE[group])
        if group == "ep":
            moved_s = min(alone_s, hidden_s)
            shown_s, hidden_s, late_s = shown_s + alone_s, hidden_s - moved_s, 0.0
        if shown_s or hidden_s:
            found[group] = GroupExchanges(shown_s + hidden_s, hidden_s, late_s)
    return found


_TIMED = {
    PASSES: ("forward_backward_s", "forward_s", "backward_s"),
    GRADIENTS: ("gradients_s", "parameters_s"),
    OPTIMIZER: ("optimizer_s",),
}
"""The seconds of an observation's breakdown that each term adds up."""
_INSIDE_PASSES = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
_BETWEEN_PASSES = ("pp_comm_s", "bubble_s")
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
    waits = _BETWEEN_PASSES if "forward_backward_s" in observed else ()
    issued_s = max(0.0, breakdown.get("overhead_s", 0.0) - tail_s)
    parts = {PASSES: sum(breakdown.get(name, 0.0) for name in (*_INSIDE_PASSES, *waits)) + issued_s}
    if any(name in observed for name in _TIMED[GRADIENTS]):
        parts[GRADIENTS] = breakdown.get("exposed_dp_s", 0.0)
    if OPTIMIZER + "_s" in observed:
        parts[OPTIMIZER] = breakdown.get("optimizer_s", 0.0)
    return Account(where, parts)
