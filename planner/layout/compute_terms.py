"""The compute seconds of a step, cut into products, attention, memory-bound kernels, recomputing and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout.candidate import Candidate
from planner.layout.split import held_parts
from planner.layout.step.inside import Beats, Part
from planner.physics import compute
from planner.physics.cost import PartCost
from planner.physics.operators import Item, operators_of
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


def compute_by_kernels(candidate: Candidate, rank: int) -> dict[str, float]:
    """Seconds of a step that a rank computes, by the kernels that run; they add up to its compute.

    Unlike `compute_terms`, products that are recomputed, or of the ends of the model, count as products. Copies, casts
    and accumulation are `memory_bound_s`; `host_s` is what the GPU waits for its host.
    """
    beats, known = Beats(candidate), dict[object, dict[str, float]]()
    factor = candidate.num_microbatches * (candidate.rank_factors[rank] if candidate.rank_factors else 1.0)
    terms = dict.fromkeys((*KINDS.values(), "host_s"), 0.0)
    for stage, holder in enumerate(candidate.placement):
        for part in beats.parts(stage) if holder == rank else ():
            key = (part.layer or part.name, part.mode)
            if key not in known:
                known[key] = _by_kernels(candidate, part, *beats.items(part))
            for term, seconds in known[key].items():
                terms[term] += factor * seconds
    return terms


def _by_kernels(candidate: Candidate, part: Part, items: Sequence[Item], replayed: Sequence[Item]) -> dict[str, float]:
    """Seconds of one micro-batch through a part, forward and backward, by kernels."""
    pricing, shape = candidate.pricing, candidate.shape
    hardware, training = pricing.cluster.hardware, pricing.training
    slow, terms = lateness(training, pricing.cluster), dict.fromkeys(KINDS.values(), 0.0)
    for ops, backward in ((operators_of(items), True), (operators_of(replayed), False)):
        for op in ops:
            passes = compute.operator_seconds(op, hardware, training.dtype, pricing.runtime)
            terms[KINDS[op.kind]] += slow * float(sum(passes) if backward else passes.forward_s)
    priced, again = pricing.passes.seconds(items, shape), pricing.passes.seconds(replayed, shape, replayed=True)
    priced_s = sum(float(priced[name]) for name in _COMPUTES) + (float(again["forward_s"]) if replayed else 0.0)
    late_s = max(0.0, min(priced_s, _computed_s(part.cost)) - sum(terms.values()))
    terms["memory_bound_s"] += _computed_s(part.cost) - late_s - sum(terms.values())
    return terms | {"host_s": late_s}


_COMPUTES = ("forward_s", "input_grad_s", "weight_grad_s")


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
