"""Assumptions behind a price: each is changed by itself, and the step is priced again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.layout.candidate import Candidate
from planner.layout.recipe import recipe_of, setting_of, under
from planner.physics.pricing import Pricing
from planner.specs.base import LEAST_RATE
from planner.specs.cluster import tiers_text
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import broken_recipe_rules
from planner.trainers.stated import switched
from planner.trainers.switches import EP_OVERLAP, SWITCHES, Value, written

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


def other_assumptions(pricing: Pricing, beside_switches: bool = False) -> Iterator[Assumption]:
    """All assumptions of this job, each changed by itself for the worse (or for the better where it is the worst).

    A switch that is off and could be on is none of them: it is chosen, or stated. With `beside_switches`, one that is
    on is none of them either: the recipe says what it is worth.
    """
    training, cluster = pricing.training, pricing.cluster
    moe = pricing.model.moe is not None
    yield from _overlaps(pricing, beside_switches)
    slower = training.model_copy(update={"straggler_fraction": training.straggler_fraction + STRAGGLER})
    says = f"the slowest rank computes {slower.straggler_fraction:.0%} slower"
    option = f"--straggler-fraction {slower.straggler_fraction:g}"
    if cluster.num_gpus > 1:  # one GPU waits for no other
        yield Assumption("straggler", says, option, replace(pricing, training=slower))
    if moe:
        fuller = training.model_copy(update={"moe_imbalance": training.moe_imbalance + IMBALANCE})
        says = f"the fullest expert rank gets {fuller.moe_imbalance:g} times the mean tokens"
        option = f"--moe-imbalance {fuller.moe_imbalance:g}"
        yield Assumption("moe_imbalance", says, option, replace(pricing, training=fuller))
    if len(cluster.tiers) > 1 and cluster.num_gpus > (cluster.tiers[0].num_gpus or 0):
        rate = max(cluster.tiers[1].gb_per_s * NETWORK, LEAST_RATE)
        if cluster.network_tiers:
            rates = [{"gb_per_s": max(tier.gb_per_s * NETWORK, LEAST_RATE)} for tier in cluster.network_tiers]
            slower_tiers = tuple(t.model_copy(update=r) for t, r in zip(cluster.network_tiers, rates, strict=True))
            slow, option = cluster.changed(network_tiers=slower_tiers), f"--tier {tiers_text(slower_tiers)}"
        else:
            slow, option = cluster.changed(network_gb_per_s=rate), f"--assume network_gb_per_s={rate:g}"
        says = f"the network between nodes has {rate:g} GB/s a GPU, not {cluster.tiers[1].gb_per_s:g}"
        yield Assumption("network", says, option, replace(pricing, cluster=slow))


def _overlaps(pricing: Pricing, beside_switches: bool) -> Iterator[Assumption]:
    """Assumptions about what hides behind compute."""
    runtime, has = pricing.runtime, switches_of(pricing.runtime)
    moe = pricing.model.moe is not None
    by_switch = {field for name in has for field in SWITCHES[name].touched} if beside_switches else set[str]()
    for name, fields, says in (
        ("data_parallel_overlap", ("gradient_overlap_fraction", "parameter_overlap_fraction"), "data-parallel"),
        ("sharding_overlap", ("fsdp_overlap_fraction",) if 3 in runtime.zero_stages else (), "sharding"),
        (
            "tensor_parallel_overlap",
            ("tp_overlap_fraction", "mla_tp_overlap_fraction", "tp_async_overlap_fraction"),
            "tensor-parallel",
        ),
        ("context_parallel_overlap", ("cp_overlap_fraction",), "context-parallel"),
        (
            "expert_parallel_overlap",
            ("ep_overlap_fraction", "ep_overlap_network_fraction") if moe else (),
            "expert-parallel",
        ),
    ):
        left = [field for field in fields if field not in by_switch and getattr(runtime, field)]
        if left:
            changed = runtime.model_copy(update=dict.fromkeys(left, 0.0))
            option = f"--assume {','.join(f'{field}=0' for field in left)}"
            no = "no" if by_switch.isdisjoint(fields) else "no other"
            yield Assumption(
                name, f"{no} {says} exchange hides behind compute", option, replace(pricing, runtime=changed)
            )
    if moe and not runtime.ep_overlap_fraction and "ep_overlap" not in has:
        fields = ("ep_overlap_fraction", "ep_overlap_network_fraction")
        hidden = runtime.model_copy(update=dict.fromkeys(fields, EP_OVERLAP))
        option = f"--assume {','.join(f'{field}={EP_OVERLAP:g}' for field in fields)}"
        says = f"{EP_OVERLAP:.0%} of expert exchange hides"
        yield Assumption("expert_parallel_overlap", says, option, replace(pricing, runtime=hidden))
    if runtime.interleaved_p2p_overlap and "interleaved_p2p_overlap" not in by_switch:
        waits = runtime.model_copy(update={"interleaved_p2p_overlap": False, "p2p_overlap": False})
        says, option = "pipeline sends do not overlap compute", "--assume interleaved_p2p_overlap=false"
        yield Assumption("pipeline_overlap", says, option, replace(pricing, runtime=waits))
    if not (runtime.cuda_graphs or runtime.graphed_modules or (beside_switches and "cuda_graph" in has)):
        yield _without_host(pricing)


def _without_host(pricing: Pricing) -> Assumption:
    """The assumption that CUDA graphs replay what they can: whole iterations, or the layers of a mixture."""
    runtime, has = pricing.runtime, switches_of(pricing.runtime)
    recipe: dict[str, Value] = {"cuda_graph": "full_iteration", "nan_checks": False}
    if pricing.model.moe is not None:
        recipe = {"cuda_graph": "attn+moe_router"}
    if all(value in has.get(name, ()) for name, value in recipe.items()):
        option = f"--switch {','.join(f'{name}={written(value)}' for name, value in recipe.items())}"
        changed = switched(runtime, recipe)
    else:
        option, changed = "--assume cuda_graphs=true", runtime.model_copy(update={"cuda_graphs": True})
    says = "no kernel waits for the host, as in CUDA graphs"
    if changed.graphed_modules:
        says = "CUDA graphs replay attention and routing"
    return Assumption("host", says, option, replace(pricing, runtime=changed))


def told_assumptions(candidate: Candidate, with_switches: bool = False) -> tuple[str, ...]:
    """Assumptions that change this layout's step by more than 2%, the largest first: effect, change, option.

    With `with_switches`, the switches of a run that someone described are among them, each changed by itself. An order
    that was made to measure is judged as the named schedule that it started from.
    """
    plain = candidate if candidate.made_order is None else replace(candidate, made_order=None)
    effects: list[tuple[float, str, str]] = []
    assumptions = [*other_assumptions(candidate.pricing, beside_switches=True)]
    if with_switches and candidate.pricing.model.moe is None and not candidate.pricing.runtime.cuda_graphs:
        # the one value that needs another switch's beside it
        assumptions.append(_without_host(candidate.pricing))
    for other in assumptions:
        changed = plain.priced_as(other.pricing)
        effects.append((changed.step_s / plain.step_s - 1, other.says, other.option))
    if with_switches:
        effects += _switches(plain)
    effects.sort(key=lambda effect: -abs(effect[0]))
    return tuple(
        f"{effect:+.1%} if {says} ({option})" for effect, says, option in effects if abs(effect) > TOLD_FRACTION
    )


def _switches(candidate: Candidate) -> Iterator[tuple[float, str, str]]:
    """The effect of the best other value of each switch that acts on a layout, as far as no consent is needed.

    A switch at its plainest value is left out if that is also its fastest.
    """
    runtime = candidate.pricing.runtime
    for name, now in recipe_of(candidate).items():
        others = [value for value in switches_of(runtime)[name] if value not in (now, *SWITCHES[name].consent)]
        moved = [(value, under(candidate, switched(runtime, {name: value}))) for value in others]
        legal = [(other.step_s, value) for value, other in moved if not any(broken_recipe_rules(setting_of(other)))]
        if legal:
            step_s, value = min(legal, key=lambda pair: pair[0])
            effect, said = step_s / candidate.step_s - 1, f"{name}={written(value)}"
            if effect < 0 or now != next(iter(SWITCHES[name].values)):
                yield effect, f"the recipe has {said}", f"--switch {said}"
