"""The compute seconds of a step, cut into products, attention, memory-bound kernels, recomputing and the rest."""

from __future__ import annotations

from planner.layout.candidate import Candidate
from planner.layout.split import held_parts
from planner.physics import compute
from planner.physics.cost import PartCost
from planner.physics.operators import operators_of
from planner.physics.passes import lateness
from planner.specs.model import LayerKind

KINDS = {"gemm": "products_s", "attention": "attention_s", "elementwise": "memory_bound_s", "scan": "memory_bound_s"}
"""The term that each kind of operator counts to."""


def compute_terms(candidate: Candidate, rank: int) -> dict[str, float]:
    """Seconds of a step that a rank computes, by term; they add up to its compute.

    Layers count as the GPU takes them if it never waits for the host. `other_compute_s` has the rest: what the GPU
    waits for its host, casts, accumulation.
    """
    pricing, table, split = candidate.pricing, candidate.table, candidate.split
    factor = candidate.num_microbatches * (candidate.rank_factors[rank] if candidate.rank_factors else 1.0)
    terms = dict.fromkeys((*KINDS.values(), "recompute_s", "ends_s"), 0.0)
    folded = candidate.placement[0] == candidate.placement[-1]
    for stage, modes in enumerate(split.modes(pricing.model)):
        if candidate.placement[stage] != rank:
            continue
        for _, part in held_parts(table, split, stage, folded):
            terms["ends_s"] += factor * _computed_s(part)
        for (kind, mode), count in modes.items():
            repeated_s = float(table.layers[kind, mode].input_grad_s - table.layers[kind, "none"].input_grad_s)
            terms["recompute_s"] += factor * count * repeated_s
            for term, seconds in _layer_seconds(candidate, kind).items():
                terms[term] += factor * count * seconds
    compute_s = candidate.num_microbatches * _computed_s(candidate.rank_costs[rank])
    return terms | {"other_compute_s": compute_s - sum(terms.values())}


def _computed_s(cost: PartCost) -> float:
    return float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)


def _layer_seconds(candidate: Candidate, kind: LayerKind) -> dict[str, float]:
    """Seconds of one micro-batch through one layer, forward and backward, by kind of operator."""
    pricing, terms = candidate.pricing, dict.fromkeys(KINDS.values(), 0.0)
    items = pricing.layer(kind, candidate.shape)
    hardware, dtype, slow = (
        pricing.cluster.hardware,
        pricing.training.dtype,
        lateness(pricing.training, pricing.cluster),
    )
    for op in operators_of(items):
        passes = compute.operator_seconds(op, hardware, dtype, pricing.runtime)
        terms[KINDS[op.kind]] += slow * float(sum(passes))
    return terms
