"""Assumptions behind a price: each is changed by itself, and the step is priced again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.layout.candidate import Candidate
from planner.physics.pricing import Pricing
from planner.specs.cluster import ClusterSpec
from planner.trainers.switches import EP_OVERLAP

STRAGGLER, IMBALANCE, NETWORK = 0.1, 0.5, 0.5
"""Fractions by which assumptions are changed: a slow rank, a full expert, a slow network."""
TOLD_FRACTION = 0.02
"""Least change of the step, as a fraction, for which an assumption is reported."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption, and the change that tests it."""

    name: str
    says: str
    option: str
    """Command-line option with which a user makes the same change."""
    pricing: Pricing


def other_assumptions(pricing: Pricing) -> Iterator[Assumption]:
    """All assumptions of this job, each changed by itself for the worse (or for the better where it is the worst)."""
    runtime, training, cluster = pricing.runtime, pricing.training, pricing.cluster
    moe = pricing.model.moe is not None
    for name, fields, says in (
        ("data_parallel_overlap", ("gradient_overlap_fraction", "parameter_overlap_fraction"), "data-parallel"),
        ("sharding_overlap", ("fsdp_overlap_fraction",) if 3 in runtime.zero_stages else (), "sharding"),
        (
            "tensor_parallel_overlap",
            ("tp_overlap_fraction", "mla_tp_overlap_fraction", "tp_async_overlap_fraction"),
            "tensor-parallel",
        ),
        ("context_parallel_overlap", ("cp_overlap_fraction",), "context-parallel"),
        ("expert_parallel_overlap", ("ep_overlap_fraction",) if moe else (), "expert-parallel"),
    ):
        shown = [field for field in fields if getattr(runtime, field)]
        if shown:
            changed = runtime.model_copy(update=dict.fromkeys(fields, 0.0))
            option = f"--assume {','.join(f'{field}=0' for field in shown)}"
            yield Assumption(
                name, f"no {says} exchange hides behind compute", option, replace(pricing, runtime=changed)
            )
    if moe and not runtime.ep_overlap_fraction:
        hidden = runtime.model_copy(update={"ep_overlap_fraction": EP_OVERLAP})
        says, option = f"{EP_OVERLAP:.0%} of expert exchange hides", f"--assume ep_overlap_fraction={EP_OVERLAP:g}"
        yield Assumption("expert_parallel_overlap", says, option, replace(pricing, runtime=hidden))
    if runtime.interleaved_p2p_overlap:
        waits = runtime.model_copy(update={"interleaved_p2p_overlap": False, "p2p_overlap": False})
        says, option = "pipeline sends do not overlap compute", "--assume interleaved_p2p_overlap=false"
        yield Assumption("pipeline_overlap", says, option, replace(pricing, runtime=waits))
    if not runtime.cuda_graphs:
        graphs = runtime.model_copy(update={"cuda_graphs": True})
        says, option = "no kernel waits for the host, as in CUDA graphs", "--assume cuda_graphs=true"
        yield Assumption("host", says, option, replace(pricing, runtime=graphs))
    slower = training.model_copy(update={"straggler_fraction": training.straggler_fraction + STRAGGLER})
    says = f"the slowest rank computes {slower.straggler_fraction:.0%} slower"
    option = f"--straggler-fraction {slower.straggler_fraction:g}"
    yield Assumption("straggler", says, option, replace(pricing, training=slower))
    if moe:
        fuller = training.model_copy(update={"moe_imbalance": training.moe_imbalance + IMBALANCE})
        says = f"the fullest expert rank gets {fuller.moe_imbalance:g} times the mean tokens"
        option = f"--moe-imbalance {fuller.moe_imbalance:g}"
        yield Assumption("moe_imbalance", says, option, replace(pricing, training=fuller))
    if len(cluster.tiers) > 1 and cluster.num_gpus > (cluster.tiers[0].num_gpus or 0):
        rate = cluster.tiers[1].gb_per_s * NETWORK
        # a copy would keep the links that were worked out for this cluster
        fields_of = {field: getattr(cluster, field) for field in ClusterSpec.model_fields}
        slow = ClusterSpec(**fields_of | {"network_gb_per_s": rate})
        says = f"the network between nodes has {rate:g} GB/s a GPU, not {rate / NETWORK:g}"
        yield Assumption("network", says, f"--assume network_gb_per_s={rate:g}", replace(pricing, cluster=slow))


def told_assumptions(candidate: Candidate) -> tuple[str, ...]:
    """Assumptions that change this layout's step by more than 2%, the largest first: effect, change, option.

    An order that was made to measure is judged as the named schedule that it started from.
    """
    plain = replace(candidate, made_order=None)
    effects = []
    for other in other_assumptions(candidate.pricing):
        changed = replace(plain, pricing=other.pricing, table=other.pricing.table(candidate.shape))
        effects.append((changed.step_s / plain.step_s - 1, other))
    effects.sort(key=lambda pair: -abs(pair[0]))
    return tuple(f"{effect:+.1%} if {o.says} ({o.option})" for effect, o in effects if abs(effect) > TOLD_FRACTION)
