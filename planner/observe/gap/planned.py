"""The account of a step as a plan prices it, of any of its pipeline ranks."""

from __future__ import annotations

from planner.layout.candidate import Candidate
from planner.layout.compute_terms import compute_by_kernels
from planner.layout.outside_pipeline import exchanged_dp_s
from planner.layout.seconds import Pipeline
from planner.layout.step.inside import LATE, exchanges_of_passes
from planner.observe.gap.account import Account, Exchanges
from planner.observe.gap.terms import (
    ATTENTION,
    BUBBLE,
    COPIES,
    EXCHANGES,
    HOST_GAPS,
    MEMORY_BOUND,
    OPTIMIZER,
    OTHER,
    PP_LINK_RATE,
    PRODUCTS,
    WAITS,
)
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
        exchanges["dp"] = Exchanges(whole_s, whole_s - outside.exposed_dp_s, 0.0)
    return Account(where, parts, exchanges)


def _inside(candidate: Candidate, rank: int, alone_s: float) -> dict[str, Exchanges]:
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
            found[group] = Exchanges(shown_s + hidden_s, hidden_s, late_s)
    return found
